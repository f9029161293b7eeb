"""One rank of tests/multiprocess/test_movement_processes.py: a mover over random bytes, driven through a pipe.

It obeys (command, argument) and answers each with what the mover reported, or with what its slots hold.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
from torch import Tensor

from trimtab.experts.delta import diff
from trimtab.experts.movement.choice import MovementPlan, open_communicator
from trimtab.experts.movement.mover import BackgroundMover, MovementConfig
from trimtab.experts.placement import Placement
from trimtab.kernels.checksum import checksum
from trimtab.testing.movement import ByteSlots, bring_home, install_staged

SLOT_NBYTES = 50_003
NUM_LAYERS = 2


def expert_bytes(layer: int, expert: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * layer + expert)
    return torch.randint(0, 256, (SLOT_NBYTES,), dtype=torch.uint8, generator=generator)


class Rank:
    """Commands by name; `new` is the placement that the open transaction leads to."""

    def __init__(self, plan: MovementPlan, rank: int, placement: Placement) -> None:
        self.rank = rank
        self.placement = placement
        slots = placement.topology.slots_of(rank)
        self.storages = [ByteSlots(len(slots), SLOT_NBYTES) for _ in range(placement.num_layers)]
        for layer, storage in enumerate(self.storages):
            for slot, expert in enumerate(placement.slot_to_expert[layer, slots.start : slots.stop].tolist()):
                storage.slots[slot] = expert_bytes(layer, expert)
        self.mover = BackgroundMover(
            self.storages, rank, open_communicator(plan, rank), MovementConfig(max_share_of_time=1.0)
        )
        self.mover.exchange(placement)

    def begin(self, transaction: int, rows: list[list[int]]) -> list[object]:
        self.new = Placement(self.placement.topology, rows)
        self.mover.begin(transaction, self.placement, diff(self.placement, self.new))
        return self.reports()

    def stage(self, layer: int) -> list[object]:
        self.mover.stage(layer)
        return self.reports()

    def commit(self, layer: int) -> list[list[int]]:
        loans = install_staged(self.mover, self.storages[layer], layer)
        rows = self.placement.slot_to_expert.copy()
        rows[layer] = self.new.slot_to_expert[layer]
        self.placement = Placement(self.placement.topology, rows)
        self.mover.installed(layer, loans)
        assert bring_home(self.mover) == []
        self.mover.check_slots(self.placement)
        return [[checksum(row) for row in storage.slots] for storage in self.storages]

    def finish(self) -> list[object]:
        self.mover.finish()
        return self.reports()

    def abort(self) -> list[object]:
        self.mover.abort()
        return self.reports()

    def reports(self) -> list[object]:
        self.mover.settle()
        return list(self.mover.poll())


def serve(plan: MovementPlan, rank: int, placement: Placement, connection: Connection) -> None:
    torch.set_num_threads(1)
    served = Rank(plan, rank, placement)
    connection.send("ready")
    while (command := connection.recv()) != ("close",):
        name, *arguments = command
        connection.send(getattr(served, name)(*arguments))
    served.mover.close()
    connection.send("closed")
