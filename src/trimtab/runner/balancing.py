"""A rank's side of expert balancing as the runner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trimtab.experts.placement import Placement
from trimtab.experts.ports import CheckWeights, Command, Refit, Report, Weights, answer_weights


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
    """Balancing that is off: experts stay where they are. New weights are taken all the same, where there is a door."""

    def __init__(self, weights: Weights | None = None, rank: int = 0, placement: Placement | None = None) -> None:
        self._weights = weights
        self._rank = rank
        self._placement = placement
        self._reports: list[Report] = []

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            assert isinstance(command, CheckWeights | Refit) and self._weights is not None, (
                f"{command} with balancing off"
            )
            self._reports.append(answer_weights(command, self._weights, self._rank, self._placement))

    def begin_forward(self, *, is_prefill: bool) -> None:
        pass

    def end_step(self) -> list[Report]:
        reports, self._reports = self._reports, []
        return reports
