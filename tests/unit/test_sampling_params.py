"""What a request may ask of the sampler: each mistake is named with value, bound and remedy."""

import pytest

from trimtab.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": "no"}, r"bad_words \('no'\) must be a list; give words"),
        ({"bad_words": ["ok", " "]}, "must hold words with visible characters"),
        ({"bad_words": [5]}, "must hold words with visible characters"),
        ({"stop": 5}, r"stop \(5\) must be a list; give strings"),
        ({"stop_token_ids": 5}, r"stop_token_ids \(5\) must be a list; give token ids"),
        ({"stop_token_ids": "12"}, r"stop_token_ids \('12'\) must be a list"),
        ({"allowed_token_ids": {3: 1}}, r"allowed_token_ids \({3: 1}\) must be a list"),
        ({"allowed_token_ids": []}, r"allowed_token_ids \(\[\]\) must name at least one token"),
        ({"logit_bias": [3]}, r"logit_bias \(\[3\]\) must map token ids to numbers"),
        ({"logit_bias": {"a": 3}}, r"logit_bias \('a'\) must be an integer; keys are token ids"),
        ({"logit_bias": {1.5: 3}}, r"logit_bias \(1.5\) must be an integer"),
        ({"logit_bias": {"7": "x"}}, r"logit_bias\[7\] \('x'\) must be a number"),
    ],
)
def test_a_list_or_mapping_of_the_wrong_kind_is_named(params, message):
    """B115. A string given where a list belongs would fall apart into characters, each a word of its own."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3, 1e308, "x", True])
def test_a_number_that_is_none_or_out_of_range_is_refused(name, value):
    """B115: NaN passes a range check that is written the wrong way round."""
    with pytest.raises(ValueError, match=f"{name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [0, -1, "5", 1.5, True])
def test_max_tokens_is_a_number_of_tokens_or_none(value):
    """B114."""
    with pytest.raises(ValueError, match="max_tokens "):
        SamplingParams(max_tokens=value)


def test_lists_are_copied_and_text_keys_become_ids():
    stop, ids = ["a"], (4, 5)
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias={"7": 1}, bad_words=None)
    stop.append("b")
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.bad_words) == (["a"], [4, 5], {7: 1.0}, [])
    assert SamplingParams(stop="end").stop == ["end"]
