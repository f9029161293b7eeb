"""New weights for an engine whose experts stay where they are: the refit without anything to rearrange."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.experts.control.refit import Checking, NoRefit, RefitResult, RefitState, Writing, advance_refit
from trimtab.experts.control.transaction import NextStep, StepDone, Tick
from trimtab.experts.ports import Command, Report


class RefitOnly:
    """The engine's balancer from the first request for new weights on. Called on: the engine's thread."""

    def __init__(self, num_ranks: int, timeout_s: float, num_in_flight: int = 0) -> None:
        """`num_in_flight`: steps that were sent before, whose outputs are still to come."""
        self.weights_version = 0
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._state: RefitState = NoRefit()
        self._harm = ""  # why ranks' weights are mixed
        self._num_sent, self._num_done = num_in_flight, 0  # steps
        self._now: float | None = None

    @property
    def wants_step(self) -> bool:
        return not isinstance(self._state, NoRefit)

    @property
    def holds_requests(self) -> bool:
        """No request may compute in a step that is planned now."""
        return bool(self._harm) or not isinstance(self._state, NoRefit | Checking)

    @property
    def unhealthy_reason(self) -> str:
        """Not empty from a refit that failed after the first byte until one that succeeds."""
        return self._harm

    @property
    def refit_result(self) -> RefitResult | None:
        """Of the last refit that ended; None while one is open and before the first."""
        return self._state.result if isinstance(self._state, NoRefit) else None

    def request_refit(self, path: str, weights_version: int) -> None:
        """Raises ValueError while another one is open."""
        if self.wants_step:
            raise ValueError(f"weights ({path!r}) cannot be loaded while others are being loaded; wait for their end")
        self._state = Checking(path, weights_version, self._timeout_s)

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]:
        self._tick(now, is_idle=self._num_sent == self._num_done)
        commands = self._advance(NextStep(self._num_sent))
        self._num_sent += 1
        return commands

    def on_reports(self, reports: Sequence[Report], now: float) -> None:
        self._advance(StepDone(self._num_done, tuple(reports)))
        self._num_done += 1
        self._tick(now, is_idle=False)

    def close(self) -> None:
        """Nothing was started."""

    def _advance(self, event: NextStep | StepDone | Tick) -> list[Command]:
        was_writing = isinstance(self._state, Writing)
        self._state, commands = advance_refit(self._state, event, num_ranks=self._num_ranks, is_at_rest=True)
        if was_writing and (result := self.refit_result) is not None:
            self._harm = result.problem
            if not result.problem:
                self.weights_version = result.weights_version
        return commands

    def _tick(self, now: float, *, is_idle: bool) -> None:
        gap_s = 0.0 if self._now is None else now - self._now
        self._now = now
        self._advance(Tick(gap_s, is_idle=is_idle))
