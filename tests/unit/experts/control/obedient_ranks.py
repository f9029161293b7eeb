"""Ranks that do at once whatever the controller commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.experts.control.config import EplbConfig
from trimtab.experts.control.controller import Controller
from trimtab.experts.control.policy.process import PolicyRunner
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement
from trimtab.experts.ports import (
    Abort,
    CheckWeights,
    Collect,
    Command,
    Commit,
    Committed,
    LoadReport,
    Plan,
    Quiescent,
    Refit,
    Refitted,
    Report,
    Stage,
    Staged,
    WeightsChecked,
)


class ScriptedPolicy:
    """Gives the answers it was built with, one per question, when `is_ready`."""

    def __init__(self, *answers: Placement | str) -> None:
        self.answers = list(answers)
        self.asked: list[ExpertLoad] = []
        self.is_ready, self.is_closed, self._is_asked = True, False, False

    def submit(self, load: ExpertLoad, current: Placement) -> None:
        assert not self._is_asked
        self.asked.append(load)
        self._is_asked = True

    def poll(self) -> Placement | str | None:
        if not (self._is_asked and self.is_ready):
            return None
        self._is_asked = False
        return self.answers.pop(0)

    def close(self) -> None:
        self.is_closed, self._is_asked = True, False


class Obedient:
    """An engine of one step in flight over obedient ranks. `counts` is what each forward records, on rank 0."""

    def __init__(self, config: Mapping[str, Any], start: Placement, policy: PolicyRunner, **more: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.controller = Controller(
            EplbConfig(**config),
            start,
            slot_nbytes=1000,
            policy=policy,
            observer=lambda event, numbers: self.events.append((event, dict(numbers))),
            **more,
        )
        self.num_ranks = start.topology.num_ranks
        self.placement = self.target = start
        self.counts = np.zeros((start.num_layers, start.topology.num_experts), dtype=np.int64)
        self.bucket: np.ndarray | None = None
        self.num_steps = self.num_recorded = 0
        self.records = True  # False: the phase filter leaves steps out
        self.silent: set[type] = set()  # kinds of reports that rank 1 keeps to itself
        self.problem = ""  # of new weights, on rank 1
        self.commands: list[list[Command]] = []
        self.now = 0.0

    def step(self, *, runs_forward: bool = True, seconds: float = 0.01) -> list[Command]:
        commands = self.controller.commands(runs_forward=runs_forward, now=self.now)
        self.commands.append(commands)
        reports = [report for command in commands for report in self._obey(command)]
        if runs_forward and self.bucket is not None:
            self.num_steps += 1
            if self.records:
                self.num_recorded += 1
                self.bucket += self.counts
        self.now += seconds
        self.controller.on_reports([r for r in reports if r.rank != 1 or type(r) not in self.silent], self.now)
        return commands

    def steps(self, count: int, **how: Any) -> None:
        for _ in range(count):
            self.step(**how)

    def names(self) -> list[str]:
        return [event for event, _ in self.events]

    def last(self, event: str) -> dict[str, Any]:
        return next(numbers for name, numbers in reversed(self.events) if name == event)

    def _obey(self, command: Command) -> Sequence[Report]:
        ranks = range(self.num_ranks)
        match command:
            case Collect(on=on):
                closed, self.bucket = self.bucket, np.zeros_like(self.counts) if on else None
                num_steps, num_recorded = self.num_steps, self.num_recorded
                self.num_steps = self.num_recorded = 0
                if closed is None:
                    return []
                empty = np.zeros_like(closed)
                return [
                    LoadReport(rank, empty if rank else closed, num_steps, num_recorded, 0.01 * num_steps, 0.004, 0.001)
                    for rank in ranks
                ]
            case Plan():
                assert command.start_digest == self.placement.digest()
                self.target = Placement(self.placement.topology, command.slot_to_expert, command.shares)
                return []
            case Stage(transaction=transaction, layer=layer):
                return [Staged(rank, transaction, layer, 500, 0.001) for rank in ranks]
            case Commit(transaction=transaction, layer=layer):
                self.placement = self.placement.with_layer(layer, self.target)
                digest = self.placement.digest()
                reports: list[Report] = [Committed(rank, transaction, layer, digest, 0.0005) for rank in ranks]
                return reports + [Quiescent(rank, transaction) for rank in ranks if self.placement == self.target]
            case Abort(transaction=transaction):
                return [Quiescent(rank, transaction) for rank in ranks]
            case CheckWeights(weights_version=version):
                return [WeightsChecked(rank, version, self.problem if rank == 1 else "") for rank in ranks]
            case Refit(weights_version=version):
                return [Refitted(rank, version, self.problem if rank == 1 else "") for rank in ranks]
