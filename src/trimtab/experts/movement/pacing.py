"""Keeps the mover from taking more than its share of time, and of memory bandwidth, from the steps beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pacer:
    """Work comes in pieces of one expert; a rest after each makes it at most `max_share` of the time.

    Waiting for other ranks is no work: only what happens inside `work` is paid for by a `rest`.
    """

    def __init__(self, max_share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        if not 0.0 < max_share <= 1.0:
            raise ValueError(f"max_share_of_time ({max_share}) must be above 0 and at most 1; take 0.5")
        self._rest_per_work = 1.0 / max_share - 1.0
        self._clock = clock
        self._owed_s = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        start = self._clock()
        yield
        self._owed_s += (self._clock() - start) * self._rest_per_work

    def rest(self, wait: Callable[[float], object]) -> None:
        """`wait(seconds)` may return early, where there is a reason to stop."""
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s > 0.0:
            wait(owed_s)
