"""Ranks agree on what every expert is, or say where they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from byte_ranks import FIRST, SECOND, byte_ranks, expert_bytes
from torch import Tensor

from trimtab.experts.movement.verify import SlotMismatchError, check_slots, expert_checksums, slot_checksums
from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.checksum import checksum
from trimtab.testing.movement import ByteSlots, MovingRanks
from trimtab.testing.ranks import run_ranks

TOPOLOGY = Topology(3, 1, 2)
PLACEMENT = Placement(TOPOLOGY, [[0, 1, 2, 0], [2, 1, 0, 2]])


def words(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, dtype=np.uint64)


def test_the_table_is_by_expert_whatever_slot_holds_it() -> None:
    table = expert_checksums(PLACEMENT, words([[10, 11, 12, 10], [22, 21, 20, 22]]))
    assert table.tolist() == [[10, 11, 12], [20, 21, 22]]


def test_replicas_that_differ_are_named_by_layer_expert_and_ranks() -> None:
    with pytest.raises(SlotMismatchError, match=r"replicas of expert 2 of layer 1 on ranks \[0, 1\] differ \(1 slots"):
        expert_checksums(PLACEMENT, words([[10, 11, 12, 10], [22, 21, 20, 99]]))


def test_slots_that_hold_another_expert_are_named() -> None:
    slots = ByteSlots(2, 8)
    slots.slots[0], slots.slots[1] = 1, 2
    (own,) = slot_checksums([slots]).tolist()
    placement = Placement(Topology(4, 0, 2), [[0, 1, 2, 3]])
    table = words([[5, 6, *own]])
    check_slots([slots], placement, 1, table)
    slots.slots[1] = 1
    with pytest.raises(SlotMismatchError, match=r"rank 1: 1 slots .* their expert: layer 0 slot 3 \(expert 3\)$"):
        check_slots([slots], placement, 1, table)


def test_ranks_exchange_what_they_hold(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        for mover in ranks.movers:
            table = mover._table()
            assert table.shape == (2, 4)
            assert [[int(value) for value in row] for row in table] == [
                [checksum(expert_bytes(layer, expert)) for expert in range(4)] for layer in range(2)
            ]
        ranks.check_slots()


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
def test_ranks_that_loaded_different_weights_do_not_start(communicator: str, tmp_path: Path) -> None:
    with byte_ranks(tmp_path, communicator=communicator, exchange=False) as ranks:
        storage = ranks.storages[1][1]
        assert isinstance(storage, ByteSlots)
        storage.slots[1, 3] ^= 1  # expert 0's replica
        with pytest.raises(SlotMismatchError, match=r"replicas of expert 0 of layer 1 on ranks \[0, 1\] differ"):
            ranks.exchange()


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
def test_the_handshake_finds_a_layer_that_is_kept_otherwise(communicator: str, tmp_path: Path) -> None:
    with byte_ranks(tmp_path, communicator=communicator, exchange=False) as ranks:
        ranks.storages[1][1].layout = "transposed"
        with pytest.raises(
            SlotMismatchError, match=r"experts of layer 1 on rank 1 are kept as \(3 slots of 700 bytes, transposed\), "
        ):
            ranks.exchange()


def test_new_weights_are_agreed_on_anew(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        for rank, storages in enumerate(ranks.storages):
            for layer, storage in enumerate(storages):
                assert isinstance(storage, ByteSlots)
                for slot, expert in enumerate(FIRST.slot_to_expert[layer, 3 * rank : 3 * rank + 3].tolist()):
                    storage.slots[slot] = expert_bytes(layer + 10, expert)
            ranks.weights_version[rank] = 1
        with pytest.raises(SlotMismatchError, match="6 slots"):
            ranks.check_slots()
        ranks.exchange()
        ranks.check_slots()
        ranks.rearrange(SECOND)
        ranks.check_slots()


class Unreadable(ByteSlots):
    """Slots that cannot be read while `is_broken`."""

    is_broken = True

    def export_slot(self, slot: int, out: Tensor) -> int:
        if self.is_broken:
            raise OSError("bad page")
        return super().export_slot(slot, out)


def outcomes(ranks: MovingRanks) -> list[str]:
    """By rank, what its exchange raised, each on a thread of its own."""

    def exchange(rank: int) -> str:
        try:
            ranks.movers[rank].exchange(ranks.placement)
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(len(ranks.movers), exchange)


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
@pytest.mark.parametrize("is_first", [True, False], ids=["at start", "after new weights"])
def test_a_rank_that_fails_before_it_gathers_leaves_ranks_in_step(
    communicator: str, is_first: bool, tmp_path: Path
) -> None:
    """It takes part all the same, so that others learn at once why, and the next exchange is everyone's next."""
    with byte_ranks(tmp_path, communicator=communicator, timeout_s=3_600.0, exchange=False) as ranks:
        whole = ranks.movers[1]._storages[1]
        assert isinstance(whole, ByteSlots)
        broken = Unreadable(whole.num_slots, whole.slot_nbytes)
        broken.slots.copy_(whole.slots)
        ranks.movers[1]._storages[1] = broken  # type: ignore[index]
        if not is_first:
            broken.is_broken = False
            assert outcomes(ranks) == ["", ""]
            broken.is_broken = True
        for _ in range(2):
            assert outcomes(ranks) == [
                "RankFailureError: rank 1 cannot tell what its slots hold: OSError: bad page",
                "OSError: bad page",
            ]
        broken.layout = "transposed"
        broken.is_broken = False
        assert all("are kept as (3 slots of 700 bytes, transposed)" in why for why in outcomes(ranks))
        broken.layout = "bytes"
        assert outcomes(ranks) == ["", ""]
        ranks.rearrange(SECOND)
        ranks.check_slots()
