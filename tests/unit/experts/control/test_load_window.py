"""Buckets of all ranks become the load of the last steps."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.experts.control.load_window import MAX_BUCKETS, LoadWindow
from trimtab.experts.ports import LoadReport

NUM_LAYERS, NUM_EXPERTS = 1, 2


def report(rank: int, *counts: int, recorded: int = 1, times: tuple[float, float, float] = (0, 0, 0)) -> LoadReport:
    return LoadReport(rank, np.array([counts]), 1, recorded, *times)


def window(size: int, num_ranks: int = 2) -> LoadWindow:
    made = LoadWindow(num_ranks, NUM_LAYERS, NUM_EXPERTS, size)
    made.open(0)
    return made


def close(made: LoadWindow, step: int, *counts: int, is_cut: bool = True) -> None:
    """All ranks have recorded; rank 0 the counts, the others nothing."""
    made.close(step, is_cut=is_cut)
    for rank in range(made.num_ranks):
        made.add(report(rank, *(counts if rank == 0 else (0, 0))))


def test_a_bucket_is_complete_when_all_ranks_have_reported_it() -> None:
    made = window(10)
    made.close(4, is_cut=True)
    assert made.add(report(0, 1, 2)) == [] and not made.is_complete
    (bucket,) = made.add(report(1, 10, 20))
    assert made.is_complete and (bucket.start, bucket.end) == (0, 4)
    assert made.load().counts.tolist() == [[11, 22]] and made.load().num_steps == 4


def test_the_kth_report_of_a_rank_is_its_kth_bucket() -> None:
    made = window(10)
    made.close(1, is_cut=True)
    made.close(2, is_cut=True)
    assert made.add(report(0, 1, 0)) == [] == made.add(report(0, 2, 0))
    assert [bucket.counts.tolist() for bucket in made.add(report(1, 100, 0))] == [[[101, 0]]]
    assert [bucket.counts.tolist() for bucket in made.add(report(1, 200, 0))] == [[[202, 0]]]


def test_a_report_nobody_asked_for_is_an_error() -> None:
    made = window(10)
    with pytest.raises(ValueError, match="rank 1 reported a load that nobody asked for"):
        made.add(report(1, 0, 0))
    made.close(1, is_cut=True)
    with pytest.raises(ValueError, match=r"rank 0 reported a load \(1, 3\) and must report \(1, 2\)"):
        made.add(report(0, 1, 2, 3))


def test_the_window_covers_the_last_steps_and_no_more() -> None:
    made = window(3)
    for step, count in enumerate((1, 10, 100, 1000, 10_000), start=1):
        close(made, step, count, 0)
    assert made.load().counts.tolist() == [[11_100, 0]] and made.load().num_steps == 3


def test_a_window_may_exceed_the_interval_between_closings() -> None:
    made = window(10)
    close(made, 4, 1, 0)
    close(made, 8, 10, 0)
    assert made.load().num_steps == 8
    close(made, 12, 100, 0)
    assert (made.load().num_steps, made.load().counts.tolist()) == (8, [[110, 0]])  # 12 would be too many


def test_a_bucket_longer_than_the_window_counts_when_there_is_no_other() -> None:
    made = window(3)
    close(made, 7, 5, 5)
    assert made.load().num_steps == 7
    close(made, 9, 1, 1)
    assert made.load().num_steps == 2


def test_what_was_closed_for_a_log_line_belongs_to_the_bucket_before() -> None:
    made = window(10)
    close(made, 2, 1, 0, is_cut=False)
    close(made, 4, 2, 0, is_cut=False)
    close(made, 6, 4, 0)
    assert len(made._buckets) == 1 and made.load().counts.tolist() == [[7, 0]]


def test_memory_is_bounded_however_short_buckets_are() -> None:
    """B53: nothing grows with the number of intervals."""
    made = window(10_000)
    for step in range(1, 3000):
        close(made, step, 1, 0)
        assert len(made._buckets) <= MAX_BUCKETS
    assert made.load().num_steps == 2999 == made.load().num_pairs
    short = window(200)
    for step in range(1, 3000):
        close(short, step, 1, 0)
        assert len(short._buckets) <= MAX_BUCKETS
    assert 150 <= short.load().num_steps <= 200


def test_rule_10_fresh_steps_are_those_any_rank_recorded_since_last_asked() -> None:
    """Rule 10; B27: a rank whose filter recorded nothing has advanced its window all the same."""
    made = window(10)
    made.close(2, is_cut=True)
    made.add(report(0, 0, 0, recorded=0))
    made.add(report(1, 3, 0, recorded=2))
    assert made.take_fresh() == 2 and made.take_fresh() == 0
    close(made, 4, 0, 0)
    assert made.load().num_steps == 4  # unrecorded steps are steps without load


def test_a_rank_that_records_while_it_is_idle_has_nothing_fresh() -> None:
    """Rule 10: to a filter for decode batches, a rank without tokens beside another's prefill looks like one."""
    made = window(10)
    made.close(2, is_cut=True)
    made.add(report(0, 0, 0, recorded=0))
    made.add(report(1, 0, 0, recorded=2))
    assert made.take_fresh() == 0


def test_times_are_kept_by_rank() -> None:
    made = window(10)
    made.close(2, is_cut=True)
    made.add(report(0, 1, 0, times=(2.0, 1.0, 0.0)))
    made.add(report(1, 1, 0, times=(2.0, 0.5, 0.5)))
    assert made.times().tolist() == [[2.0, 1.0, 0.0], [2.0, 0.5, 0.5]]


def test_a_bucket_without_steps_changes_nothing() -> None:
    made = window(10)
    close(made, 0, 0, 0)
    assert made.load().num_steps == 0 and made.load().num_pairs == 0
