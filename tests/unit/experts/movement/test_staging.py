"""Who sends what into which row: all ranks number a layer's rows alike, and none gets more than it has slots."""

from __future__ import annotations

import pytest
import torch

from trimtab.experts.delta import diff
from trimtab.experts.movement.pacing import Pacer
from trimtab.experts.movement.staging import StagingSizes, plan_traffic
from trimtab.experts.placement import Placement, Topology
from trimtab.testing.movement import random_placement

SEED = 20_261_130


def test_a_swap_inside_a_rank_and_one_between_ranks() -> None:
    topology = Topology(6, 0, 2)
    old = Placement(topology, [[0, 1, 2, 3, 4, 5]])
    new = Placement(topology, [[1, 0, 3, 2, 4, 5]])  # 0 and 1 change places on rank 0; 2 and 3 between the ranks
    (delta,) = diff(old, new)
    first, second = (plan_traffic(delta, old, rank) for rank in (0, 1))
    assert [(a.row, a.transfer.expert, a.transfer.target_slots) for a in first.copies] == [(0, 0, (1,)), (1, 1, (0,))]
    assert [(a.row, a.source_rank, a.transfer.expert) for a in first.arrivals] == [(2, 1, 3)]
    assert [(d.target_rank, d.row, d.transfer.expert) for d in first.departures] == [(1, 0, 2)]
    assert second.copies == ()
    assert [(d.target_rank, d.row, d.transfer.expert) for d in second.departures] == [(0, 2, 3)]


def test_rule_16_duplicates_on_one_rank_are_received_once_and_fill_all_their_slots() -> None:
    topology = Topology(4, 4, 2)
    old = Placement(topology, [[0, 1, 2, 3, 0, 1, 2, 3]])
    new = Placement(topology, [[0, 1, 2, 3, 0, 0, 0, 3]])
    (delta,) = diff(old, new)
    receiver = plan_traffic(delta, old, 1)
    assert [(a.row, a.transfer.target_slots) for a in receiver.copies] == [(0, (5, 6))]
    new = Placement(topology, [[3, 3, 0, 1, 0, 1, 2, 3]])
    (delta,) = diff(Placement(topology, [[0, 1, 2, 2, 0, 1, 2, 3]]), new)
    (arrival,) = plan_traffic(delta, old, 0).arrivals
    assert arrival.transfer.target_slots == (0, 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_departure_is_somebodys_arrival_in_the_same_row(num_ranks: int) -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    topology = Topology(8, 8, num_ranks)
    num_departures = 0
    for _ in range(50):
        old, new = (random_placement(topology, 1, generator) for _ in range(2))
        for delta in diff(old, new):
            traffics = [plan_traffic(delta, old, rank) for rank in range(num_ranks)]
            sent = {
                (rank, d.target_rank, d.row, d.transfer) for rank in range(num_ranks) for d in traffics[rank].departures
            }
            received = {
                (a.source_rank, rank, a.row, a.transfer) for rank in range(num_ranks) for a in traffics[rank].arrivals
            }
            assert sent == received
            num_departures += len(sent)
            for rank, traffic in enumerate(traffics):
                rows = [arrival.row for arrival in (*traffic.copies, *traffic.arrivals)]
                assert sorted(rows) == list(range(len(rows))) and len(rows) <= topology.slots_per_rank
                filled = [slot for a in (*traffic.copies, *traffic.arrivals) for slot in a.transfer.target_slots]
                changed = [s for s in topology.slots_of(rank) if old.slot_to_expert[0, s] != new.slot_to_expert[0, s]]
                assert sorted(filled) == changed
    assert (num_departures > 0) == (num_ranks > 1)


def test_ranks_begin_with_different_receivers() -> None:
    topology = Topology(6, 6, 3)
    old = Placement(topology, [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    new = Placement(topology, [[4, 5, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]])
    (delta,) = diff(old, new)
    for rank in range(3):
        targets = [(d.target_rank - rank) % 3 for d in plan_traffic(delta, old, rank).departures]
        assert targets == sorted(targets)


def test_staging_is_one_row_per_slot_in_whole_cache_lines() -> None:
    assert StagingSizes(num_ranks=2, slots_per_rank=5, slot_nbytes=100).staging_nbytes == 5 * 128


def test_rests_make_work_its_share_of_the_time() -> None:
    now = 0.0
    rests: list[float] = []
    pacer = Pacer(0.25, clock=lambda: now)
    for piece in (1.0, 2.0):
        with pacer.work():
            now += piece
    now += 50.0  # waiting for another rank is no work
    pacer.rest(rests.append)
    pacer.rest(rests.append)
    assert rests == [9.0]


def test_a_full_share_never_rests() -> None:
    pacer = Pacer(1.0)
    with pacer.work():
        pass
    pacer.rest(lambda seconds: pytest.fail("there is nothing to rest from"))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_shares_of_time_are_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match=r"max_share_of_time \(.*\) must be above 0 and at most 1"):
        Pacer(share)
