"""What a request may ask of its tokens: each feature restated in plain code over transformers' logits."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_network import EagerNetwork
from transformers import AutoTokenizer

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint

EOS = (257, 11, 12)
PROMPTS = [[5, 9, 5, 9, 40], [61], [3, 3, 3, 70, 71, 72, 73]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral", seed=7, with_tokenizer=True)
    (path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    return path


@pytest.fixture(scope="module")
def network(checkpoint: Path) -> EagerNetwork:
    return EagerNetwork(checkpoint)


@pytest.fixture(scope="module", params=[1, 2], ids=lambda depth: f"depth{depth}")
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        str(checkpoint), max_model_len=64, max_num_batched_tokens=6, max_num_seqs=4, block_size=4,
        kv_cache_memory_bytes="4MiB", async_depth=request.param, num_threads=1,
    ) as opened:  # fmt: skip
        yield opened


def expected_tokens(network: EagerNetwork, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy decoding with everything a request may ask for, one token at a time."""
    output: list[int] = []
    tokenizer = AutoTokenizer.from_pretrained(network.path)
    bad = [tokenizer.encode(text, add_special_tokens=False) for word in params.bad_words for text in (word, " " + word)]
    while len(output) < params.max_tokens:
        logits = network.logits(prompt + output)[-1]
        if params.allowed_token_ids is not None:
            forbidden = sorted(set(range(len(logits))) - set(params.allowed_token_ids))
            logits[forbidden] = -torch.inf
        for *head, last in bad:
            if not head or output[-len(head) :] == head:
                logits[last] = -torch.inf
        if len(output) < params.min_tokens:
            logits[[*EOS, *params.stop_token_ids]] = -torch.inf
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        for token in set(prompt + output):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(output).items():
            logits[token] -= params.presence_penalty + count * params.frequency_penalty
        output.append(int(logits.argmax()))
        if output[-1] in EOS or output[-1] in params.stop_token_ids:
            break
    return output


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 1},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -2.0, "presence_penalty": -1.0},
        {"logit_bias": {"30": 4.0, "31": 4.5, "257": 3.0}},
        {"allowed_token_ids": [11, 12, 40, 41, 42, 257], "min_tokens": 5},
        {"min_tokens": 10, "logit_bias": {11: 50, 12: 60, 257: 70, 99: 80}, "stop_token_ids": [99]},
        {"min_tokens": 3, "logit_bias": {12: 60}},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "logit_bias": {44: 3},
            "min_tokens": 4,
            "bad_words": ["a"],
        },
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_features_in_plain_code(
    llm: LLM, network: EagerNetwork, asked: dict[str, Any]
) -> None:
    """B121 too: the ends come from the configuration (257) and the generation configuration (11, 12)."""
    params = SamplingParams(**({"temperature": 0, "max_tokens": 12} | asked))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = expected_tokens(network, prompt, params)
        [completion] = output.outputs
        assert completion.token_ids == expected
        ended = expected[-1] in EOS or expected[-1] in params.stop_token_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.stop_reason == (expected[-1] if expected[-1] in params.stop_token_ids else None)


def test_n_completions_are_those_of_n_requests_with_following_seeds(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(20))}
    asked = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 8, "ignore_eos": True}
    [several] = llm.generate([prompt], SamplingParams(n=5, seed=40, **asked), use_tqdm=False)
    singles = llm.generate([prompt] * 5, [SamplingParams(seed=40 + i, **asked) for i in range(5)], use_tqdm=False)
    assert [c.token_ids for c in several.outputs] == [single.outputs[0].token_ids for single in singles]
    assert len({tuple(c.token_ids) for c in several.outputs}) > 1
    assert [c.index for c in several.outputs] == [0, 1, 2, 3, 4]


def test_a_stop_string_over_tokens_ends_text_and_tokens_where_it_ends(llm: LLM) -> None:
    """Cut from the text that the same request writes without it, at every place and length."""
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    letters = {"allowed_token_ids": [llm.get_tokenizer().encode(c, add_special_tokens=False)[0] for c in "abcde "]}
    [free] = llm.generate(["go"], SamplingParams(**params, **letters), use_tqdm=False)
    text, token_ids = free.outputs[0].text, free.outputs[0].token_ids
    assert len(text) == len(token_ids) == 24, "one token a letter"
    rng = random.Random(4)
    print("seed 4")
    for _ in range(6):
        start = rng.randrange(20)
        stop = text[start : start + rng.randint(1, 5)]
        end = text.index(stop) + len(stop)
        for include in (False, True):
            asked = SamplingParams(**params, **letters, stop=["zzz", stop], include_stop_str_in_output=include)
            [completion] = llm.generate(["go"], asked, use_tqdm=False)[0].outputs
            assert completion.text == text[: end if include else end - len(stop)]
            assert completion.token_ids == token_ids[:end]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_streamed_text_never_takes_anything_back(llm: LLM) -> None:
    """B112: random bytes make broken characters; what was shown stays, and the end is the whole."""
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=40, ignore_eos=True, stop=["zz"])
    shown = [output.outputs[0].text for output in llm.stream("x", params)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    [whole] = llm.generate(["x"], params, use_tqdm=False)[0].outputs
    assert shown[-1] == whole.text
