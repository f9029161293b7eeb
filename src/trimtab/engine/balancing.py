"""The controller's side of expert balancing as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trimtab.experts.ports import Command, Report

if TYPE_CHECKING:
    from trimtab.experts.control.refit import RefitResult


class Balancer(Protocol):
    """Times are on the monotonic clock, seconds.

    1. `commands` for each step, before it is sent to the ranks. 2. `on_reports` with those of each step's output, in
    the order of the steps; raises where ranks disagree, which ends the engine. `wants_step`: it has something to send
    or to hear, and nothing is scheduled: plans of commands alone will do. 3. `drain`, step while `wants_step`, `close`.
    """

    @property
    def wants_step(self) -> bool: ...

    @property
    def holds_requests(self) -> bool:
        """No request may compute in a step that is planned now: new weights are being written."""
        ...

    @property
    def unhealthy_reason(self) -> str:
        """Why the ranks' weights may not be computed with; empty where they may."""
        ...

    @property
    def weights_version(self) -> int:
        """Counts the refits that succeeded."""
        ...

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]: ...

    def on_reports(self, reports: Sequence[Report], now: float) -> None: ...

    def begin_warm_up(self) -> None:
        """Steps from now on are no traffic."""
        ...

    def end_warm_up(self) -> None: ...

    def drain(self) -> None:
        """Nothing new from now on; what is open is given up with the next plan."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Refitting(Protocol):
    """A balancer that can bring new weights to all ranks."""

    @property
    def refit_result(self) -> RefitResult | None: ...

    def request_refit(self, path: str, weights_version: int, timeout_s: float) -> None: ...


class NoBalancer:
    """Experts stay where they are."""

    wants_step = False
    holds_requests = False
    unhealthy_reason = ""
    weights_version = 0

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]:
        return []

    def on_reports(self, reports: Sequence[Report], now: float) -> None:
        pass

    def begin_warm_up(self) -> None:
        pass

    def end_warm_up(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass
