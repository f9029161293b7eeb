"""The ranks' load of the last steps, put together from the buckets that they report."""

# L MoE layers  E experts  n ranks

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from trimtab.experts.load import ExpertLoad
from trimtab.experts.ports import LoadReport

MAX_BUCKETS = 64  # bounds memory; beyond it neighbours are joined, and a window's old end becomes coarse


@dataclass
class Bucket:
    """What all ranks recorded in the steps [start, end) of the controller's clock."""

    start: int
    end: int
    is_cut: bool  # a window may begin at its start; else it belongs to the bucket before it
    counts: npt.NDArray[np.int64]  # [L, E], over all ranks
    num_recorded_steps: int  # most of any rank
    times: npt.NDArray[np.float64]  # [n, 3]: step, experts, waiting (s)

    @property
    def num_steps(self) -> int:
        return self.end - self.start

    def join(self, later: Bucket) -> None:
        self.end = later.end
        self.counts = self.counts + later.counts
        self.num_recorded_steps += later.num_recorded_steps
        self.times = self.times + later.times


@dataclass
class _Closing:
    start: int
    end: int
    is_cut: bool
    reports: dict[int, LoadReport] = field(default_factory=dict)


class LoadWindow:
    """1. `open(step)` with the first `Collect`; 2. `close(step)` with each further one; 3. `add` what ranks report: the
    k-th report of a rank is its k-th closed bucket; 4. `load()` covers the last `window_size` steps.

    A window begins where a bucket does: `close(..., is_cut=True)` marks where it may.
    """

    def __init__(self, num_ranks: int, num_layers: int, num_experts: int, window_size: int) -> None:
        self.num_ranks, self.window_size = num_ranks, window_size
        self._shape = (num_layers, num_experts)
        self._start: int | None = None  # of the bucket that is open
        self._is_cut = True
        self._closing: deque[_Closing] = deque()
        self._buckets: deque[Bucket] = deque()
        self.num_fresh_steps = 0  # recorded since `take_fresh`

    @property
    def is_open(self) -> bool:
        return self._start is not None

    @property
    def start(self) -> int | None:
        """The first step of the bucket that is open."""
        return self._start

    @property
    def last_end(self) -> int:
        """Where the newest bucket that is complete ends; 0 before the first."""
        return self._buckets[-1].end if self._buckets else 0

    @property
    def is_complete(self) -> bool:
        """All ranks have reported all buckets that were closed."""
        return not self._closing

    def open(self, step: int) -> None:
        assert self._start is None, "a bucket is open"
        self._start, self._is_cut = step, True

    def close(self, step: int, *, is_cut: bool, reopen: bool = True) -> None:
        """A `Collect` goes out with the plan before which `step` steps with a forward were sent."""
        assert self._start is not None, "no bucket is open"
        self._closing.append(_Closing(self._start, step, self._is_cut))
        self._start, self._is_cut = (step if reopen else None), is_cut

    def add(self, report: LoadReport) -> list[Bucket]:
        """The buckets that are complete now. Raises ValueError for a report not asked for or of another shape."""
        closing = next((closing for closing in self._closing if report.rank not in closing.reports), None)
        if closing is None:
            raise ValueError(f"rank {report.rank} reported a load that nobody asked for")
        if report.counts.shape != self._shape:
            raise ValueError(f"rank {report.rank} reported a load {report.counts.shape} and must report {self._shape}")
        closing.reports[report.rank] = report
        complete = []
        while self._closing and len(self._closing[0].reports) == self.num_ranks:
            complete.append(self._complete(self._closing.popleft()))
        return complete

    def load(self) -> ExpertLoad:
        """Over the newest buckets that together cover at most `window_size` steps, and at least the newest."""
        counts, num_steps = np.zeros(self._shape, dtype=np.int64), 0
        for bucket in self._window():
            counts = counts + bucket.counts
            num_steps += bucket.num_steps
        return ExpertLoad(counts, num_steps)

    def times(self) -> npt.NDArray[np.float64]:
        """[n, 3]: seconds of steps, of experts and of waiting for other ranks, per rank over the same steps."""
        return np.asarray(sum((bucket.times for bucket in self._window()), np.zeros((self.num_ranks, 3))))

    def take_fresh(self) -> int:
        """Steps that any rank recorded since the last call."""
        fresh, self.num_fresh_steps = self.num_fresh_steps, 0
        return fresh

    def _window(self) -> list[Bucket]:
        window: list[Bucket] = []
        for bucket in reversed(self._buckets):
            num_steps = sum(kept.num_steps for kept in window)
            if num_steps and num_steps + bucket.num_steps > self.window_size:
                break
            window.append(bucket)
        return window

    def _complete(self, closing: _Closing) -> Bucket:
        reports = [closing.reports[rank] for rank in range(self.num_ranks)]
        bucket = Bucket(
            closing.start,
            closing.end,
            closing.is_cut,
            np.sum([report.counts for report in reports], axis=0, dtype=np.int64),
            max(report.num_recorded_steps for report in reports),
            np.array([(report.step_s, report.experts_s, report.wait_s) for report in reports], dtype=np.float64),
        )
        if bucket.counts.any():  # a rank that records while it is idle has nothing fresh
            self.num_fresh_steps += bucket.num_recorded_steps
        if self._buckets and not bucket.is_cut:
            self._buckets[-1].join(bucket)
        elif bucket.num_steps:
            self._buckets.append(replace(bucket))
        if len(self._buckets) > MAX_BUCKETS:
            self._join_pairs()
        self._drop_old()
        return bucket

    def _join_pairs(self) -> None:
        """Makes the window coarser, but no bucket so large that it is much of the window."""
        joined: deque[Bucket] = deque()
        for index, bucket in enumerate(self._buckets):
            if index % 2 and joined[-1].num_steps + bucket.num_steps <= self.window_size // (MAX_BUCKETS // 4):
                joined[-1].join(bucket)
            else:
                joined.append(bucket)
        self._buckets = joined

    def _drop_old(self) -> None:
        """Keeps what a window can reach: buckets that together cover `window_size` steps."""
        covered = 0
        for index in range(len(self._buckets) - 1, -1, -1):
            if covered >= self.window_size:
                for _ in range(index + 1):
                    self._buckets.popleft()
                return
            covered += self._buckets[index].num_steps
