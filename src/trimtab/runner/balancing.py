"""A rank's side of expert balancing as the runner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trimtab.experts.ports import Command, Report


class RankBalancer(Protocol):
    """1. `execute` the plan's commands, before the forward; 2. `begin_forward`; 3. `end_step` gives the reports.

    Called on: runner thread. What `execute` raises ends the rank: between a decided commit and its end nothing is
    caught, for half a placement must not compute.
    """

    def execute(self, commands: Sequence[Command]) -> None: ...

    def begin_forward(self, *, is_prefill: bool) -> None:
        """A forward follows, also one without tokens of this rank."""
        ...

    def end_step(self) -> list[Report]: ...


class NoRankBalancer:
    """Balancing that is off."""

    def execute(self, commands: Sequence[Command]) -> None:
        assert not commands, f"balancing is off on this rank, and the plan commands {commands[0]}"

    def begin_forward(self, *, is_prefill: bool) -> None:
        pass

    def end_step(self) -> list[Report]:
        return []
