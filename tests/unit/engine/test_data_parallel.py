"""Data-parallel ranks in lockstep over the fake model: who gets a request, and what idle ranks do meanwhile."""

from __future__ import annotations

import pytest

from trimtab.engine.config import SchedulerConfig
from trimtab.engine.engine import Engine
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import make_kv_cache, run_to_end
from trimtab.testing.scripted_executor import ScriptedExecutor, solo_tokens

VOCAB = 97


def make_engine(num_ranks: int, async_depth: int = 1) -> tuple[Engine, ScriptedExecutor]:
    kv_cache = make_kv_cache()
    executor = ScriptedExecutor(kv_cache, num_ranks=num_ranks, vocab_size=VOCAB)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=128, async_depth=async_depth)
    return Engine(executor, kv_cache, limits, vocab_size=VOCAB, data_parallel_size=num_ranks), executor


def params(max_tokens: int, **options: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, detokenize=False, **options)


@pytest.mark.parametrize("async_depth", [1, 2])
def test_idle_ranks_take_part_in_every_step_of_a_busy_one(async_depth: int) -> None:
    """B04, B06: three of four ranks have nothing for 64 tokens, compute no token and run as many forwards."""
    engine, executor = make_engine(4, async_depth)
    engine.add_request("r", [5, 6, 7], params(64))
    assert run_to_end(engine)["r"].outputs[0].token_ids == solo_tokens([5, 6, 7], 64, vocab_size=VOCAB)
    assert [rank.num_forwards for rank in executor.ranks] == [64] * 4
    assert [rank.num_computed_tokens for rank in executor.ranks] == [3 + 63, 0, 0, 0]
    assert executor.max_in_flight == async_depth


@pytest.mark.parametrize("busy", range(4))
def test_request_that_arrives_at_any_idle_rank_moves_all_ranks(busy: int) -> None:
    """B05: all ranks are idle; whichever the request comes to, every rank steps."""
    engine, executor = make_engine(4)
    assert engine.step() == [] and executor.ranks[0].num_forwards == 0, "no work, no step"
    engine.add_request("r", [1, 2], params(3), data_parallel_rank=busy)
    assert run_to_end(engine)["r"].outputs[0].token_ids == solo_tokens([1, 2], 3, vocab_size=VOCAB)
    assert [rank.num_forwards for rank in executor.ranks] == [3] * 4
    assert [rank.num_computed_tokens > 0 for rank in executor.ranks] == [index == busy for index in range(4)]


def test_every_rank_is_sent_the_same_step_numbers() -> None:
    engine, executor = make_engine(3, async_depth=2)
    for index in range(7):
        engine.add_request(str(index), [index + 1] * (index + 1), params(index + 1))
    run_to_end(engine)
    first, *others = [[plan.step_id for plan in rank.plans] for rank in executor.ranks]
    assert first == list(range(len(first))) and all(ids == first for ids in others)


def test_requests_go_to_the_rank_with_the_fewest_unfinished_sequences() -> None:
    engine, _ = make_engine(3)
    engine.add_request("long", [1, 2], params(20, n=3))
    for index in range(6):
        engine.add_request(str(index), [3], params(2))
    assert [rank.num_unfinished for rank in engine.scheduler.ranks] == [3, 3, 3]
    while engine.num_unfinished > 1:
        engine.step()
    engine.add_request("late", [4], params(2))
    assert [rank.num_unfinished for rank in engine.scheduler.ranks] == [3, 1, 0]


def test_completions_of_one_request_share_their_prompt_on_one_rank() -> None:
    engine, executor = make_engine(2)
    engine.add_request("r", list(range(9)), params(4, n=3))
    outputs = run_to_end(engine)["r"].outputs
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4]
    assert executor.ranks[0].num_computed_tokens == 9 + 2 * 1 + 3 * 3 and executor.ranks[1].num_computed_tokens == 0


def test_rank_of_a_request_must_be_one_of_the_engines() -> None:
    engine, _ = make_engine(2)
    engine.add_request("fits", [1], params(1), data_parallel_rank=1)
    for rank in (2, -1):
        with pytest.raises(ValueError, match=rf"data_parallel_rank \({rank}\) must be in \[0, 1\].*least loaded"):
            engine.add_request("r", [1], params(1), data_parallel_rank=rank)


def test_prefix_cache_is_emptied_on_every_rank() -> None:
    engine, _ = make_engine(2)
    prompt = list(range(12))
    for rank in (0, 1):
        engine.add_request(f"cold {rank}", prompt, params(1), data_parallel_rank=rank)
    run_to_end(engine)
    engine.reset_prefix_cache()
    for rank in (0, 1):
        engine.add_request(f"again {rank}", prompt, params(1), data_parallel_rank=rank)
        assert run_to_end(engine)[f"again {rank}"].num_cached_tokens == 0


def test_stats_are_those_of_each_rank_and_their_sum() -> None:
    engine, _ = make_engine(2)
    prompt = list(range(12))
    for request_id in ("cold", "warm"):
        engine.add_request(request_id, prompt, params(1), data_parallel_rank=1)
        run_to_end(engine)
    engine.add_request("running", [1, 2, 3, 4, 5], params(9), data_parallel_rank=0)
    engine.step()
    stats = engine.stats()
    assert [rank["prefix_cache"]["num_queried_tokens"] for rank in stats["ranks"]] == [5, 24]
    assert [rank["prefix_cache"]["num_hit_tokens"] for rank in stats["ranks"]] == [0, 8]
    assert [rank["kv_cache"]["num_free_blocks"] for rank in stats["ranks"]] == [62, 64]
    assert stats["kv_cache"] == {"block_size": 4, "num_blocks": 130, "num_free_blocks": 126}
    assert stats["prefix_cache"] == {"num_queried_tokens": 29, "num_hit_tokens": 8, "hit_rate": 8 / 29}
    assert stats["num_unfinished"] == 1
