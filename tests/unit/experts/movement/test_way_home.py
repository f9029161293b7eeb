"""The way home: a committed layer is read in staging until its experts lie in their slots' own memory."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_ranks import (
    COMMUNICATORS,
    FIRST,
    NUM_LAYERS,
    SECOND,
    TOPOLOGY,
    byte_ranks,
    every_communicator,
    expert_bytes,
    mover_threads,
    only,
    wrong_slots,
)

from trimtab.experts.delta import diff
from trimtab.experts.movement.communicator.shared_memory import LoopbackCommunicator
from trimtab.experts.movement.faults import Point
from trimtab.experts.movement.mover import BackgroundMover
from trimtab.experts.movement.pacing import Pacer
from trimtab.experts.movement.staging import StagingSizes
from trimtab.experts.movement.verify import SlotMismatchError
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import PreparedSlot, Quiescent, Staged
from trimtab.testing.movement import (
    ByteSlots,
    MovingRanks,
    ScriptedFaults,
    bring_home,
    corrupts,
    install_staged,
    raises,
    waits_for,
)


def lent_slots(ranks: MovingRanks) -> list[list[tuple[int, int]]]:
    """By rank, (layer, slot) of what is read in staging."""
    lent = []
    for storages in ranks.storages:
        assert all(isinstance(storage, ByteSlots) for storage in storages)
        lent.append([(layer, slot) for layer, storage in enumerate(storages) for slot in sorted(storage.lent)])  # type: ignore[attr-defined]
    return lent


def held_at_home(
    tmp_path: Path, rank: int = 0, **more: Any
) -> tuple[AbstractContextManager[MovingRanks], threading.Event]:
    """Ranks of which one's mover brings no expert home before the event."""
    go = threading.Event()
    return byte_ranks(tmp_path, faults={rank: ScriptedFaults({Point.HOME: waits_for(go)})}, **more), go


@every_communicator
def test_rule_08_a_committed_layer_is_read_in_staging_until_its_experts_are_home(
    communicator: str, tmp_path: Path
) -> None:
    """They are right at every moment; the next layer waits for them on their rank, and its peers for that rank."""
    opened, go = held_at_home(tmp_path, communicator=communicator)
    with opened as ranks:
        ranks.begin(SECOND)
        ranks.stage(0)
        before = [storages[0].slots.clone() for storages in ranks.storages]  # type: ignore[attr-defined]
        ranks.commit(0, brings_home=False)
        assert wrong_slots(ranks) == [] and lent_slots(ranks) == [[(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 2)]]
        assert torch.equal(ranks.storages[0][0].slots, before[0])  # type: ignore[attr-defined]
        for mover in ranks.movers:
            mover.stage(1)
        assert bring_home(ranks.movers[1]) == []
        assert lent_slots(ranks)[1] == []
        ranks.check_slots()  # through staging, where it is read there
        assert ranks.movers[0].poll() == [] and lent_slots(ranks)[0] != []  # nobody waits for the mover
        go.set()
        assert bring_home(ranks.movers[0]) == []
        assert lent_slots(ranks) == [[], []] and wrong_slots(ranks) == []
        assert all(isinstance(only(reports), Staged) for reports in ranks.settled())
        ranks.commit(1)
        ranks.finish()
        assert wrong_slots(ranks) == [] and lent_slots(ranks) == [[], []]
        ranks.check_slots()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_rule_08_staging_that_opens_before_loans_are_given_back_corrupts(communicator: str, tmp_path: Path) -> None:
    """Negative control: copies at home are right, and kernels still read what the next layer has overwritten."""
    with byte_ranks(tmp_path, communicator=communicator) as ranks:
        ranks.begin(SECOND)
        ranks.stage(0)
        ranks.commit(0, brings_home=False)
        for mover in ranks.movers:
            mover.settle()  # all copied, and no poll has given back the loans
            mover._homecoming = None
            mover.stage(1)
        for mover in ranks.movers:
            mover.settle()
        assert [layer for layer, _ in wrong_slots(ranks)] == [0] * 5
        with pytest.raises(SlotMismatchError, match="slots do not hold the bytes of their expert"):
            ranks.check_slots()


def test_one_row_that_feeds_several_slots_brings_each_of_them_home(tmp_path: Path) -> None:
    topology = Topology(3, 3, 2)
    first = Placement(topology, [[0, 1, 2, 0, 1, 2]])
    with byte_ranks(tmp_path, placement=first) as ranks:
        ranks.begin(Placement(topology, [[1, 1, 1, 0, 0, 2]]))
        ranks.stage(0)
        ranks.commit(0, brings_home=False)
        (storage,) = ranks.storages[0]
        assert isinstance(storage, ByteSlots)
        assert storage.lent[0].data_ptr() == storage.lent[2].data_ptr()
        ranks.finish()
        assert lent_slots(ranks) == [[], []] and wrong_slots(ranks) == []


@every_communicator
def test_a_transaction_ends_on_a_rank_when_its_last_layer_is_home(communicator: str, tmp_path: Path) -> None:
    """No plan, no new weights and no other exchange before that: staging is read."""
    opened, go = held_at_home(tmp_path, communicator=communicator)
    with opened as ranks:
        transaction = ranks.begin(SECOND)
        for layer in range(NUM_LAYERS):
            go.set()
            ranks.stage(layer)
            go.clear()
            ranks.commit(layer, brings_home=False)
            if layer + 1 < NUM_LAYERS:
                go.set()
                assert [bring_home(mover) for mover in ranks.movers] == [[], []]
        late, other = ranks.movers
        for mover in ranks.movers:
            mover.finish()
        assert bring_home(other) == [Quiescent(1, transaction)]
        assert late.poll() == [] and lent_slots(ranks)[0] != []
        with pytest.raises(AssertionError, match="experts of layer 1 are not at home"):
            late.begin(transaction + 1, ranks.placement, [])
        with pytest.raises(AssertionError, match="a transaction is open"):
            late.exchange(ranks.placement)
        go.set()
        assert bring_home(late) == [Quiescent(0, transaction)]
        assert lent_slots(ranks) == [[], []] and wrong_slots(ranks) == []
        ranks.exchange()
        ranks.rearrange(FIRST)
        assert wrong_slots(ranks) == []


@every_communicator
@pytest.mark.parametrize("is_last", [False, True], ids=["next layer ordered", "last layer"])
def test_rule_18_an_abort_brings_a_committed_layer_home_first_and_without_rests(
    is_last: bool, communicator: str, tmp_path: Path
) -> None:
    """A rate limit that would rest for a year: the layer is at home, the one that was ordered behind it is dropped."""
    opened, go = held_at_home(tmp_path, communicator=communicator)
    with opened as ranks:
        target = Placement(TOPOLOGY, [SECOND.slot_to_expert[0], FIRST.slot_to_expert[1]]) if is_last else SECOND
        transaction = ranks.begin(target)
        ranks.stage(0)
        for mover in ranks.movers:
            mover._pacer = Pacer(1e-9)
        ranks.commit(0, brings_home=False)
        for mover in ranks.movers:
            mover.finish() if is_last else mover.stage(1)
            mover.abort()
        go.set()
        assert ranks.settled() == [[Quiescent(0, transaction)], [Quiescent(1, transaction)]]
        assert lent_slots(ranks) == [[], []] and wrong_slots(ranks) == []
        for mover in ranks.movers:
            mover._pacer = Pacer(1.0)
        ranks.rearrange(Placement(TOPOLOGY, [FIRST.slot_to_expert[0], SECOND.slot_to_expert[1]]))
        assert wrong_slots(ranks) == []
        ranks.check_slots()


@every_communicator
def test_rule_18_close_brings_a_committed_layer_home_first(communicator: str, tmp_path: Path) -> None:
    """No kernel is left with memory that was given back."""
    opened, go = held_at_home(tmp_path, communicator=communicator)
    with opened as ranks:
        ranks.begin(SECOND)
        ranks.stage(0)
        for mover in ranks.movers:
            mover._pacer = Pacer(1e-9)
        ranks.commit(0, brings_home=False)
        for mover in ranks.movers:
            mover.stage(1)
        assert lent_slots(ranks)[0] != []
        go.set()
    assert lent_slots(ranks) == [[], []] and wrong_slots(ranks) == []
    assert mover_threads() == [] and list(tmp_path.iterdir()) == []


@every_communicator
def test_staged_bytes_that_went_bad_after_the_commit_end_the_rank(communicator: str, tmp_path: Path) -> None:
    """The kernel may have computed with them: no abort makes that undone."""
    with byte_ranks(tmp_path, communicator=communicator, faults={0: ScriptedFaults({Point.HOME: corrupts})}) as ranks:
        ranks.begin(SECOND)
        ranks.stage(0)
        ranks.commit(0, brings_home=False)
        mover = ranks.movers[0]
        mover._thread.join()
        words = (
            r"rank 0: the mover's thread has ended: what slot 1 has read since the commit is not expert 0 of layer 0 "
            r"as ranks agreed on it \(checksum 0x"
        )
        for ask in (mover.poll, mover.settle):
            with pytest.raises(RuntimeError, match=words) as found:
                ask()
            assert isinstance(found.value.__cause__, SlotMismatchError)
    # Memory that is still read is kept, whoever has closed.
    storage = ranks.storages[0][0]
    assert isinstance(storage, ByteSlots) and len(storage.lent) == 3
    assert torch.equal(storage.read(0), expert_bytes(0, 1))


def test_a_mover_that_dies_on_the_way_home_ends_the_rank(tmp_path: Path) -> None:
    with byte_ranks(tmp_path, faults={1: ScriptedFaults({Point.HOME: raises("no page left")})}) as ranks:
        ranks.begin(SECOND)
        ranks.stage(0)
        ranks.commit(0, brings_home=False)
        ranks.movers[1]._thread.join()
        with pytest.raises(RuntimeError, match="rank 1: the mover's thread has ended: no page left"):
            ranks.movers[1].poll()
        assert wrong_slots(ranks) == []


class Keeps(ByteSlots):
    """A storage that copies what it is given, as the portable kernel does: nothing is lent."""

    def prepare(self, data: torch.Tensor) -> PreparedSlot:
        return data.clone()

    def install(self, slot: int, prepared: PreparedSlot) -> None:  # type: ignore[override]
        assert isinstance(prepared, torch.Tensor)
        self.slots[slot] = prepared


def test_a_storage_that_lends_nothing_frees_staging_with_its_commit() -> None:
    topology = Topology(2, 0, 1)
    old, new = Placement(topology, [[0, 1]]), Placement(topology, [[1, 0]])
    slots = Keeps(2, 100)
    slots.slots.copy_(torch.arange(2, dtype=torch.uint8)[:, None].expand(2, 100))
    faults = ScriptedFaults()
    mover = BackgroundMover([slots], 0, LoopbackCommunicator(StagingSizes(1, 2, 100), 5.0), faults=faults)
    mover.exchange(old)
    for transaction, (start, target) in enumerate([(old, new), (new, old)]):
        mover.begin(transaction, start, diff(start, target))
        mover.stage(0)
        assert isinstance(only(bring_home(mover)), Staged)
        loans = install_staged(mover, slots, 0)
        assert loans == {}
        mover.installed(0, loans)
        mover.finish()
        assert bring_home(mover) == [Quiescent(0, transaction)]
        mover.check_slots(target)
    assert Point.HOME not in [point for point, _ in faults.reached]
    mover.close()
