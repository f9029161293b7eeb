"""What the data-parallel ranks did and hold, as plain data."""

from __future__ import annotations

from typing import Any

from trimtab.engine.kv_cache import PrefixCacheStats
from trimtab.engine.scheduler import Scheduler


def rank_stats(rank: Scheduler) -> dict[str, Any]:
    pool, hits = rank.allocator.pool, rank.allocator.stats
    return {
        "kv_cache": {
            "block_size": rank.allocator.block_size,
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
        },
        "prefix_cache": _prefix_cache(hits),
        "num_preemptions": rank.num_preemptions,
        "num_unfinished": rank.num_unfinished,
    }


def total_stats(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The same names, summed; the block size is one for all."""

    def total(part: str, name: str) -> int:
        return sum(rank[part][name] for rank in ranks)

    hits = PrefixCacheStats(total("prefix_cache", "num_queried_tokens"), total("prefix_cache", "num_hit_tokens"))
    return {
        "kv_cache": {
            "block_size": ranks[0]["kv_cache"]["block_size"],
            "num_blocks": total("kv_cache", "num_blocks"),
            "num_free_blocks": total("kv_cache", "num_free_blocks"),
        },
        "prefix_cache": _prefix_cache(hits),
        "num_preemptions": sum(rank["num_preemptions"] for rank in ranks),
        "num_unfinished": sum(rank["num_unfinished"] for rank in ranks),
    }


def _prefix_cache(hits: PrefixCacheStats) -> dict[str, Any]:
    return {
        "num_queried_tokens": hits.num_queried_tokens,
        "num_hit_tokens": hits.num_hit_tokens,
        "hit_rate": hits.hit_rate,
    }
