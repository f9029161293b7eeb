"""Random loads: every row that is returned is the one that the scripted worker's own record holds for that request.

The worker draws new experts each time a position is computed and records what each request came to know first; it
knows blocks and slots, and nothing of stores, generations or freezing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from trimtab.engine.config import CacheConfig, SchedulerConfig
from trimtab.engine.engine import Engine
from trimtab.engine.kv_cache import peak_blocks
from trimtab.engine.routed_experts import RoutedExpertsStore
from trimtab.experts.routed_experts import RoutedExpertsLayout
from trimtab.outputs import CompletionOutput, RequestOutput
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import check_accounts, make_kv_cache
from trimtab.testing.scripted_executor import ScriptedExecutor

VOCAB = 31
LAYOUT = RoutedExpertsLayout((1, 3), 300, 2)  # two bytes per id
WINDOWS = [(None,), (None, 3), (8, None), (None, 4, 9)]


@dataclass
class Load:
    engine: Engine
    executor: ScriptedExecutor
    drops_some: bool  # rows of some steps are lost
    asked: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    finished: dict[str, RequestOutput] = field(default_factory=dict)
    streamed: dict[tuple[str, int], list[np.ndarray]] = field(default_factory=dict)  # what came new, output by output


def make_load(rng: random.Random, num_ranks: int, drop_some: bool) -> Load:
    windows, block_size = rng.choice(WINDOWS), rng.randint(1, 5)
    max_num_seqs = rng.randint(2, 6)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 24),
        max_model_len=rng.randint(12, 40),
        async_depth=rng.randint(1, 2),
        max_preemptions=rng.randint(0, 3),
    )
    probe = make_kv_cache(10**6, block_size, windows)
    least = peak_blocks(probe, config.max_model_len - 1, config.max_num_batched_tokens) + 1
    kv_cache = make_kv_cache(least + rng.choice([0, 0, 1, 3, 10]), block_size, windows)
    executor = ScriptedExecutor(
        kv_cache,
        num_ranks=num_ranks,
        vocab_size=VOCAB,
        fail_row=lambda step_id, request_id: "scripted" if "f" in request_id and step_id % 7 == 0 else None,
        routed_experts=LAYOUT,
        drop_routes=lambda step_id: drop_some and step_id % 11 == 10,
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=rng.random() < 0.6)
    engine = Engine(
        executor, kv_cache, config, vocab_size=VOCAB, data_parallel_size=num_ranks, cache=cache, routed_experts=LAYOUT
    )
    return Load(engine, executor, drop_some)


def ask(load: Load, rng: random.Random, prefixes: list[list[int]]) -> None:
    longest = load.engine.limits.max_model_len - 1
    prompt = (
        rng.choice(prefixes)[: rng.choice([0, rng.randint(0, 30)])] + rng.choices(range(VOCAB), k=rng.randint(1, 4))
    )[:longest]
    wanted = rng.choice([None, None, True, False])
    sampling = SamplingParams(
        max_tokens=rng.choice([1, rng.randint(1, 30)]),
        seed=rng.randint(0, 5),
        n=rng.choice([1, 1, 1, 3]),
        stop_token_ids=rng.sample(range(VOCAB), rng.randint(0, 2)),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        return_routed_experts=wanted,
        routed_experts_prompt_start=rng.choice([0, 0, rng.randint(0, len(prompt))]) if wanted is not False else 0,
    )
    request_id = rng.choice("rrrrrf") + str(len(load.asked))
    ranks = [None, *range(len(load.executor.ranks))]
    streaming, rank = rng.random() < 0.4, rng.choice(ranks)
    load.engine.add_request(request_id, prompt, sampling, data_parallel_rank=rank, streaming=streaming)
    load.asked[request_id] = (prompt, sampling)
    if streaming:
        load.streamed.update({(request_id, index): [] for index in range(sampling.n)})


def take(load: Load, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            deltas = load.streamed.get((output.request_id, completion.index))
            if completion.routed_experts is None:
                assert load.asked[output.request_id][1].return_routed_experts is False or not completion.finished
            elif deltas is not None:
                seen = sum(len(delta) for delta in deltas)
                deltas.append(completion.routed_experts[seen:].copy())
        if output.finished:
            load.finished[output.request_id] = output


def expect_recorded_rows(load: Load, output: RequestOutput, completion: CompletionOutput, seen: Counter[str]) -> None:
    prompt, sampling = load.asked[output.request_id]
    if sampling.return_routed_experts is False:
        assert completion.routed_experts is None and completion.routed_experts_meta is None
        return
    rows, meta = completion.routed_experts, completion.routed_experts_meta
    assert rows is not None and meta is not None and rows.dtype == np.uint16 and rows.flags.writeable
    assert (meta.layer_ids, meta.num_experts, meta.start) == ((1, 3), 300, sampling.routed_experts_prompt_start)
    sequence = output.request_id if sampling.n == 1 else f"{completion.index}_{output.request_id}"
    records = [rank.routes.expected[sequence] for rank in load.executor.ranks if sequence in rank.routes.expected]
    expected = np.stack(records[0])[meta.start :] if records and len(records[0]) > meta.start else rows[:0]
    num_rows = max(len(prompt) + len(completion.token_ids) - 1 - meta.start, 0)
    ended_early = completion.finish_reason in ("abort", "error")
    if ended_early and (not completion.token_ids or load.drops_some):  # the longest prefix that is known
        assert len(rows) <= num_rows
        seen["cut short"] += len(rows) < num_rows
    else:  # also where it was aborted or failed: each token it has was routed
        assert rows.shape == (num_rows, 2, 2)
    assert np.array_equal(rows, expected[: len(rows)])
    seen["rows"] += len(rows)
    deltas = load.streamed.get((output.request_id, completion.index))
    if deltas:
        assert np.array_equal(np.concatenate(deltas), rows), "what was streamed is what is returned at the end"
        seen["streamed"] += len(deltas) > 2


def play(seed: int, num_ranks: int, drop_some: bool = False) -> Load:
    rng = random.Random(seed)
    load = make_load(rng, num_ranks, drop_some)
    prefixes = [rng.choices(range(VOCAB), k=30) for _ in range(2)]
    events = rng.randint(5, 60)
    while events or load.engine.has_unfinished:
        event = rng.choices(["ask", "step", "abort", "reset"], [3, 8, 0.7, 0.05])[0] if events else "step"
        events = max(events - 1, 0)
        if event == "ask":
            ask(load, rng, prefixes)
        elif event == "step":
            take(load, load.engine.step())
        elif event == "abort" and load.asked:
            aborted = load.engine.abort(rng.choice(list(load.asked)))
            take(load, [] if aborted is None else [aborted])
        elif not load.engine.num_unfinished:
            load.engine.reset_prefix_cache()
        for rank in load.engine.scheduler.ranks:
            check_accounts(rank)
    return load


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_any_schedule_returns_the_rows_that_the_worker_recorded(num_ranks: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150 if num_ranks == 1 else 60):
        print(f"seed {seed}")
        load = play(seed, num_ranks)
        assert load.finished.keys() == load.asked.keys()
        for output in load.finished.values():
            for completion in output.outputs:
                expect_recorded_rows(load, output, completion, seen)
                seen[str(completion.finish_reason)] += 1
        for rank in load.executor.ranks:
            seen["recomputed"] += rank.routes.num_recomputed
            seen["shared"] += rank.routes.num_shared
    print(seen)
    assert min(seen[what] for what in ("rows", "recomputed", "shared", "streamed", "abort", "stop", "error")) > 0
    assert seen["rows"] > 5000 and seen["recomputed"] > 100 and seen["shared"] > 500, seen


def play_with_lost_rows() -> Counter[str]:
    """Some steps' rows never reach the engine: what each completion made of it."""
    seen: Counter[str] = Counter()
    for seed in range(1000, 1080):
        print(f"seed {seed}")
        load = play(seed, 1, drop_some=True)
        for output in load.finished.values():
            for completion in output.outputs:
                expect_recorded_rows(load, output, completion, seen)
                failed = output.error is not None and "was not captured" in output.error
                seen["failed" if failed else str(completion.finish_reason)] += 1
    return seen


def test_rows_that_were_lost_fail_their_readers_and_nobody_else() -> None:
    """B61: never zero rows, never someone else's; requests that return none go on."""
    seen = play_with_lost_rows()
    assert seen["failed"] > 50 and seen["length"] > 50, seen


class StoreWithoutGenerations(RoutedExpertsStore):
    """What a store is without them: a row lands wherever its slot number says, and any row there is will do."""

    def launch(self, step_id, parts) -> None:
        generation = self._pool.generation
        self._pool.generation = [1] * len(generation)
        super().launch(step_id, parts)
        self._pool.generation = generation

    def store(self, step_id, routed) -> None:
        generation = self._pool.generation
        self._pool.generation = [1] * len(generation)
        super().store(step_id, routed)
        self._pool.generation = generation

    def freeze(self, request) -> None:
        generation = self._pool.generation
        self._pool.generation = [1] * len(generation)
        super().freeze(request)
        self._pool.generation = generation


def test_a_store_without_generations_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: without generations, rows of a slot's last owner stand in for lost ones."""
    monkeypatch.setattr("trimtab.engine.routed_experts.RoutedExpertsStore", StoreWithoutGenerations)
    with pytest.raises(AssertionError):
        play_with_lost_rows()


class StoreThatReadsLate(RoutedExpertsStore):
    """Forgets, at a preemption, to copy what the request has; it reads what it computed again at its end."""

    def freeze(self, request) -> None:
        if request.num_computed >= request.num_tokens - request.num_unseen_tokens - 1:
            super().freeze(request)

    def freeze_arrived(self, part) -> None:
        pass


def test_a_store_that_reads_recomputed_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.engine.routed_experts.RoutedExpertsStore", StoreThatReadsLate)
    with pytest.raises(AssertionError):
        test_any_schedule_returns_the_rows_that_the_worker_recorded(1)
