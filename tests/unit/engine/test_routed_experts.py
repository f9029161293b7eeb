"""The store of routed experts: rows by KV slot, generations, frozen rows, and what an engine returns of them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from trimtab.engine.block_pool import BlockPool
from trimtab.engine.config import SchedulerConfig
from trimtab.engine.engine import Engine
from trimtab.engine.request import Request
from trimtab.engine.routed_experts import FrozenRows, RoutedExpertsStore
from trimtab.engine.scheduler import NoRowStore, Part
from trimtab.experts.routed_experts import RoutedExpertsLayout, get_routed_experts_attn_gid
from trimtab.outputs import CompletionOutput, RequestOutput
from trimtab.plan import RoutedRows, ScheduledRow
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import make_kv_cache, run_to_end
from trimtab.testing.scripted_executor import ScriptedExecutor

SIZE = 4  # tokens per block
LAYOUT = RoutedExpertsLayout((0, 2), 8, 2)


class Rank:
    """A store and what it leans on, worked by hand: requests hold blocks, steps write rows of one number each."""

    def __init__(self, num_blocks: int = 9) -> None:
        self.pool = BlockPool(num_blocks)
        self.store = RoutedExpertsStore(LAYOUT, make_kv_cache(num_blocks, SIZE), self.pool)
        self.num_steps = 0

    def request(self, num_tokens: int, blocks: list[int] | None = None, start: int = 0) -> Request:
        request = Request("r", list(range(num_tokens)), SamplingParams(), seed=0)
        request.block_tables = [blocks or self.pool.allocate(-(-num_tokens // SIZE))]
        request.routed_rows = FrozenRows(LAYOUT, start)
        return request

    def launch(self, request: Request, start: int, count: int) -> tuple[int, Part]:
        step_id, self.num_steps = self.num_steps, self.num_steps + 1
        part = Part(request, ScheduledRow(0, start, count, False, ([],)))
        self.store.launch(step_id, [part])
        return step_id, part

    def arrive(self, step: tuple[int, Part], values: list[int], blocks: list[int]) -> None:
        scheduled = step[1].scheduled
        positions = np.arange(scheduled.start, scheduled.start + scheduled.num_tokens)
        slots = np.array(blocks)[positions // SIZE] * SIZE + positions % SIZE
        self.store.store(step[0], RoutedRows(rows(values), slots))

    def compute(self, request: Request, start: int, values: list[int]) -> None:
        self.arrive(self.launch(request, start, len(values)), values, request.block_tables[0])
        request.num_computed = start + len(values)

    def freeze(self, request: Request) -> list[int]:
        self.store.freeze(request)
        return numbers(request)


def rows(values: list[int]) -> np.ndarray:
    return np.broadcast_to(np.array(values, np.uint8)[:, None, None], (len(values), 2, 2)).copy()


def numbers(request: Request) -> list[int]:
    assert request.routed_rows is not None
    found = request.routed_rows.output(writable=True)[0]
    assert (found == found[:, :1, :1]).all()
    return found[:, 0, 0].tolist()


def test_rows_follow_the_positions_over_blocks_and_chunks() -> None:
    rank = Rank()
    request = rank.request(10, [5, 2, 7])
    rank.compute(request, 0, [1, 2, 3])
    rank.compute(request, 3, [4, 5, 6, 7, 0])
    assert rank.freeze(request) == [1, 2, 3, 4, 5, 6, 7, 0]
    rank.compute(request, 8, [3])
    assert rank.freeze(request) == [1, 2, 3, 4, 5, 6, 7, 0, 3]


def test_a_prefix_hit_reads_the_rows_of_whoever_computed_it() -> None:
    """B67, B66: rows belong to the block, whoever holds it."""
    rank = Rank()
    first = rank.request(8)
    rank.compute(first, 0, [1, 2, 3, 4, 5, 6, 7, 0])
    second = rank.request(6, [first.block_tables[0][0], *rank.pool.allocate(1)])
    rank.compute(second, 4, [6])
    assert rank.freeze(second) == [1, 2, 3, 4, 6]


def test_a_row_that_arrives_after_its_block_changed_hands_is_dropped() -> None:
    """An overrun step of a finished request; its block is another's by the time the row arrives."""
    rank = Rank(num_blocks=2)
    old = rank.request(2)
    (block,) = old.block_tables[0]
    overrun = rank.launch(old, 1, 1)
    rank.pool.release([block])
    new = rank.request(2)
    assert new.block_tables[0] == [block]
    rank.arrive(overrun, [7], [block])
    rank.compute(new, 0, [3])
    new.num_computed = 2  # its second position was never captured: nothing may stand in for it
    assert rank.freeze(new) == [3]
    assert new.routed_rows is not None and "position 1 chose was not captured" in (new.routed_rows.gap or "")


def test_a_slot_that_was_not_written_is_never_read() -> None:
    """Not even what its block's last owner left there."""
    rank = Rank(num_blocks=2)
    old = rank.request(4)
    rank.compute(old, 0, [1, 2, 3, 4])
    rank.pool.release(old.block_tables[0])
    new = rank.request(4)
    step = rank.launch(new, 0, 4)
    rank.store.store(step[0], None)
    new.num_computed = 4
    assert rank.freeze(new) == [] and new.routed_rows.gap  # type: ignore[union-attr]
    rank.compute(new, 4 - 1, [6])
    assert rank.freeze(new) == [], "rows behind a gap would stand at wrong positions"


def test_frozen_rows_are_not_overwritten_by_what_is_computed_again() -> None:
    """B68: a recomputed row may route otherwise than the one that produced the sampled token."""
    rank = Rank()
    request = rank.request(6)
    rank.compute(request, 0, [1, 2, 3, 4, 5])
    assert rank.freeze(request) == [1, 2, 3, 4, 5]
    rank.pool.release(request.block_tables[0])
    request.block_tables, request.num_computed = [rank.pool.allocate(2)], 0
    rank.compute(request, 0, [7, 7, 7, 7, 7, 6])
    assert rank.freeze(request) == [1, 2, 3, 4, 5, 6]


def test_a_step_in_flight_at_a_preemption_still_brings_its_row() -> None:
    """The token it samples is accepted; its row is the one that produced it, wherever its block is by now."""
    rank = Rank(num_blocks=3)
    request = rank.request(6)
    blocks = request.block_tables[0]
    rank.compute(request, 0, [1, 2, 3, 4])
    in_flight = rank.launch(request, 4, 1)
    rank.freeze(request)
    rank.pool.release(blocks)
    request.block_tables, request.num_computed = [], 0
    rank.request(6)  # takes them
    rank.arrive(in_flight, [5], blocks)
    rank.store.freeze_arrived(in_flight[1])
    assert numbers(request) == [1, 2, 3, 4, 5]


def test_steps_in_flight_at_a_preemption_whose_rows_are_lost_leave_a_gap() -> None:
    rank = Rank()
    request = rank.request(6)
    rank.compute(request, 0, [1, 2])
    step, part = rank.launch(request, 2, 2)
    rank.freeze(request)
    rank.store.store(step, None)
    rank.store.freeze_arrived(part)
    assert numbers(request) == [1, 2] and request.routed_rows.gap  # type: ignore[union-attr]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 9])
def test_rows_begin_at_the_position_asked_for(start: int) -> None:
    """B77."""
    rank = Rank()
    request = rank.request(8, start=start)
    rank.compute(request, 0, [0, 1, 2])
    rank.freeze(request)
    rank.compute(request, 3, [3, 4, 5, 6])
    assert rank.freeze(request) == list(range(7))[start:]
    assert request.routed_rows.gap is None  # type: ignore[union-attr]


def test_rows_carry_the_weights_version_that_computed_them() -> None:
    rank = Rank()
    request = rank.request(12, start=1)
    rank.compute(request, 0, [0, 1, 2])
    rank.store.weights_version = 3
    rank.compute(request, 3, [3, 4])
    rank.freeze(request)
    rank.compute(request, 5, [5])
    rank.freeze(request)
    rank.store.weights_version = 4
    rank.compute(request, 6, [6])
    rank.freeze(request)
    assert request.routed_rows is not None
    found, meta = request.routed_rows.output(writable=True)
    assert meta.weights_versions == ((0, 0), (2, 3), (5, 4)) and len(found) == 6


def test_steps_are_stored_with_the_version_they_were_launched_under() -> None:
    rank = Rank()
    request = rank.request(2)
    step = rank.launch(request, 0, 1)
    rank.store.weights_version = 1
    rank.arrive(step, [5], request.block_tables[0])
    request.num_computed = 1
    rank.freeze(request)
    assert request.routed_rows.output(writable=True)[1].weights_versions == ((0, 0),)  # type: ignore[union-attr]


def test_rows_that_were_shown_do_not_change_while_more_follow() -> None:
    frozen = FrozenRows(LAYOUT)
    shown = []
    for value in range(8):
        frozen.append(rows([value]), np.zeros(1, np.int32))
        view = frozen.output(writable=False)[0]
        assert not view.flags.writeable
        shown.append((view, view.copy()))
    assert all(np.array_equal(view, copy) for view, copy in shown)
    assert frozen.output(writable=True)[0][:, 0, 0].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("routed", "match"),
    [
        (RoutedRows(rows([1, 2]), np.array([4])), "brings 2 rows"),
        (RoutedRows(rows([1]), np.array([9])), "other blocks than the plan gave it"),
    ],
)
def test_rows_of_other_tokens_than_the_plans_are_our_own_fault(routed: RoutedRows, match: str) -> None:
    """B74, B75: nobody guesses which token a row belongs to."""
    rank = Rank()
    step, _ = rank.launch(rank.request(1), 0, 1)
    with pytest.raises(AssertionError, match=match):
        rank.store.store(step, routed)


def test_ids_take_one_byte_up_to_256_experts_and_two_beyond() -> None:
    """B72: p + n - 1 = 1,000 rows of 4 layers and 2 experts are 8,000 bytes; no padding anywhere."""
    for num_experts, itemsize in ((8, 1), (256, 1), (257, 2), (300, 2), (65536, 2)):
        layout = RoutedExpertsLayout((0, 1, 2, 3), num_experts, 2)
        pool = BlockPool(1001)
        store = RoutedExpertsStore(layout, make_kv_cache(1001, 1), pool)
        request = Request("r", [0] * 1001, SamplingParams(), seed=0)
        request.block_tables, request.routed_rows = [pool.allocate(1000)], FrozenRows(layout)
        request.num_computed = 1000
        experts = np.full((1000, 4, 2), num_experts - 1, layout.dtype)
        store.launch(0, [Part(request, ScheduledRow(0, 0, 1000, True, ([],)))])
        store.store(0, RoutedRows(experts, np.array(request.block_tables[0])))
        store.freeze(request)
        found, _ = request.routed_rows.output(writable=True)
        assert found.nbytes == 1000 * layout.row_bytes == 8000 * itemsize
        assert (found == num_experts - 1).all()
        assert store.num_bytes == 1001 * layout.slot_bytes


def test_capture_is_keyed_by_the_first_group_with_full_attention() -> None:
    """B63."""
    assert get_routed_experts_attn_gid(make_kv_cache(windows=(None,))) == 0
    assert get_routed_experts_attn_gid(make_kv_cache(windows=(8, None, None))) == 1
    with pytest.raises(ValueError, match=r"all have sliding windows \(\[8, 4\]\)"):
        get_routed_experts_attn_gid(make_kv_cache(windows=(8, 4)))


# -- the engine --------------------------------------------------------------------------------------------------------


def make_engine(layout: RoutedExpertsLayout | None = LAYOUT, num_blocks: int = 65, **limits: Any) -> Engine:
    kv_cache = make_kv_cache(num_blocks, SIZE, (4, None))
    executor = ScriptedExecutor(kv_cache, vocab_size=97, routed_experts=layout)
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 40} | limits)
    return Engine(executor, kv_cache, config, vocab_size=97, routed_experts=layout)


def completion_of(output: RequestOutput) -> CompletionOutput:
    assert output.error is None, output.error
    return output.outputs[0]


def ask(engine: Engine, *, prompt: list[int] | None = None, name: str = "r", **sampling: Any) -> CompletionOutput:
    engine.add_request(name, prompt or [1, 2, 3], SamplingParams(**{"max_tokens": 4, "seed": 0} | sampling))
    return completion_of(run_to_end(engine)[name])


def test_the_last_token_has_no_row() -> None:
    """It was never computed: prompt + output - 1 rows, none of output for max_tokens=1."""
    for max_tokens in (1, 4):
        completion = ask(make_engine(), max_tokens=max_tokens)
        assert completion.routed_experts is not None
        assert completion.routed_experts.shape == (3 + max_tokens - 1, 2, 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_streamed_rows_join_to_the_final_array(depth: int) -> None:
    """B77: each output brings the rows so far; what lies behind the last output's length is new."""
    engine = make_engine(async_depth=depth)
    engine.add_request("r", [1, 2, 3, 4, 5], SamplingParams(max_tokens=6, seed=0), streaming=True)
    engine.add_request("quiet", [1, 2, 3], SamplingParams(max_tokens=6, seed=0))
    deltas, final = [], None
    while engine.has_unfinished:
        for output in engine.step():
            (completion,) = output.outputs
            if output.request_id == "quiet":
                assert (completion.routed_experts is None) == (not completion.finished)
                continue
            assert completion.routed_experts is not None
            assert len(completion.routed_experts) == 5 + len(completion.token_ids) - 1
            deltas.append(completion.routed_experts[sum(map(len, deltas)) :].copy())
            final = completion.routed_experts
    assert [len(delta) for delta in deltas] == [5, 1, 1, 1, 1, 1]
    assert np.array_equal(np.concatenate(deltas), final)


def test_requests_without_the_wish_return_none_and_others_their_own() -> None:
    """B70: 16 requests that alternate."""
    engine = make_engine(num_blocks=300)
    for index in range(16):
        wish = [True, False, None, False][index % 4]
        engine.add_request(str(index), [index, 2, 3], SamplingParams(max_tokens=3, return_routed_experts=wish))
    outputs = run_to_end(engine)
    for index in range(16):
        completion = completion_of(outputs[str(index)])
        assert (completion.routed_experts is None) == (index % 2 == 1)
        assert (completion.routed_experts_meta is None) == (index % 2 == 1)


@pytest.mark.parametrize("sampling", [{"return_routed_experts": True}, {"routed_experts_prompt_start": 1}])
def test_asked_for_without_capture_is_an_error_and_not_silence(sampling: dict[str, Any]) -> None:
    """B70."""
    engine = make_engine(layout=None)
    with pytest.raises(ValueError, match=r"routed_experts.* needs an engine with enable_return_routed_experts"):
        engine.add_request("r", [1, 2, 3], SamplingParams(**sampling))
    assert ask(engine).routed_experts is None
    assert ask(engine, return_routed_experts=False).routed_experts is None


def test_prompt_start_is_within_the_prompt_and_echoed() -> None:
    """B77."""
    for start in (0, 2, 3):
        completion = ask(make_engine(), routed_experts_prompt_start=start)
        assert completion.routed_experts is not None and completion.routed_experts_meta is not None
        assert len(completion.routed_experts) == 6 - start and completion.routed_experts_meta.start == start
    with pytest.raises(ValueError, match=r"routed_experts_prompt_start \(4\) must be in \[0, 3\]"):
        ask(make_engine(), routed_experts_prompt_start=4)
    with pytest.raises(ValueError, match=r"routed_experts_prompt_start \(-1\) must be in \[0"):
        SamplingParams(routed_experts_prompt_start=-1)
    with pytest.raises(ValueError, match=r"routed_experts_prompt_start \(2\) needs return_routed_experts"):
        SamplingParams(routed_experts_prompt_start=2, return_routed_experts=False)
    with pytest.raises(ValueError, match=r"return_routed_experts \('yes'\) must be true or false"):
        SamplingParams(return_routed_experts="yes")  # type: ignore[arg-type]


def test_aborted_before_its_first_token_a_request_has_rows_of_its_prompts_computed_part() -> None:
    """B71: no exception; before anything is computed they are none."""
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request("waits", list(range(10)), SamplingParams())
    aborted = engine.abort("waits")
    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
    assert aborted.outputs[0].token_ids == [] and aborted.outputs[0].routed_experts.shape == (0, 2, 2)  # type: ignore[union-attr]
    engine.add_request("half", list(range(10)), SamplingParams())
    engine.step()
    aborted = engine.abort("half")
    assert aborted is not None and aborted.outputs[0].token_ids == []
    assert len(aborted.outputs[0].routed_experts) == 4  # type: ignore[arg-type]


def test_memory_does_not_grow_over_10_000_requests() -> None:
    engine = make_engine(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=256)
    (rank,) = engine.scheduler.ranks
    store = rank.row_store
    assert isinstance(store, RoutedExpertsStore)
    num_bytes = store.num_bytes
    for burst in range(20):
        for index in range(500):
            engine.add_request(f"{burst} {index}", [index % 97, burst], SamplingParams(max_tokens=1, seed=0))
        outputs = run_to_end(engine)
        assert all(len(output.outputs[0].routed_experts) == 2 for output in outputs.values())  # type: ignore[arg-type]
        runner = engine.executor.ranks[0]  # type: ignore[attr-defined]
        runner.routes.expected.clear()
    del outputs
    gc.collect()
    assert store.num_bytes == num_bytes and not store._in_flight
    assert not [thing for thing in gc.get_objects() if isinstance(thing, FrozenRows)]


def test_off_means_absent() -> None:
    engine = make_engine(layout=None)
    assert isinstance(engine.scheduler.ranks[0].row_store, NoRowStore)
    assert ask(engine).routed_experts_meta is None
