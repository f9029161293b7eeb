"""`LLM` as a user meets it: what is empty, too long or broken is said by name, and the next request is served."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint

TWO = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixtral"), with_tokenizer=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), max_model_len=64, kv_cache_memory_bytes="2MiB", num_threads=1) as opened:
        yield opened


def with_template(checkpoint: Path, tmp_path: Path, template: str | None) -> LLM:
    shutil.copytree(checkpoint, tmp_path / "model")
    file = tmp_path / "model" / "chat_template.jinja"
    file.unlink() if template is None else file.write_text(template)
    return LLM(str(tmp_path / "model"), max_model_len=64, kv_cache_memory_bytes="2MiB", num_threads=1)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template; use generate with a plain prompt"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refused the messages: roles must alternate",
        ),
        ("{% for %}", "the chat template refused the messages: "),
        ("{{ messages[0].content.split() }}", "the chat template refused the messages: .*has no attribute 'split'"),
    ],
    ids=["missing", "raises", "syntax error", "parts"],
)
def test_a_template_that_fails_is_an_error_with_its_own_words(
    checkpoint: Path, tmp_path: Path, template: str | None, message: str
) -> None:
    """B120: and a model without a template still completes plain prompts."""
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    with with_template(checkpoint, tmp_path, template) as llm:
        with pytest.raises(ValueError, match=message):
            llm.chat([parts], TWO)
        [output] = llm.generate(["hi"], TWO, use_tqdm=False)
        assert output.error is None and len(output.outputs[0].token_ids) == 2


def test_a_chat_prompt_has_the_templates_tokens_and_no_others(llm: LLM) -> None:
    """A second beginning-of-text token, added by the tokenizer, would spoil every answer."""
    [output] = llm.chat([USER], TWO, use_tqdm=False)
    assert output.prompt == "user: hi\nassistant: "
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)


def test_several_conversations_are_answered_like_each_alone(llm: LLM) -> None:
    other = [{"role": "system", "content": "s"}, USER]
    together = llm.chat([[USER], other], TWO, use_tqdm=False)
    alone = [llm.chat(messages, TWO, use_tqdm=False)[0] for messages in ([USER], other)]
    assert [output.outputs[0].token_ids for output in together] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("prompt", ["", [""], [[]], {"prompt": ""}, {"prompt_token_ids": []}], ids=str)
def test_an_empty_prompt_fails_by_name_and_the_next_is_served(llm: LLM, prompt: Any) -> None:
    """B114"""
    [output] = llm.generate(prompt, TWO, use_tqdm=False)
    assert "the prompt is empty; give at least one token" in output.error
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
    [after] = llm.generate(["x"], TWO, use_tqdm=False)
    assert after.error is None


def test_no_prompt_at_all_gives_no_output_and_no_message_an_error(llm: LLM) -> None:
    """B114"""
    assert llm.generate([], TWO) == []
    with pytest.raises(ValueError, match=r"messages \(\[\]\) must hold at least one message"):
        llm.chat([[]], TWO)


def test_the_fitted_length_is_the_one_that_admits(checkpoint: Path) -> None:
    """B113: the model says 512, the KV cache holds 65: told, a prompt of 65 refused, one of 64 gives one token."""
    with LLM(str(checkpoint), max_num_seqs=2, kv_cache_memory_bytes="2MiB", block_size=4, num_threads=1) as ample:
        stats = ample.stats()
        block_bytes = stats["memory_bytes"]["kv_cache"] // stats["kv_cache"]["num_blocks"]
    small = {"kv_cache_memory_bytes": 17 * block_bytes, "block_size": 4}
    with LLM(str(checkpoint), **small, max_num_seqs=2, num_threads=1) as llm:
        limit = llm.max_model_len
        assert limit == llm.stats()["max_model_len"] == 65  # 16 blocks, and a last token that is never computed
        five = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        long, fits, short = llm.generate([[7] * limit, [7] * (limit - 1), [7]], five, use_tqdm=False)
        assert f"the prompt has {limit} tokens and must have at most {limit - 1}" in long.error
        assert (len(fits.outputs[0].token_ids), fits.outputs[0].finish_reason) == (1, "length")
        assert len(short.outputs[0].token_ids) == 5


def test_a_small_request_beside_seven_others_gets_the_same_tokens(llm: LLM) -> None:
    """B109: fp32, alone, with seven others, and with others of every length."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    [alone] = llm.generate([[3, 1, 4]], params, use_tqdm=False)
    for lengths in ([3] * 7, range(1, 40, 6)):
        mates = [[length + index for index in range(length)] for length in lengths]
        outputs = llm.generate([*mates, [3, 1, 4]], params, use_tqdm=False)
        assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("bad", [None, 5, "\ud800", {"prompt_token_ids": 5}, {"prompt_token_ids": [None]}, {"x": 1}])
def test_something_that_is_no_prompt_fails_alone(bad, tmp_path):
    path = make_tiny_checkpoint(tmp_path, with_tokenizer=True)
    with LLM(str(path), max_model_len=64, kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        outputs = llm.generate(["a", bad, "b"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert not llm.engine.has_unfinished
    assert [output.error is None for output in outputs] == [True, False, True]


def test_parameters_changed_after_they_were_made_are_checked_again(tmp_path):
    path = make_tiny_checkpoint(tmp_path)
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    with LLM(str(path), max_model_len=64, kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        params.max_tokens = -5
        failed = llm.generate([[1, 2]], params, use_tqdm=False)[0]
        params.max_tokens = 2
        served = llm.generate([[1, 2]], params, use_tqdm=False)[0]
    assert "max_tokens (-5)" in failed.error and served.error is None


def test_damaged_files_beside_the_weights_are_named(tmp_path):
    path = make_tiny_checkpoint(tmp_path, with_tokenizer=True)
    options = {"max_model_len": 64, "kv_cache_memory_bytes": "4MiB", "num_threads": 1}
    (path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"eos_token_id \('</s>'\) must be a token id"):
        LLM(str(path), **options)
    (path / "generation_config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer files of .* cannot be read"):
        LLM(str(path), **options)


def test_streams_that_are_read_in_turns_each_get_their_own_outputs(llm: LLM) -> None:
    """The step that one of them asks for brings all on: what it gave the others waits for them."""
    few, many = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 6))
    alone = [output.outputs[0].token_ids for output in llm.generate(["ab", "cd"], [few, many], use_tqdm=False)]
    short, long = llm.stream("ab", few), llm.stream("cd", many)
    next(short)
    *_, last_long = long  # ends both requests
    [between] = llm.generate(["ab"], few, use_tqdm=False)
    *_, last_short = short
    assert [last_short.outputs[0].token_ids, last_long.outputs[0].token_ids] == alone
    assert between.outputs[0].token_ids == alone[0]
    abandoned = llm.stream("ab", many)
    next(abandoned)
    abandoned.close()
    assert not llm.engine.has_unfinished and not llm._outputs
