"""Random schedules, tens of thousands of plans: whatever the batch, the chunks, the hits and the preemptions, each
request gets the tokens of its solo run, and the accounts agree after every event."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from trimtab.engine.block_pool import ContentNamer
from trimtab.engine.config import CacheConfig, SchedulerConfig
from trimtab.engine.engine import Engine
from trimtab.engine.kv_cache import peak_blocks
from trimtab.outputs import RequestOutput
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import check_accounts, make_kv_cache
from trimtab.testing.scripted_executor import ScriptedExecutor, solo_tokens

VOCAB = 31
WINDOWS = [(None,), (None,), (None, 3), (None, 8), (5,), (None, 1), (None, 4, 9)]


@dataclass
class Load:
    """One random engine and what was asked of it."""

    engine: Engine
    executor: ScriptedExecutor
    windows: tuple[int | None, ...]
    asked: dict[str, tuple[list[int], SamplingParams, frozenset[int]]]
    finished: dict[str, RequestOutput]


def make_load(rng: random.Random, *, num_ranks: int, fail_some: bool) -> Load:
    windows, block_size = rng.choice(WINDOWS), rng.randint(1, 5)
    max_num_seqs = rng.randint(1, 6)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 24),
        max_model_len=rng.randint(8, 40),
        async_depth=rng.randint(1, 2),
        max_preemptions=rng.randint(0, 3),
    )
    probe = make_kv_cache(10**6, block_size, windows)
    least = peak_blocks(probe, config.max_model_len - 1, config.max_num_batched_tokens) + 1
    kv_cache = make_kv_cache(least + rng.choice([0, 1, 3, 10, 100]), block_size, windows)
    failing = {f"f{index}" for index in range(100)} if fail_some else set()
    executor = ScriptedExecutor(
        kv_cache,
        num_ranks=num_ranks,
        vocab_size=VOCAB,
        fail_row=lambda step_id, request_id: "scripted" if request_id in failing and step_id % 3 == 0 else None,
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=rng.random() < 0.8)
    eos = frozenset(rng.sample(range(VOCAB), rng.randint(0, 2)))
    engine = Engine(
        executor, kv_cache, config, vocab_size=VOCAB, data_parallel_size=num_ranks, cache=cache, eos_token_ids=eos
    )
    if rng.random() < 0.2:  # most keys collide: only the token check stands between requests (B104)
        num_keys = rng.randint(1, 4)
        for rank in engine.scheduler.ranks:
            rank.allocator._namer = ContentNamer("", lambda message: bytes([sum(message) % num_keys]))
    return Load(engine, executor, windows, {}, {})


def ask(load: Load, rng: random.Random, prefixes: list[list[int]]) -> None:
    longest = load.engine.limits.max_model_len - 1
    prompt = (rng.choice(prefixes)[: rng.randint(0, 30)] + rng.choices(range(VOCAB), k=rng.randint(1, 8)))[:longest]
    max_tokens = rng.randint(1, 12)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        seed=rng.randint(0, 5),
        n=rng.choice([1, 1, 1, 3]),
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=rng.sample(range(VOCAB), rng.randint(0, 1)),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    request_id = rng.choice("rrrf") + str(len(load.asked))
    # Now and then to a rank of its own choice, so that some are busy and others idle.
    ranks = [None, *range(len(load.executor.ranks))] if rng.random() < 0.5 else [rng.choice([None, 0])]
    load.engine.add_request(request_id, prompt, sampling, data_parallel_rank=rng.choice(ranks))
    eos = frozenset() if sampling.ignore_eos else load.engine._eos_token_ids
    load.asked[request_id] = (prompt, sampling, eos | set(sampling.stop_token_ids))


def take(load: Load, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        assert output.request_id not in load.finished, "a finished request speaks again"
        if output.finished:
            load.finished[output.request_id] = output


def expect_solo_tokens(load: Load, output: RequestOutput) -> None:
    prompt, sampling, stop = load.asked[output.request_id]
    limit = load.engine.limits.max_total_tokens(len(prompt), sampling) - len(prompt)
    for completion in output.outputs:
        assert sampling.seed is not None
        solo = solo_tokens(
            prompt,
            limit,
            vocab_size=VOCAB,
            windows=load.windows,
            seed=sampling.seed + completion.index,
            stop_token_ids=stop,
            min_tokens=sampling.min_tokens,
        )
        if completion.finish_reason in ("abort", "error"):
            assert completion.token_ids == solo[: len(completion.token_ids)]
        else:
            assert completion.token_ids == solo
            assert completion.finish_reason == (
                "stop" if solo[-1] in stop and len(solo) > sampling.min_tokens else "length"
            )
    if sampling.prompt_logprobs is not None and all(c.token_ids for c in output.outputs):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        chosen = [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry is not None]
        assert chosen == prompt[1:]


def play(seed: int, *, num_ranks: int = 1, fail_some: bool = False) -> Load:
    rng = random.Random(seed)
    load = make_load(rng, num_ranks=num_ranks, fail_some=fail_some)
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
            aborted = load.engine.abort(rng.choice(list(load.asked)))  # often one that is finished already (B119)
            take(load, [] if aborted is None else [aborted])
        elif not load.engine.num_unfinished:
            load.engine.reset_prefix_cache()
        for rank in load.engine.scheduler.ranks:
            check_accounts(rank)
    return load


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
@pytest.mark.parametrize("fail_some", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_schedule_gives_each_request_its_solo_tokens(first_seed: int, fail_some: bool, num_ranks: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + (100 if num_ranks == 1 else 50)):
        print(f"seed {seed}")
        load = play(seed, num_ranks=num_ranks, fail_some=fail_some)
        assert load.finished.keys() == load.asked.keys()
        for output in load.finished.values():
            assert fail_some or output.error is None, output.error
            expect_solo_tokens(load, output)
            seen.update(completion.finish_reason for completion in output.outputs)
            seen["hit"] += output.num_cached_tokens > 0
            seen["preempted"] += output.metrics.num_preemptions > 0
            bound = load.engine.scheduler.ranks[0].config.max_preemptions + 1
            assert output.metrics.num_preemptions <= bound * len(output.outputs)
        for rank in load.engine.scheduler.ranks:
            assert rank.allocator.pool.num_free == rank.allocator.pool.num_blocks - 1
        assert len({rank.num_forwards for rank in load.executor.ranks}) == 1, "B06: every rank runs every step"
        seen["idle beside busy"] += any(
            len({bool(plan.scheduled) for plan in step}) == 2
            for step in zip(*(rank.plans for rank in load.executor.ranks), strict=True)
        )
        assert not load.executor.in_flight or load.engine.in_flight
    assert min(seen[what] for what in ("stop", "length", "abort", "hit", "preempted")) > 0, seen
    assert num_ranks == 1 or seen["idle beside busy"] > 0
