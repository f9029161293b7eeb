"""Small KV caches for tests of the engine, and the accounts that must agree after every event."""

from __future__ import annotations

from collections import Counter

from trimtab.engine.block_pool import NULL_BLOCK
from trimtab.engine.engine import Engine
from trimtab.engine.scheduler import Scheduler
from trimtab.outputs import RequestOutput
from trimtab.plan import KVCacheConfig, KVCacheGroupSpec


def make_kv_cache(
    num_blocks: int = 65, block_size: int = 4, windows: tuple[int | None, ...] = (None,)
) -> KVCacheConfig:
    groups = tuple(KVCacheGroupSpec((layer,), window, 8) for layer, window in enumerate(windows))
    return KVCacheConfig(block_size, num_blocks, groups)


def run_to_end(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the finished outputs by request id."""
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def check_accounts(scheduler: Scheduler) -> None:
    """Raises AssertionError where queues, rows, block tables and reference counts contradict each other."""
    allocator, pool = scheduler.allocator, scheduler.allocator.pool
    pool.check()
    running, waiting = scheduler.running, scheduler.waiting
    assert not set(running) & set(waiting), "a request waits and runs"
    assert [r.arrival for r in waiting] == sorted(r.arrival for r in waiting), "the queue is out of order"
    rows = [request.row for request in running if request.row is not None]
    assert len(rows) == len(running), "a request runs without a row"
    assert sorted([*rows, *scheduler._free_rows]) == list(range(scheduler.config.max_num_seqs)), "rows lost or doubled"
    for request in waiting:
        assert request.row is None and not request.block_tables, f"{request.request_id} waits and holds things"

    holders: Counter[int] = Counter()
    places: dict[int, tuple[int, int]] = {}
    for request in running:
        assert request.num_computed <= request.num_planned <= request.num_tokens
        for group, table in enumerate(request.block_tables):
            left = request.num_left_behind[group]
            assert all((block == NULL_BLOCK) == (index < left) for index, block in enumerate(table)), "null blocks"
            for index in range(left, len(table)):
                block = table[index]
                holders[block] += 1
                assert places.setdefault(block, (group, index)) == (group, index), f"block {block} in two places"
                entry = pool.contents[block]
                if entry is not None:
                    tokens = request.token_ids[index * allocator.block_size : (index + 1) * allocator.block_size]
                    assert entry[0] == group and list(entry[1].token_ids) == tokens, f"block {block} is misnamed"
    for block in range(1, pool.num_blocks):
        assert pool.ref_counts[block] == holders[block], f"block {block}: references and holders differ"
        assert holders[block] <= 1 or pool.contents[block] is not None, f"block {block} is shared without a name"
