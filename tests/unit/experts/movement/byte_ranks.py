"""Ranks whose experts are random bytes, and the oracle that says what every slot must hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab.experts.movement.choice import MovementPlan, choose_communicator, open_communicator
from trimtab.experts.movement.communicator.base import Communicator
from trimtab.experts.movement.mover import MovementConfig
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import MoverReport, SlotStorage
from trimtab.testing.movement import ByteSlots, MovingRanks, ScriptedFaults

COMMUNICATORS = ["shared_memory", "torch_gloo"]
every_communicator = pytest.mark.parametrize("communicator", COMMUNICATORS)

SLOT_NBYTES = 700
NUM_LAYERS = 2
TOPOLOGY = Topology(4, 2, 2)
FIRST = Placement(TOPOLOGY, [[0, 1, 2, 3, 0, 1]] * NUM_LAYERS)
# Every kind of move: a swap inside a rank, an exchange between ranks, a replica that becomes another's.
SECOND = Placement(TOPOLOGY, [[1, 0, 3, 2, 0, 2], [3, 2, 0, 2, 3, 1]])


def expert_bytes(layer: int, expert: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * layer + expert)
    return torch.randint(0, 256, (SLOT_NBYTES,), dtype=torch.uint8, generator=generator)


def load(storage: SlotStorage, layer: int, slot: int, expert: int) -> None:
    assert isinstance(storage, ByteSlots)
    storage.slots[slot] = expert_bytes(layer, expert)


@contextmanager
def byte_ranks(
    folder: Path,
    *,
    placement: Placement = FIRST,
    communicator: str | None = None,
    timeout_s: float = 30.0,
    faults: Mapping[int, ScriptedFaults] | None = None,
    staging_slot_nbytes: int = SLOT_NBYTES,
    slots_per_rank: int | None = None,
    opener: Callable[[MovementPlan, int], Communicator] = open_communicator,
    config: MovementConfig | None = None,
    exchange: bool = True,
) -> Iterator[MovingRanks]:
    topology = placement.topology
    plan = choose_communicator(
        num_ranks=topology.num_ranks,
        slots_per_rank=slots_per_rank or topology.slots_per_rank,
        slot_nbytes=staging_slot_nbytes,
        communicator=communicator,
        timeout_s=timeout_s,
    )
    ranks = MovingRanks(
        plan,
        placement,
        folder,
        lambda layer, rank: ByteSlots(topology.slots_per_rank, SLOT_NBYTES),
        load,
        faults=faults,
        opener=opener,
        config=config,
    )
    try:
        if exchange:
            ranks.exchange()
        yield ranks
    finally:
        ranks.close()


def wrong_slots(ranks: MovingRanks) -> list[tuple[int, int]]:
    """(layer, slot) of all ranks that are not read as their expert, by the oracle and by no checksum."""
    topology = ranks.placement.topology
    wrong = []
    for layer, row in enumerate(ranks.placement.slot_to_expert.tolist()):
        for slot, expert in enumerate(row):
            storage = ranks.storages[topology.rank_of(slot)][layer]
            assert isinstance(storage, ByteSlots)
            if not torch.equal(storage.read(slot % topology.slots_per_rank), expert_bytes(layer, expert)):
                wrong.append((layer, slot))
    return wrong


def only(reports: list[MoverReport]) -> MoverReport:
    assert len(reports) == 1, reports
    return reports[0]


def mover_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "mover" in thread.name]
