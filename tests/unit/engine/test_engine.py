"""The engine's step, end to end, over a fake model that remembers what was written to its KV memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trimtab.engine import engine as engine_module
from trimtab.engine.balancing import NoBalancer
from trimtab.engine.config import CacheConfig, SchedulerConfig
from trimtab.engine.engine import Engine, EngineDeadError
from trimtab.engine.scheduler import Scheduler
from trimtab.experts.ports import Collect, Command, Report
from trimtab.outputs import CompletionOutput
from trimtab.plan import OpenRow
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import check_accounts, make_kv_cache, run_to_end
from trimtab.testing.scripted_executor import ScriptedExecutor, solo_tokens

VOCAB = 128


class LetterTokenizer:
    """Token ids are code points."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id or not skip_special_tokens)


def make_engine(
    *,
    num_blocks: int = 65,
    windows: tuple[int | None, ...] = (None,),
    enable_prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = frozenset(),
    script: str | None = None,
    fail_row: Callable[[int, str], str | None] | None = None,
    raise_at_step: int | None = None,
    tokenizer: LetterTokenizer | None = None,
    **limits: int,
) -> Engine:
    """`script`: what every request is answered, letter by letter, in place of the fake model's tokens."""

    def read_script(row: OpenRow, num_output: int) -> int:
        assert script is not None
        return ord(script[num_output])

    kv_cache = make_kv_cache(num_blocks, 4, windows)
    executor = ScriptedExecutor(
        kv_cache,
        vocab_size=VOCAB,
        fail_row=fail_row,
        raise_at_step=raise_at_step,
        script=None if script is None else read_script,
    )
    return Engine(
        executor,
        kv_cache,
        SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, **limits}),  # type: ignore[arg-type]
        vocab_size=VOCAB,
        cache=CacheConfig(block_size=4, enable_prefix_caching=enable_prefix_caching),
        tokenizer=LetterTokenizer() if script is not None else tokenizer,
        eos_token_ids=eos_token_ids,
    )


def only_rank(engine: Engine) -> Scheduler:
    (rank,) = engine.scheduler.ranks
    return rank


def say(script: str, **sampling: Any) -> CompletionOutput:
    """What becomes of a request whose model would answer `script`."""
    eos = frozenset(map(ord, sampling.pop("eos", "")))
    engine = make_engine(script=script, eos_token_ids=eos)
    engine.add_request("r", "hi", SamplingParams(**{"max_tokens": len(script), **sampling}))
    return run_to_end(engine)["r"].outputs[0]


def tokens_of(engine: Engine, prompt: list[int], request_id: str = "r", **sampling: Any) -> list[int]:
    engine.add_request(request_id, prompt, SamplingParams(seed=0, detokenize=False, **sampling))
    return run_to_end(engine)[request_id].outputs[0].token_ids


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_depth", [1, 2])
def test_requests_of_mixed_length_get_the_tokens_of_their_solo_runs(async_depth: int) -> None:
    engine = make_engine(async_depth=async_depth, max_num_seqs=3)
    prompts = {f"r{n}": [(7 * n + i) % VOCAB for i in range(n)] for n in (1, 3, 4, 9, 17, 30)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=5, seed=1, detokenize=False))
    outputs = run_to_end(engine)
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == solo_tokens(prompt, 5, vocab_size=VOCAB, seed=1)
        assert outputs[request_id].outputs[0].finish_reason == "length"
    assert isinstance(engine.executor, ScriptedExecutor) and engine.executor.max_in_flight == async_depth


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_kv_cache_of_one_and_a_half_requests_serves_six(async_depth: int, windows: tuple[int | None, ...]) -> None:
    """B102: every one finishes with its solo tokens, preempted a bounded number of times, and every step computes."""
    engine = make_engine(
        async_depth=async_depth, windows=windows, num_blocks=1 + 15 * len(windows), max_model_len=40, max_num_seqs=6
    )
    prompts = {f"r{n}": [10 * n + i for i in range(10)] for n in range(6)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=30, seed=0, detokenize=False))
    outputs = {}
    while engine.has_unfinished:
        moved = engine.step()
        check_accounts(only_rank(engine))
        outputs.update({output.request_id: output for output in moved})
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == solo_tokens(prompt, 30, vocab_size=VOCAB, windows=windows)
        assert outputs[request_id].metrics.num_preemptions <= only_rank(engine).config.max_preemptions + 1
    assert engine.scheduler.num_preemptions > 0
    assert only_rank(engine).allocator.stats.hit_rate == 0  # B106: only their own blocks were ever found


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_tokens_are_the_same_cold_warm_and_warm_with_a_longer_suffix(windows: tuple[int | None, ...]) -> None:
    """B105, B103 (the prompt of 16 tokens is four blocks exactly)."""
    engine = make_engine(windows=windows)
    for length in range(1, 21):
        prompt = [(length + 3 * i) % VOCAB for i in range(length)]
        cold = tokens_of(engine, prompt, max_tokens=6)
        assert cold == solo_tokens(prompt, 6, vocab_size=VOCAB, windows=windows)
        assert tokens_of(engine, prompt, max_tokens=6) == cold
        longer = [*prompt, 1, 2, 3]
        assert tokens_of(engine, longer, max_tokens=6) == solo_tokens(longer, 6, vocab_size=VOCAB, windows=windows)
    assert only_rank(engine).allocator.stats.num_hit_tokens > 0


def test_second_run_of_a_prompt_says_how_much_of_it_was_cached() -> None:
    engine = make_engine()
    for request_id, cached in (("cold", 0), ("warm", 12)):
        engine.add_request(request_id, list(range(16)), SamplingParams(max_tokens=1, detokenize=False))
        assert run_to_end(engine)[request_id].num_cached_tokens == cached


def test_prompt_logprobs_of_a_cached_prompt_are_whole_and_equal_to_the_cold_ones() -> None:
    """B107"""
    engine = make_engine(tokenizer=LetterTokenizer())
    found = []
    for request_id in ("cold", "warm"):
        engine.add_request(request_id, list(range(21)), SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=2))
        output = run_to_end(engine)[request_id]
        found.append(output.prompt_logprobs)
        assert output.outputs[0].logprobs is not None and len(output.outputs[0].logprobs) == 2
        chosen = [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs]
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(chosen))
    assert found[0] == found[1] and found[0] is not None
    assert found[0][0] is None and [next(iter(entry)) for entry in found[0][1:] if entry] == list(range(1, 21))
    assert found[0][1] is not None and found[0][1][1].decoded_token == chr(1)


def test_n_completions_come_as_one_output_with_consecutive_seeds() -> None:
    engine = make_engine()
    prompt = list(range(9))
    engine.add_request("r", prompt, SamplingParams(n=3, seed=5, max_tokens=4, detokenize=False))
    output = run_to_end(engine)["r"]
    expected = [solo_tokens(prompt, 4, vocab_size=VOCAB, seed=5 + index) for index in range(3)]
    assert [completion.token_ids for completion in output.outputs] == expected
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert isinstance(engine.executor, ScriptedExecutor)
    assert engine.executor.num_computed_tokens == 9 + 2 * 1 + 3 * 3, "the prompt's two blocks are computed once"


def test_seeds_left_out_are_drawn_from_the_engine_s() -> None:
    runs = []
    for _ in range(2):
        engine = make_engine()
        engine.add_request("a", [1], SamplingParams(detokenize=False))
        engine.add_request("b", [1], SamplingParams(detokenize=False))
        outputs = run_to_end(engine)
        runs.append((outputs["a"].outputs[0].token_ids, outputs["b"].outputs[0].token_ids))
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_salted_requests_share_nothing_and_get_the_same_tokens() -> None:
    engine = make_engine()
    for salt in (None, "a", "b"):
        engine.add_request("r", list(range(12)), SamplingParams(seed=0, detokenize=False), cache_salt=salt)
        output = run_to_end(engine)["r"]
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == solo_tokens(list(range(12)), 16, vocab_size=VOCAB)


# -- ends and text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["#", "$"])
def test_each_eos_id_ends_a_request(end: str) -> None:
    """B121: with two ids, either one."""
    completion = say(f"ab{end}cdefg", eos="#$")
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", None)
    assert completion.token_ids == [ord("a"), ord("b"), ord(end)]


def test_ignore_eos_ignores_every_eos_id_and_no_stop_token() -> None:
    """B121"""
    completion = say("a#b$c!d", eos="#$", ignore_eos=True, stop_token_ids=[ord("!")])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a#b$c", "stop", ord("!"))


def test_stop_set_sent_to_the_worker_holds_all_ids_that_may_end_the_request() -> None:
    """B121: what is masked until min_tokens is what would stop afterwards."""
    engine = make_engine(eos_token_ids=frozenset({2, 7}))
    engine.add_request("a", [1], SamplingParams(stop_token_ids=[9], detokenize=False, max_tokens=1))
    engine.add_request("b", [1], SamplingParams(stop_token_ids=[9], detokenize=False, max_tokens=1, ignore_eos=True))
    engine.step()
    assert isinstance(engine.executor, ScriptedExecutor)
    assert [row.stop_token_ids for row in engine.executor.ranks[0].plans[0].open_rows] == [[2, 7, 9], [9]]


def test_no_eos_before_min_tokens() -> None:
    """B121: neither id among the first five tokens."""
    engine = make_engine(eos_token_ids=frozenset(range(0, VOCAB, 2)))
    tokens = tokens_of(engine, [1, 2, 3], max_tokens=20, min_tokens=5)
    assert all(token % 2 for token in tokens[:5]) and tokens[-1] % 2 == 0 and len(tokens) > 5


def test_stop_string_over_several_tokens_is_cut_from_the_text() -> None:
    completion = say("one STOP two", stop=["STOP"])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one ", "stop", "STOP")


def test_stop_string_stays_in_the_text_where_asked() -> None:
    assert say("one STOP two", stop=["STOP"], include_stop_str_in_output=True).text == "one STOP"
    assert say("one#two", eos="#", include_stop_str_in_output=True).text == "one#"


def test_stop_string_within_min_tokens_does_not_count() -> None:
    assert say("ab.cd.ef", stop=["."], min_tokens=4).text == "ab.cd"


def test_stop_string_that_meets_the_length_limit_is_still_a_stop() -> None:
    completion = say("abc.", stop=["."])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("abc", "stop", ".")


def test_text_that_may_become_a_stop_string_is_not_shown_early() -> None:
    engine = make_engine(script="a<enb<end>c")
    engine.add_request("r", "hi", SamplingParams(max_tokens=11, stop=["<end>"]))
    texts = []
    while engine.has_unfinished:
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts == ["a", "a", "a", "a", "a<enb", "a<enb", "a<enb", "a<enb", "a<enb", "a<enb"]


def test_text_held_back_comes_when_the_request_ends_otherwise() -> None:
    assert say("a<en", stop=["<end>"]).text == "a<en"


def test_bad_words_reach_the_worker_as_token_sequences() -> None:
    engine = make_engine(tokenizer=LetterTokenizer())
    engine.add_request("r", "hi", SamplingParams(bad_words=["no"], max_tokens=1))
    engine.step()
    assert isinstance(engine.executor, ScriptedExecutor)
    assert engine.executor.ranks[0].plans[0].open_rows[0].bad_word_token_ids == [[110, 111], [32, 110, 111]]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([1, VOCAB], {}, r"prompt token id \(128\) must be in \[0, 127\]"),
        ([-1], {}, r"prompt token id \(-1\) must be in \[0, 127\]"),
        ([1.5], {}, "must be text or a list of token ids"),
        (None, {}, "must be text or a list of token ids"),
        (list(range(64)), {}, r"the prompt has 64 tokens and must have at most 63 \(max_model_len 64"),
        ([1], {"stop_token_ids": [128]}, r"stop_token_ids \(128\) must be in"),
        ([1], {"logit_bias": {500: 1.0}}, r"logit_bias token id \(500\) must be in"),
        ([1], {"allowed_token_ids": [3, 128]}, r"allowed_token_ids \(128\) must be in"),
        ([1], {"logprobs": 129}, r"logprobs \(129\) must be at most 128"),
    ],
)
def test_bad_request_fails_alone(prompt: Any, sampling: dict[str, Any], message: str) -> None:
    """B113, B114: refused before it is scheduled, and the next one is served."""
    engine = make_engine(tokenizer=LetterTokenizer())
    engine.add_request("good", [1], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**sampling))
    engine.add_request("next", [1], SamplingParams(max_tokens=2))
    assert run_to_end(engine).keys() == {"good", "next"}


def test_prompt_one_short_of_the_limit_gives_one_token_for_reason_length() -> None:
    """B113"""
    engine = make_engine()
    engine.add_request("r", list(range(63)), SamplingParams(max_tokens=5, seed=0, detokenize=False))
    completion = run_to_end(engine)["r"].outputs[0]
    assert completion.finish_reason == "length"
    assert completion.token_ids == solo_tokens(list(range(63)), 1, vocab_size=VOCAB)


def test_no_max_tokens_generates_up_to_the_model_s_length() -> None:
    """B114"""
    assert len(tokens_of(make_engine(), [1, 2, 3], max_tokens=None)) == 61


def test_kv_cache_too_small_for_one_request_is_refused_with_the_length_that_fits() -> None:
    """B102"""
    with pytest.raises(ValueError, match=r"max_model_len \(64\) must be at most 37, .* give more KV memory"):
        make_engine(num_blocks=10)


@pytest.mark.parametrize("what", [{"stop": ["x"]}, {"bad_words": ["x"]}])
def test_text_features_without_a_tokenizer_are_refused(what: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        make_engine().add_request("r", [1], SamplingParams(**what))


def test_text_prompt_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt \('hi'\) is text and this engine has no tokenizer; give token ids"):
        make_engine().add_request("r", "hi")


def test_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add_request("r", [1], SamplingParams(detokenize=False))
    with pytest.raises(ValueError, match=r"request_id \('r'\) names a request that is still running"):
        engine.add_request("r", [1])
    run_to_end(engine)
    engine.add_request("r", [1], SamplingParams(detokenize=False))


# -- aborts and faults -------------------------------------------------------------------------------------------------


def test_abort_frees_the_blocks_at_once_and_gives_what_there_was() -> None:
    engine = make_engine()
    engine.add_request("r", list(range(20)), SamplingParams(max_tokens=40, seed=0, detokenize=False))
    for _ in range(6):
        engine.step()
    assert engine.in_flight, "the request is aborted with a step in flight"
    output = engine.abort("r")
    assert only_rank(engine).allocator.pool.num_free == 64
    assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
    solo = solo_tokens(list(range(20)), 40, vocab_size=VOCAB)
    assert output.outputs[0].token_ids == solo[: len(output.outputs[0].token_ids)] != []
    assert not engine.has_unfinished


def test_abort_of_unknown_finished_and_aborted_ids_is_no_error() -> None:
    """B119: also when a late step of the aborted request arrives while another one goes on."""
    engine = make_engine()
    assert engine.abort("unknown") is None
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=9, seed=0, detokenize=False))
    engine.add_request("b", [3, 4], SamplingParams(max_tokens=9, seed=0, detokenize=False))
    engine.step()
    aborted = engine.abort("a")
    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
    assert engine.abort("a") is None
    outputs = run_to_end(engine)
    assert engine.abort("b") is None
    assert outputs["b"].outputs[0].token_ids == solo_tokens([3, 4], 9, vocab_size=VOCAB)
    assert outputs.keys() == {"b"}


def test_waiting_request_is_aborted_without_ever_running() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("a", [1], SamplingParams(max_tokens=3, detokenize=False))
    engine.add_request("b", [1], SamplingParams(max_tokens=3, detokenize=False))
    engine.step()
    aborted = engine.abort("b")
    outputs = run_to_end(engine)
    assert aborted is not None and aborted.outputs[0].token_ids == [] and len(outputs["a"].outputs[0].token_ids) == 3


def test_failed_row_fails_its_request_and_no_other() -> None:
    engine = make_engine(fail_row=lambda step_id, request_id: "logits are not finite" if request_id == "bad" else None)
    for request_id in ("good", "bad"):
        engine.add_request(request_id, [1, 2, 3], SamplingParams(max_tokens=4, seed=0, detokenize=False))
    outputs = run_to_end(engine)
    assert outputs["bad"].error == "logits are not finite" and outputs["bad"].outputs[0].finish_reason == "error"
    assert outputs["good"].error is None
    assert outputs["good"].outputs[0].token_ids == solo_tokens([1, 2, 3], 4, vocab_size=VOCAB)


@pytest.mark.parametrize("async_depth", [1, 2])
def test_executor_fault_fails_every_request_and_closes_the_engine(async_depth: int) -> None:
    engine = make_engine(raise_at_step=3, async_depth=async_depth, max_num_seqs=1)
    for request_id in ("running", "waiting"):
        engine.add_request(request_id, [1, 2, 3], SamplingParams(max_tokens=9, detokenize=False))
    outputs = run_to_end(engine)
    for request_id in ("running", "waiting"):
        assert outputs[request_id].outputs[0].finish_reason == "error"
        assert "the scripted model breaks at step 3" in (outputs[request_id].error or "")
    assert only_rank(engine).allocator.pool.num_free == 64
    for call in (engine.step, lambda: engine.add_request("more", [1])):
        with pytest.raises(EngineDeadError, match="breaks at step 3") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.abort("running") is None


def test_interrupted_step_closes_the_engine() -> None:
    """Half a step may have reached the worker: to go on would be to guess."""

    def interrupt(step_id: int, request_id: str) -> str | None:
        raise KeyboardInterrupt

    engine = make_engine(fail_row=interrupt)
    engine.add_request("r", [1], SamplingParams(detokenize=False))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()


def test_step_without_work_gives_nothing() -> None:
    engine = make_engine()
    assert engine.step() == [] and not engine.has_unfinished


def test_shutdown_ends_the_executor() -> None:
    engine = make_engine()
    engine.shutdown()
    assert isinstance(engine.executor, ScriptedExecutor) and engine.executor.is_shut_down


class ScriptedBalancer(NoBalancer):
    """Sends `Collect(True)` with every plan; wants `num_wanted` steps when nothing else is to do."""

    def __init__(self, num_wanted: int = 0) -> None:
        self.num_wanted = num_wanted
        self.forwards: list[bool] = []
        self.num_outputs = 0
        self.is_closed = False

    @property
    def wants_step(self) -> bool:  # type: ignore[override]
        return self.num_wanted > 0

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]:
        self.num_wanted -= not runs_forward
        self.forwards.append(runs_forward)
        return [Collect(True)]

    def on_reports(self, reports: Sequence[Report], now: float) -> None:
        self.num_outputs += 1

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("depth", [1, 2])
def test_balancer_s_commands_ride_on_every_plan_and_its_reports_come_back(depth: int) -> None:
    engine = make_engine(async_depth=depth)
    engine.balancer = balancer = ScriptedBalancer()
    tokens_of(engine, [1, 2], max_tokens=4)
    assert isinstance(engine.executor, ScriptedExecutor)
    plans = engine.executor.ranks[0].plans
    assert len(plans) >= 4 and all(plan.commands == [Collect(True)] and plan.runs_forward for plan in plans)
    assert balancer.num_outputs == len(plans) == len(balancer.forwards)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_sends_plans_of_commands_alone_until_the_balancer_is_done(depth: int) -> None:
    engine = make_engine(async_depth=depth)
    engine.balancer = balancer = ScriptedBalancer(num_wanted=3)
    assert engine.has_work and not engine.has_unfinished
    while engine.has_work or engine.in_flight:
        assert engine.step() == []
    assert isinstance(engine.executor, ScriptedExecutor)
    plans = engine.executor.ranks[0].plans
    assert [plan.runs_forward or bool(plan.scheduled) for plan in plans] == [False] * 3
    assert [plan.step_id for plan in plans] == [0, 1, 2] and balancer.num_outputs == 3
    assert len(tokens_of(engine, [1, 2], max_tokens=2)) == 2 and not engine.has_work
    engine.shutdown()
    assert balancer.is_closed


class DrainedBalancer(ScriptedBalancer):
    """Has something open until two plans after `drain` have come back."""

    def __init__(self) -> None:
        super().__init__()
        self.story: list[str] = []
        self._rests_at = -1

    @property
    def wants_step(self) -> bool:  # type: ignore[override]
        return self.num_outputs != self._rests_at

    def drain(self) -> None:
        self.story.append("drain")
        self._rests_at = self.num_outputs + 2

    def close(self) -> None:
        self.story.append("close")


@pytest.mark.parametrize("depth", [1, 2])
def test_shutdown_drains_the_balancer_before_the_ranks_end(depth: int) -> None:
    engine = make_engine(async_depth=depth)
    engine.balancer = balancer = DrainedBalancer()
    engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    assert isinstance(engine.executor, ScriptedExecutor)
    num_plans = len(engine.executor.ranks[0].plans)
    engine.shutdown()
    assert balancer.story == ["drain", "close"] and not balancer.wants_step
    plans = engine.executor.ranks[0].plans[num_plans:]
    assert plans and not any(plan.runs_forward for plan in plans), "nobody's tokens are computed any more"
    assert not engine.has_unfinished and engine.executor.is_shut_down
    engine.shutdown()
    assert balancer.story == ["drain", "close", "close"]


def test_a_balancer_that_never_rests_holds_up_a_shutdown_no_longer_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "DRAIN_TIMEOUT_S", 0.0)
    engine = make_engine()
    engine.balancer = DrainedBalancer()
    engine.shutdown()
    assert isinstance(engine.executor, ScriptedExecutor) and engine.executor.is_shut_down
    assert "did not come to rest in 0 s" in caplog.text


def test_a_rank_that_fails_while_the_balancer_drains_does_not_keep_the_rest_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(raise_at_step=0)
    engine.balancer = balancer = DrainedBalancer()
    engine.shutdown()
    assert isinstance(engine.executor, ScriptedExecutor) and engine.executor.is_shut_down
    assert balancer.story[-1] == "close" and "experts were moving at shutdown, and a rank failed" in caplog.text


def test_plans_that_read_new_weights_have_a_deadline_of_their_own_and_others_have_none() -> None:
    engine = make_engine()
    engine.request_refit("/new", 1, 77.0)
    tokens_of(engine, [1, 2], max_tokens=3)
    assert isinstance(engine.executor, ScriptedExecutor)
    plans = engine.executor.ranks[0].plans
    assert {plan.weights_timeout_s for plan in plans if plan.commands} == {77.0}
    assert {plan.weights_timeout_s for plan in plans if not plan.commands} == {None}
    with pytest.raises(ValueError, match=r"timeout_s \(0\) must be above 0 seconds"):
        make_engine().request_refit("/new", 1, 0)


def test_nothing_is_kept_of_finished_requests() -> None:
    engine = make_engine()
    for index in range(50):
        tokens_of(engine, [index], f"r{index}", max_tokens=3)
    assert not engine._requests and not engine._completions and not only_rank(engine)._launched
    assert engine.scheduler.num_unfinished == 0 and not engine.in_flight
