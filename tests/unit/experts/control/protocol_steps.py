"""What tests of the protocol share: small placements and the reports of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.experts.control.transaction import (
    Begin,
    ChangedLayer,
    Event,
    Idle,
    NextStep,
    State,
    StepDone,
    advance,
)
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Command, Committed, Quiescent, Report, Staged

TOPOLOGY = Topology(num_experts=4, num_ranks=2)
START = Placement(TOPOLOGY, [[0, 1, 2, 3]] * 3)
TARGET = Placement(TOPOLOGY, [[0, 2, 1, 3], [0, 1, 2, 3], [3, 1, 2, 0]], [[1] * 4, [1, 2, 3, 4], [1] * 4])
TRANSACTION = 7
MOVED, SHARED = ChangedLayer(0, True), ChangedLayer(1, False)


class Protocol:
    """Drives `advance`; step numbers count up by themselves."""

    def __init__(self, state: State | None = None) -> None:
        self.state: State = state or Idle(START)
        self.step = 0

    def begin(self, *layers: ChangedLayer, stall_timeout_s: float = 10.0) -> Protocol:
        self.send(Begin(TRANSACTION, TARGET, layers, stall_timeout_s))
        return self

    def send(self, event: Event) -> list[Command]:
        self.state, commands = advance(self.state, event)
        return commands

    def next(self) -> list[Command]:
        self.step += 1
        return self.send(NextStep(self.step))

    def done(self, reports: Iterable[Report] = (), step: int | None = None) -> State:
        assert self.send(StepDone(self.step if step is None else step, tuple(reports))) == []
        return self.state


def staged(layer: int, *ranks: int, transaction: int = TRANSACTION) -> list[Report]:
    return [Staged(rank, transaction, layer) for rank in ranks or (0, 1)]


def committed(layer: int, after: Placement, *ranks: int, transaction: int = TRANSACTION) -> list[Report]:
    return [Committed(rank, transaction, layer, after.digest()) for rank in ranks or (0, 1)]


def quiescent(*ranks: int, transaction: int = TRANSACTION) -> list[Report]:
    return [Quiescent(rank, transaction) for rank in ranks or (0, 1)]
