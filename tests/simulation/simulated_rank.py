"""A worker as the protocol sees it: it executes plans in order, moves experts in the background, and reports.

It shares no code with the controller but the words (ports, placement, delta), and looks at every rule that concerns it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from simulated_transport import Clock, GlooGroup, Message, SharedMemory

from trimtab.experts.delta import LayerDelta, Transfer, diff
from trimtab.experts.placement import Placement
from trimtab.experts.ports import (
    Abort,
    CheckWeights,
    Collect,
    Command,
    Commit,
    Committed,
    Failed,
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

Payload = tuple[int, int, int]  # layer, expert, weights version: what the bytes would be
Transport = GlooGroup | SharedMemory


class ViolationError(AssertionError):
    """A rule of balancing.md was broken."""


@dataclass
class Faults:
    """What goes wrong in a schedule, and how often; `stop` ends it."""

    mover_fails: float = 0.0
    mover_hangs: float = 0.0  # says nothing until it is aborted
    plan_refused: float = 0.0
    duplicate_report: float = 0.0
    stale_report: float = 0.0  # a report of an earlier transaction comes again
    slow_abort_s: float = 0.0
    home_hangs: float = 0.0  # a committed layer's experts stay in staging until the transaction is aborted
    check_fails: float = 0.0
    write_fails: float = 0.0
    commit_lost: float = 0.0  # breaks the protocol: the engine must end

    def stop(self) -> None:
        for name in vars(self):
            setattr(self, name, 0.0)


@dataclass
class Staging:
    layer: int
    missing: set[int]  # target slots
    num_unsent: int
    payloads: dict[int, Payload] = field(default_factory=dict)
    is_said: bool = False


@dataclass
class Homecoming:
    """Experts of a committed layer that the kernel reads in staging."""

    layer: int
    is_copied: bool = False
    hangs: bool = False


class SimulatedMover:
    """One layer at a time in a staging area that is free again only after its answer, and after its experts are home.

    `lends` is a property of the storage: without it, installing copies.
    """

    def __init__(
        self, rank: SimulatedRank, clock: Clock, rng: random.Random, open_transport: Callable[[int], Transport]
    ) -> None:
        self.rank, self.clock, self.rng, self.open_transport = rank, clock, rng, open_transport
        self.transaction: int | None = None
        self.staging: Staging | None = None
        self.lends = rng.random() < 0.7
        self.homecoming: Homecoming | None = None
        self.held: LayerDelta | None = None  # ordered while experts are on their way home
        self.num_held = 0
        self._is_ending = self._is_aborted = False  # told to finish or to abort
        self.is_resting = True  # no transaction, or an abort came to its end
        self.mailbox: list[Report] = []
        self._generation = 0  # what was started before an abort does not count after it

    def begin(self, transaction: int) -> None:
        if not self.is_resting or self.homecoming:
            raise ViolationError(f"rank {self.rank.rank}: a plan starts and the mover does not rest")
        self.transaction, self.is_resting, self.staging = transaction, False, None
        self._is_ending = self._is_aborted = False

    def stage(self, delta: LayerDelta) -> None:
        if self.staging is not None:
            raise ViolationError(f"rank {self.rank.rank}: staging is used again before its answer")
        if self.homecoming is not None:
            self.held = delta
            self.num_held += 1
            return
        assert self.transaction is not None
        rank, placement, faults = self.rank.rank, self.rank.placement, self.rank.faults
        mine = [t for t in delta.transfers if t.target_rank(placement) == rank]
        sends = [t for t in delta.transfers if t.source_rank(placement) == rank and t not in mine]
        staging = Staging(delta.layer, {slot for t in mine for slot in t.target_slots}, len(sends))
        self.staging = staging
        if self.rng.random() < faults.mover_hangs:
            self.rank.disturbed.add(self.transaction)
            return
        has_failed = self.rng.random() < faults.mover_fails
        if has_failed:
            self.rank.disturbed.add(self.transaction)
            self.mailbox.append(Failed(rank, self.transaction, delta.layer, "injected"))
            staging.is_said = True
        transport, generation = self.open_transport(self.transaction), self._generation
        for transfer in sends:
            self._send(transport, transfer, staging, has_failed, generation)
        for transfer in mine:
            self._receive(transport, transfer, staging, generation)
        self._say_when_complete(staging)

    def _send(
        self, transport: Transport, transfer: Transfer, staging: Staging, has_failed: bool, generation: int
    ) -> None:
        assert self.transaction is not None
        transaction, rank = self.transaction, self.rank.rank
        target = transfer.target_rank(self.rank.placement)

        def sent() -> None:
            staging.num_unsent -= 1
            self._say_when_complete(staging)

        def send() -> None:
            if generation == self._generation:
                payload = self.rank.slots[staging.layer][self.rank.local(transfer.source_slot)]
                message = Message(transaction, staging.layer, transfer.expert, payload, has_failed)
                transport.send(rank, target, message, sent)

        # In the order of the transfers: without tags receives are matched by order alone.
        self.clock.after(0.01 * (1 + len(staging.payloads)), send)

    def _receive(self, transport: Transport, transfer: Transfer, staging: Staging, generation: int) -> None:
        assert self.transaction is not None
        transaction, placement = self.transaction, self.rank.placement
        source = transfer.source_rank(placement)
        awaited = Message(transaction, staging.layer, transfer.expert, None)

        def arrived(message: Message) -> None:
            if generation != self._generation or staging is not self.staging:
                return  # swallowed by a receive nobody waits for any more
            if message.has_failed or (message.transaction, message.layer, message.expert) != (
                transaction,
                staging.layer,
                transfer.expert,
            ):
                if not staging.is_said:
                    self.mailbox.append(Failed(self.rank.rank, transaction, staging.layer, "bad header"))
                staging.is_said = True
                return
            for slot in transfer.target_slots:
                staging.payloads[slot] = message.payload
                staging.missing.discard(slot)
            self._say_when_complete(staging)

        if source == self.rank.rank:
            payload = self.rank.slots[staging.layer][self.rank.local(transfer.source_slot)]
            local = Message(transaction, staging.layer, transfer.expert, payload)
            self.clock.after(self.rng.random() * 0.1, lambda: arrived(local))
        else:
            transport.receive(source, self.rank.rank, awaited, arrived)

    def _say_when_complete(self, staging: Staging) -> None:
        if staging is self.staging and not staging.is_said and not staging.missing and not staging.num_unsent:
            staging.is_said = True
            assert self.transaction is not None
            self.mailbox.append(Staged(self.rank.rank, self.transaction, staging.layer, 1, 0.01))

    def take(self, layer: int) -> dict[int, Payload]:
        staging = self.staging
        if staging is None or staging.layer != layer or staging.missing or staging.num_unsent:
            raise ViolationError(f"rank {self.rank.rank}: commit of layer {layer}, which is not staged")
        return staging.payloads

    def installed(self) -> None:
        assert self.staging is not None
        layer, self.staging = self.staging.layer, None
        if not self.lends:
            return
        coming = self.homecoming = Homecoming(layer)
        if self.rng.random() < self.rank.faults.home_hangs:
            assert self.transaction is not None
            self.rank.disturbed.add(self.transaction)
            coming.hangs = True
        else:
            self.clock.after(self.rng.random() * 0.3, lambda: self._copied(coming))

    def _copied(self, coming: Homecoming) -> None:
        coming.is_copied = True
        if self._is_ending:
            self._end()

    def finish(self) -> None:
        self._is_ending = True
        if self.homecoming is None or self.homecoming.is_copied:
            self._end()

    def abort(self) -> None:
        self._generation += 1
        self.held = None
        if not self._is_ending:
            self._is_aborted = True
            self.finish()
        if (coming := self.homecoming) is not None and coming.hangs:
            coming.hangs = False
            self.clock.after(self.rng.random() * 0.1, lambda: self._copied(coming))

    def _end(self) -> None:
        """Experts are at home: orders are done one after the other."""
        assert self.transaction is not None
        transaction = self.transaction

        def rest() -> None:
            self.staging, self.transaction, self.is_resting = None, None, True
            self.mailbox.append(Quiescent(self.rank.rank, transaction))

        longest_s = 0.1 + self.rank.faults.slow_abort_s if self._is_aborted else 0.02
        self.clock.after(self.rng.random() * longest_s, rest)

    def poll(self) -> list[Report]:
        if self.homecoming is not None and self.homecoming.is_copied:
            self.homecoming = None
            if (held := self.held) is not None:
                self.held = None
                self.stage(held)
        found, self.mailbox = self.mailbox, []
        return found


class SimulatedRank:
    def __init__(
        self,
        rank: int,
        placement: Placement,
        clock: Clock,
        rng: random.Random,
        faults: Faults,
        open_transport: Callable[[int], Transport],
    ) -> None:
        self.rank, self.placement, self.rng, self.faults = rank, placement, rng, faults
        self.digest = placement.digest()
        self.version = 0
        self.mover = SimulatedMover(self, clock, rng, open_transport)
        self.transaction: int | None = None
        self.target = placement
        self.deltas: dict[int, LayerDelta] = {}
        self.aborted: set[int] = set()
        self.disturbed: set[int] = set()  # transactions in which something was made to fail
        self.reports: list[Report] = []
        self.earlier: list[Report] = []
        self.commits: list[tuple[int, int, int]] = []  # (step, transaction, layer)
        self.counts: np.ndarray | None = None  # the bucket that is open
        self.num_steps = self.num_recorded = 0
        self._write_slots()

    def local(self, slot: int) -> int:
        return slot - self.placement.topology.slots_of(self.rank).start

    def _write_slots(self) -> None:
        slots = self.placement.topology.slots_of(self.rank)
        self.slots = [
            [(layer, expert, self.version) for expert in row[slots.start : slots.stop].tolist()]
            for layer, row in enumerate(self.placement.slot_to_expert)
        ]

    def execute(self, step: int, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Collect(on=on):
                    self._collect(on)
                case Plan():
                    self._plan(command)
                case Stage(transaction=transaction, layer=layer):
                    self._check_open(transaction, "Stage")
                    self.mover.stage(self.deltas[layer])
                case Commit(transaction=transaction, layer=layer):
                    self._check_open(transaction, "Commit")
                    self._commit(step, layer)
                case Abort(transaction=transaction):
                    self._abort(transaction)
                case CheckWeights(weights_version=version):
                    problem = "injected" if self.rng.random() < self.faults.check_fails else ""
                    self.reports.append(WeightsChecked(self.rank, version, problem))
                case Refit(weights_version=version):
                    self._refit(version)
        if commands:
            self._check_slots()

    def _check_open(self, transaction: int, what: str) -> None:
        if transaction in self.aborted:
            raise ViolationError(f"rank {self.rank}: {what} after the Abort of transaction {transaction}")
        if transaction != self.transaction:
            raise ViolationError(f"rank {self.rank}: {what} of transaction {transaction}, which is not open")

    def _plan(self, plan: Plan) -> None:
        if self.transaction is not None:
            raise ViolationError(f"rank {self.rank}: transactions {self.transaction} and {plan.transaction} overlap")
        if plan.start_digest != self.digest:
            raise ViolationError(f"rank {self.rank}: transaction {plan.transaction} starts from another placement")
        self.transaction = plan.transaction
        self.target = Placement(self.placement.topology, plan.slot_to_expert, plan.shares)
        self.deltas = {delta.layer: delta for delta in diff(self.placement, self.target)}
        self.mover.begin(plan.transaction)
        if self.rng.random() < self.faults.plan_refused:
            self.disturbed.add(plan.transaction)
            self.reports.append(Failed(self.rank, plan.transaction, -1, "refused"))

    def _commit(self, step: int, layer: int) -> None:
        assert self.transaction is not None
        transaction, delta = self.transaction, self.deltas.pop(layer)
        if delta.transfers:
            first = self.placement.topology.slots_of(self.rank).start
            for slot, payload in self.mover.take(layer).items():
                self.slots[layer][slot - first] = payload
            self.mover.installed()
        self.placement = self.placement.with_layer(layer, self.target)
        self.digest = self.placement.digest()
        self.commits.append((step, transaction, layer))
        if self.rng.random() >= self.faults.commit_lost:
            self.reports.append(Committed(self.rank, transaction, layer, self.digest))
        if not self.deltas:
            self.mover.finish()

    def _abort(self, transaction: int) -> None:
        self.aborted.add(transaction)
        if transaction != self.transaction:
            self.reports.append(Quiescent(self.rank, transaction))
            return
        self.mover.abort()

    def _refit(self, version: int) -> None:
        if self.transaction is not None or not self.mover.is_resting or self.mover.homecoming is not None:
            raise ViolationError(f"rank {self.rank}: new weights while transaction {self.transaction} is open")
        problem = "injected" if self.rng.random() < self.faults.write_fails else ""
        if not problem:
            self.version = version
            self._write_slots()
        self.reports.append(Refitted(self.rank, version, problem))

    def _collect(self, on: bool) -> None:
        if self.counts is not None:
            self.reports.append(LoadReport(self.rank, self.counts, self.num_steps, self.num_recorded, 1.0, 0.5, 0.1))
        shape = (self.placement.num_layers, self.placement.topology.num_experts)
        self.counts = np.zeros(shape, dtype=np.int64) if on else None
        self.num_steps = self.num_recorded = 0

    def record(self, layer: int, expert: int, count: int) -> None:
        """A forward took place; count 0: the phase filter left it out."""
        if self.counts is not None:
            self.num_steps += 1
            if count:
                self.num_recorded += 1
                self.counts[layer, expert] += count

    def end_step(self) -> list[Report]:
        reports, self.reports = [*self.reports, *self.mover.poll()], []
        if any(isinstance(r, Quiescent) and r.transaction == self.transaction for r in reports):
            self.transaction = None
        protocol = [report for report in reports if isinstance(report, Staged | Failed | Quiescent | Committed)]
        if protocol and self.rng.random() < self.faults.duplicate_report:
            reports.append(protocol[0])
        if self.earlier and self.rng.random() < self.faults.stale_report:
            reports.insert(0, self.rng.choice(self.earlier))
        self.earlier = (self.earlier + protocol)[-8:]
        return reports

    def _check_slots(self) -> None:
        """Every layer is wholly as its placement says, all of one version of the weights."""
        slots = self.placement.topology.slots_of(self.rank)
        for layer, row in enumerate(self.placement.slot_to_expert.tolist()):
            for payload, expert in zip(self.slots[layer], row[slots.start : slots.stop], strict=True):
                if payload != (layer, expert, self.version):
                    raise ViolationError(f"rank {self.rank}: a slot of layer {layer} holds {payload}, not {expert}")
