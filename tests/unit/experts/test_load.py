"""A load is tokens per expert: whole numbers, not below 0, and never changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trimtab.experts.load import ExpertLoad


def test_pairs_are_counted_over_layers_and_experts() -> None:
    load = ExpertLoad(np.array([[1, 2], [3, 4]]), 5)
    assert (load.num_pairs, load.num_steps, load.counts.dtype) == (10, 5, np.int64)


def test_a_load_is_a_copy_that_nobody_can_write() -> None:
    counts = np.array([[1, 2]], dtype=np.int32)
    load = ExpertLoad(counts, 1)
    counts[0, 0] = 9
    assert load.counts.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="read-only"):
        load.counts[0, 0] = 9


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        (np.array([[0.5, 1.0]]), r"counts \(float64 \(1, 2\)\) must be integers"),
        (np.array([[np.nan, 1.0]]), "must be integers"),
        (np.array([1, 2]), r"counts \(int64 \(2,\)\) must be integers \[num_layers, num_experts\]"),
        (np.array([[1, -3]]), r"counts \(-3\) must be at least 0"),
    ],
)
def test_what_is_no_load_is_refused(counts: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ExpertLoad(counts, 1)
