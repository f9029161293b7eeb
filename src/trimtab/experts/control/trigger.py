"""When to look whether the experts should move: every `step_interval` steps, or as soon as somebody asks."""

from __future__ import annotations


class Trigger:
    """The controller's clock: it counts global steps with a forward, warm-up not among them, and no rank keeps its own.

    A decision that is due while a transaction is open waits for its end, and the next interval counts from then.
    """

    def __init__(self, step_interval: int, window_size: int) -> None:
        self.step_interval, self.window_size = step_interval, window_size
        self.clock = 0
        self.is_requested = False
        self._next_due = step_interval

    @property
    def steps_to_next(self) -> int:
        """Never below 0: a decision that is due and has to wait is due."""
        return max(0, self._next_due - self.clock)

    @property
    def is_due(self) -> bool:
        return self.is_requested or self.clock >= self._next_due

    @property
    def is_cut(self) -> bool:
        """Whether the window of a coming decision begins at this step."""
        return (self._next_due - self.window_size - self.clock) % self.step_interval == 0

    def count_step(self) -> None:
        self.clock += 1

    def request(self) -> None:
        self.is_requested = True

    def restart(self) -> bool:
        """A decision is being made; the next interval begins. Returns whether somebody asked for it."""
        was_requested, self.is_requested = self.is_requested, False
        self._next_due = self.clock + self.step_interval
        return was_requested
