"""Movement without kernels or engine: slots that are bytes, ranks driven by hand, faults where a test wants them."""

# L MoE layers  E experts  P slots  S slots/rank

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimtab.experts.delta import diff
from trimtab.experts.movement.choice import MovementPlan, MovementResources, create_resources, open_communicator
from trimtab.experts.movement.communicator.base import Communicator
from trimtab.experts.movement.faults import Point
from trimtab.experts.movement.mover import BackgroundMover, MovementConfig
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Loan, MoverReport, PreparedSlot, Quiescent, SlotStorage, Staged
from trimtab.kernels.checksum import checksum, copy_with_checksum
from trimtab.testing.ranks import run_ranks


class ByteSlots:
    """A SlotStorage without a kernel. As in the native one, what is prepared is staging, and read there while lent.

    `read` is what a kernel would read, `slots` uint8 [S, slot_nbytes] the slots' own memory.
    """

    def __init__(self, num_slots: int, slot_nbytes: int, layout: str = "bytes") -> None:
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self.layout = layout
        self.slots = torch.zeros(num_slots, slot_nbytes, dtype=torch.uint8)
        self.lent: dict[int, Tensor] = {}

    def read(self, slot: int) -> Tensor:
        return self.lent.get(slot, self.slots[slot])

    def export_slot(self, slot: int, out: Tensor) -> int:
        return copy_with_checksum(self.read(slot), out)

    def prepare(self, data: Tensor) -> PreparedSlot:
        return data

    def install(self, slot: int, prepared: PreparedSlot) -> Loan:
        assert isinstance(prepared, Tensor) and slot not in self.lent
        self.lent[slot] = prepared
        return _ByteLoan(self, slot)


class _ByteLoan:
    def __init__(self, storage: ByteSlots, slot: int) -> None:
        self._storage = storage
        self._slot = slot

    def copy_home(self) -> int:
        self._storage.slots[self._slot] = self._storage.lent[self._slot]
        return checksum(self._storage.slots[self._slot])

    def give_back(self) -> None:
        del self._storage.lent[self._slot]


def install_staged(mover: BackgroundMover, storage: SlotStorage, layer: int) -> dict[int, Loan]:
    """A commit's first part on one rank -> its loans, for `installed`."""
    taken = [(slot, storage.install(slot, prepared)) for slot, prepared in mover.take(layer)]
    return {slot: loan for slot, loan in taken if loan is not None}


def fill_slot(storage: SlotStorage, slot: int, data: Tensor) -> None:
    """The slot holds data uint8 [slot_nbytes], in its own memory."""
    if (loan := storage.install(slot, storage.prepare(data))) is not None:
        loan.copy_home()
        loan.give_back()


def bring_home(mover: BackgroundMover) -> list[MoverReport]:
    """Waits until a committed layer's experts are at home, staging is free -> what was reported besides."""
    mover.settle()
    return mover.poll()


Action = Callable[[int, Tensor | None, threading.Event], None]  # (layer, data, aborted)


class ScriptedFaults:
    """Does what `actions` say at their points, each as often as it is reached; remembers what was reached."""

    def __init__(self, actions: Mapping[Point, Action] | None = None) -> None:
        self.actions = dict(actions or {})
        self.reached: list[tuple[Point, int]] = []

    def reach(self, point: Point, layer: int, data: Tensor | None, aborted: threading.Event) -> None:
        self.reached.append((point, layer))
        if point in self.actions:
            self.actions[point](layer, data, aborted)


def raises(message: str) -> Action:
    """The mover cannot go on."""

    def act(layer: int, data: Tensor | None, aborted: threading.Event) -> None:
        raise RuntimeError(message)

    return act


def corrupts(layer: int, data: Tensor | None, aborted: threading.Event) -> None:
    """One bit of what lies there turns."""
    assert data is not None
    data[len(data) // 2] ^= 1


def never_ready(layer: int, data: Tensor | None, aborted: threading.Event) -> None:
    """The mover does not come back until its transaction is aborted."""
    aborted.wait()


def waits_for(event: threading.Event) -> Action:
    """The mover is as slow as the test says, abort or not."""

    def act(layer: int, data: Tensor | None, aborted: threading.Event) -> None:
        event.wait()

    return act


class MovingRanks:
    """All ranks' movers over real communicators, one thread each, driven by the caller's thread as steps would.

    `make_storage(layer, rank)` builds a storage; `load(layer, rank, slot, expert)` puts an expert where the placement
    says that it is. Close it.
    """

    def __init__(
        self,
        plan: MovementPlan,
        placement: Placement,
        folder: Path,
        make_storage: Callable[[int, int], SlotStorage],
        load: Callable[[SlotStorage, int, int, int], None],
        *,
        faults: Mapping[int, ScriptedFaults] | None = None,
        opener: Callable[[MovementPlan, int], Communicator] = open_communicator,
        config: MovementConfig | None = None,
    ) -> None:
        topology = placement.topology
        self.placement = placement
        self.weights_version = [0] * topology.num_ranks
        self.resources: MovementResources = create_resources(plan, folder)
        self.storages = [
            [make_storage(layer, rank) for layer in range(placement.num_layers)] for rank in range(topology.num_ranks)
        ]
        for rank, storages in enumerate(self.storages):
            for layer, storage in enumerate(storages):
                for slot, global_slot in enumerate(topology.slots_of(rank)):
                    load(storage, layer, slot, int(placement.slot_to_expert[layer, global_slot]))
        self.movers = [
            BackgroundMover(
                self.storages[rank],
                rank,
                opener(self.resources.plan, rank),
                config or MovementConfig(max_share_of_time=1.0),
                weights_version=lambda rank=rank: self.weights_version[rank],  # type: ignore[misc]
                faults=(faults or {}).get(rank),
            )
            for rank in range(topology.num_ranks)
        ]
        self._num_transactions = 0

    def exchange(self) -> None:
        run_ranks(len(self.movers), lambda rank: self.movers[rank].exchange(self.placement))

    def begin(self, new: Placement) -> int:
        self._num_transactions += 1
        self._new = new
        for mover in self.movers:
            mover.begin(self._num_transactions, self.placement, diff(self.placement, new))
        return self._num_transactions

    def stage(self, layer: int) -> list[list[MoverReport]]:
        """By rank: what came of it."""
        for mover in self.movers:
            mover.stage(layer)
        return self.settled()

    def settled(self) -> list[list[MoverReport]]:
        for mover in self.movers:
            mover.settle()
        return [mover.poll() for mover in self.movers]

    def commit(self, layer: int, *, brings_home: bool = True) -> None:
        """Without `brings_home` kernels may read staging afterwards, until `settled`."""
        loans = [install_staged(mover, self.storages[rank][layer], layer) for rank, mover in enumerate(self.movers)]
        self._advance(layer)
        for mover, lent in zip(self.movers, loans, strict=True):
            mover.installed(layer, lent)
        if brings_home:
            for mover in self.movers:
                assert bring_home(mover) == []

    def _advance(self, layer: int) -> None:
        slots, shares = self.placement.slot_to_expert.copy(), self.placement.shares.copy()
        slots[layer], shares[layer] = self._new.slot_to_expert[layer], self._new.shares[layer]
        self.placement = Placement(self.placement.topology, slots, shares)

    def finish(self) -> None:
        for mover in self.movers:
            mover.finish()
        for reports in self.settled():
            assert [type(report) for report in reports] == [Quiescent], reports

    def abort(self) -> list[list[MoverReport]]:
        for mover in self.movers:
            mover.abort()
        return self.settled()

    def rearrange(
        self, new: Placement, after_commit: Callable[[], None] = lambda: None, order: Sequence[int] | None = None
    ) -> int:
        """A whole transaction -> bytes received from other ranks. Shares that alone change are committed unstaged."""
        self.begin(new)
        num_bytes = 0
        layers = [delta.layer for delta in diff(self.placement, new) if delta.transfers]
        for layer in order or layers:
            for reports in self.stage(layer):
                assert len(reports) == 1 and isinstance(reports[0], Staged), reports
                num_bytes += reports[0].num_bytes
            self.commit(layer)
            after_commit()
        self.finish()
        return num_bytes

    def check_slots(self) -> None:
        for mover in self.movers:
            mover.check_slots(self.placement)

    def close(self) -> None:
        run_ranks(len(self.movers), lambda rank: self.movers[rank].close())
        self.resources.close()


def random_placement(topology: Topology, num_layers: int, generator: torch.Generator) -> Placement:
    """Every expert somewhere, replicas and duplicates on one rank included."""
    rows = []
    for _ in range(num_layers):
        spare = torch.randint(0, topology.num_experts, (topology.num_redundant,), generator=generator)
        row = torch.cat([torch.arange(topology.num_experts), spare])
        rows.append(row[torch.randperm(topology.num_slots, generator=generator)].tolist())
    return Placement(topology, rows)
