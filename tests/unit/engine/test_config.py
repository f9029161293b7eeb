"""Settings that cannot work are refused by name, value, bound and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.engine.config import CacheConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs \(0\) must be an integer of at least 1; one request"),
        ({"max_num_seqs": True}, r"max_num_seqs \(True\) must be an integer"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            r"max_num_batched_tokens \(63\) .* at least 64; .* raise it",
        ),
        ({"max_model_len": 1}, r"max_model_len \(1\) must be an integer of at least 2; a prompt token"),
        ({"max_preemptions": -1}, r"max_preemptions \(-1\) must be an integer of at least 0"),
        ({"async_depth": 3}, r"async_depth \(3\) must be 1 or 2; 2 overlaps"),
    ],
)
def test_impossible_scheduler_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**fields)


def test_block_size_must_hold_a_token() -> None:
    with pytest.raises(ValueError, match=r"block_size \(0\) must be an integer of at least 1; 16 suits most models"):
        CacheConfig(block_size=0)
