"""What every executor keeps, whatever its ranks are: calls in this thread, threads, or processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trimtab.engine.config import SchedulerConfig
from trimtab.engine.engine import Engine, EngineDeadError
from trimtab.engine.executor.inline import InlineExecutor
from trimtab.engine.executor.multiprocess import MultiprocessExecutor
from trimtab.engine.executor.threads import ThreadsExecutor
from trimtab.engine.executor.worker import Worker
from trimtab.plan import Executor, StepPlan
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import make_kv_cache, run_to_end
from trimtab.testing.scripted_executor import solo_tokens
from trimtab.testing.scripted_worker import build_runner, make_setup

VOCAB = 97
MakeExecutor = Callable[..., Executor]


def make_inline(num_ranks: int, faults: dict[int, dict[str, Any]]) -> Executor:
    return InlineExecutor(Worker(build_runner(faults.get(0, {}))))


def make_threads(num_ranks: int, faults: dict[int, dict[str, Any]], tensor_parallel_size: int = 1) -> Executor:
    return ThreadsExecutor(
        lambda rank: Worker(build_runner(faults.get(rank, {}))),
        num_ranks,
        tensor_parallel_size=tensor_parallel_size,
        abort=lambda: None,
    )


def make_multiprocess(num_ranks: int, faults: dict[int, dict[str, Any]], tensor_parallel_size: int = 1) -> Executor:
    return MultiprocessExecutor(
        "trimtab.testing.scripted_worker",
        [make_setup(**faults.get(rank, {})) for rank in range(num_ranks)],
        tensor_parallel_size=tensor_parallel_size,
    )


EVERY = [(make_inline, 1), (make_threads, 1), (make_threads, 3), (make_multiprocess, 1), (make_multiprocess, 3)]
SEVERAL = [make_threads, make_multiprocess]


@pytest.fixture
def opened() -> Iterator[list[Executor]]:
    executors: list[Executor] = []
    yield executors
    for executor in executors:
        executor.shutdown()


def make_engine(executor: Executor, data_parallel_size: int, async_depth: int = 1) -> Engine:
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, async_depth=async_depth)
    return Engine(executor, make_kv_cache(), limits, vocab_size=VOCAB, data_parallel_size=data_parallel_size)


def ask(engine: Engine, num_requests: int = 7) -> dict[str, list[int]]:
    prompts = {str(index): [index + 1] * (3 * index + 1) for index in range(num_requests)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=6, seed=0, detokenize=False, logprobs=1))
    return prompts


@pytest.mark.parametrize("async_depth", [1, 2])
@pytest.mark.parametrize(("make", "num_ranks"), EVERY)
def test_requests_get_their_solo_tokens(opened: list, make: MakeExecutor, num_ranks: int, async_depth: int) -> None:
    opened.append(make(num_ranks, {}))
    engine = make_engine(opened[0], num_ranks, async_depth)
    prompts = ask(engine)
    outputs = run_to_end(engine)
    for request_id, prompt in prompts.items():
        (completion,) = outputs[request_id].outputs
        assert completion.token_ids == solo_tokens(prompt, 6, vocab_size=VOCAB)
        assert completion.logprobs is not None and [token in entry for token, entry in
            zip(completion.token_ids, completion.logprobs, strict=True)] == [True] * 6  # fmt: skip
    engine.check_health()


@pytest.mark.parametrize("make", SEVERAL)
def test_tensor_parallel_ranks_all_run_their_groups_plan(opened: list, make: MakeExecutor) -> None:
    opened.append(make(4, {}, tensor_parallel_size=2))
    engine = make_engine(opened[0], data_parallel_size=2)
    prompts = ask(engine)
    outputs = run_to_end(engine)
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == solo_tokens(prompt, 6, vocab_size=VOCAB)


@pytest.mark.parametrize(("make", "num_ranks"), EVERY)
def test_steps_in_flight_are_answered_in_launch_order(opened: list, make: MakeExecutor, num_ranks: int) -> None:
    opened.append(make(num_ranks, {}))
    pending = [opened[0].execute([StepPlan(step_id, runs_forward=True)] * num_ranks) for step_id in range(3)]
    assert [[output.step_id for output in step.get()] for step in pending] == [[0] * num_ranks, [1] * num_ranks,
                                                                            [2] * num_ranks]  # fmt: skip


@pytest.mark.parametrize(("make", "num_ranks"), EVERY)
def test_shutdown_twice_is_harmless(make: MakeExecutor, num_ranks: int) -> None:
    executor = make(num_ranks, {})
    executor.shutdown()
    executor.shutdown()


@pytest.mark.parametrize(
    ("make", "fault"),
    [(make_threads, "raise_at_step"), (make_multiprocess, "raise_at_step"), (make_multiprocess, "die_at_step")],
)
def test_fault_of_one_rank_fails_all_requests_and_names_the_rank(opened: list, make: MakeExecutor, fault: str) -> None:
    opened.append(make(3, {1: {fault: 2}}))
    engine = make_engine(opened[0], 3)
    prompts = ask(engine)
    outputs = run_to_end(engine)
    assert outputs.keys() == prompts.keys()
    cause = "RuntimeError: the scripted model breaks at step 2" if fault == "raise_at_step" else "exit code 3"
    for output in outputs.values():
        assert output.outputs[0].finish_reason == "error" and output.error is not None
        assert "rank 1: " in output.error and cause in output.error
    for call in (engine.step, engine.check_health, lambda: engine.add_request("late", [1])):
        with pytest.raises(EngineDeadError, match="rank 1"):
            call()


@pytest.mark.parametrize("make", SEVERAL)
def test_rank_that_failed_is_named_though_those_that_waited_for_it_speak_first(
    opened: list, make: MakeExecutor
) -> None:
    opened.append(make(3, {0: {"give_up_at_step": 1}, 2: {"raise_late_at_step": 1}}))
    engine = make_engine(opened[0], 3)
    ask(engine, 1)
    (output,) = run_to_end(engine).values()
    assert output.error is not None and "rank 2: RuntimeError: the cause, heard late" in output.error


@pytest.mark.parametrize("make", SEVERAL)
def test_start_that_a_rank_refuses_is_the_persons_mistake_by_its_words(make: MakeExecutor) -> None:
    with pytest.raises(ValueError, match=r"^rank 2: max_tea \(9\) must be at most 3$"):
        make(3, {2: {"refuse_start": "max_tea (9) must be at most 3"}})


@pytest.mark.parametrize("make", SEVERAL)
def test_start_that_breaks_on_a_rank_gives_that_ranks_reason(make: MakeExecutor) -> None:
    with pytest.raises(RuntimeError, match=r"^rank 0: RuntimeError: no such device$"):
        make(2, {0: {"break_start": "no such device"}})
