"""New weights for an engine whose experts stay where they are: the refit without anything to rearrange."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.experts.control.refit import RefitResult, Refits
from trimtab.experts.control.transaction import NextStep, StepDone, Tick
from trimtab.experts.ports import Command, Report


class RefitOnly:
    """The engine's balancer from the first request for new weights on. Called on: the engine's thread."""

    def __init__(self, num_ranks: int, timeout_s: float, num_in_flight: int = 0) -> None:
        """`num_in_flight`: steps that were sent before, whose outputs are still to come."""
        self._refits = Refits(num_ranks, timeout_s)
        self._num_sent, self._num_done = num_in_flight, 0  # steps
        self._now: float | None = None

    @property
    def wants_step(self) -> bool:
        return self._refits.is_open

    @property
    def holds_requests(self) -> bool:
        return self._refits.holds_requests

    @property
    def unhealthy_reason(self) -> str:
        return self._refits.harm

    @property
    def weights_version(self) -> int:
        return self._refits.weights_version

    @property
    def refit_result(self) -> RefitResult | None:
        return self._refits.result

    def request_refit(self, path: str, weights_version: int, timeout_s: float) -> None:
        self._refits.request(path, weights_version, timeout_s)

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]:
        self._tick(now, is_idle=self._num_sent == self._num_done)
        commands = self._advance(NextStep(self._num_sent))
        self._num_sent += 1
        return commands

    def on_reports(self, reports: Sequence[Report], now: float) -> None:
        self._advance(StepDone(self._num_done, tuple(reports)))
        self._num_done += 1
        self._tick(now, is_idle=False)

    def begin_warm_up(self) -> None:
        """Nothing counts steps here."""

    def end_warm_up(self) -> None:
        """As `begin_warm_up`."""

    def drain(self) -> None:
        """Weights that are being checked are given up; those that are being written are not."""
        self._refits.cancel("the engine shuts down; nothing was changed")

    def close(self) -> None:
        """Nothing was started."""

    def _advance(self, event: NextStep | StepDone | Tick) -> list[Command]:
        return self._refits.advance(event, is_at_rest=True)[0]

    def _tick(self, now: float, *, is_idle: bool) -> None:
        gap_s = 0.0 if self._now is None else now - self._now
        self._now = now
        self._advance(Tick(gap_s, is_idle=is_idle))
