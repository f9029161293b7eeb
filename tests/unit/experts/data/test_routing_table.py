"""The look-up is one tensor of stable identity whose every entry is a live replica."""

from __future__ import annotations

import numpy as np
import torch

from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.placement import Placement, Topology


def test_with_every_expert_in_its_own_slot_ids_pass_through() -> None:
    table = RoutingTable(Placement.identity(Topology(4), 1), 0)
    ids = torch.tensor([[3, 0], [-1, 2]])
    assert torch.equal(table.look_up(ids), ids)


def test_permuted_experts_are_found_in_their_slots() -> None:
    table = RoutingTable(Placement(Topology(3), [[0, 1, 2], [2, 0, 1]]), 1)
    assert table.look_up(torch.tensor([[0, 1], [2, 2]])).tolist() == [[1, 2], [0, 0]]


def test_padding_stays_padding_and_never_becomes_the_last_expert() -> None:
    """B20: -1 as an index means the last entry."""
    table = RoutingTable(Placement(Topology(3, 1), [[2, 0, 1, 2]]), 0)
    ids = torch.tensor([[-1, -1], [0, -1]])
    assert table.look_up(ids).tolist() == [[-1, -1], [1, -1]]
    assert ids.tolist() == [[-1, -1], [0, -1]], "the router's ids are left alone"


def test_tokens_spread_over_replicas_by_position() -> None:
    table = RoutingTable(Placement(Topology(2, 1), [[0, 1, 0]]), 0)
    assert table.look_up(torch.zeros(4, 1, dtype=torch.int64)).flatten().tolist() == [0, 2, 0, 2]


def test_token_groups_start_at_different_replicas() -> None:
    """One decode token per group still spreads; ranks that share a group choose alike."""
    placement = Placement(Topology(2, 1), [[0, 1, 0]])
    first = [
        RoutingTable(placement, 0, token_group=group).look_up(torch.zeros(1, 1).long()).item() for group in (0, 1, 0)
    ]
    assert first == [0, 2, 0]


def test_entries_are_live_replicas_and_meet_shares_within_one() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        experts, redundant = int(generator.integers(1, 6)), int(generator.integers(0, 9))
        slots = np.concatenate([np.arange(experts), generator.integers(0, experts, redundant)])
        shares = generator.integers(1, 5, (1, slots.size))
        placement = Placement(Topology(experts, redundant), slots[None], shares)
        table = RoutingTable(placement, 0, token_group=int(generator.integers(0, 4)))
        for expert, replicas in enumerate(placement.expert_to_slots(0)):
            row = table.slots[expert].tolist()
            assert set(row) <= set(replicas)
            total = sum(shares[0, slot] for slot in replicas)
            for slot in replicas:
                assert abs(row.count(slot) - table.period * shares[0, slot] / total) <= 1


def test_the_tensor_keeps_its_identity_over_refreshes() -> None:
    topology = Topology(3, 1)
    table = RoutingTable(Placement(topology, [[0, 1, 2, 0]]), 0)
    captured = table.slots
    for slots in ([2, 1, 0, 1], [1, 1, 0, 2], [0, 1, 2, 2]):
        table.refresh(Placement(topology, [slots]), 0)
        assert table.slots is captured
        fresh = RoutingTable(Placement(topology, [slots]), 0)
        assert torch.equal(captured, fresh.slots)


def test_a_refresh_leaves_and_enters_the_identity() -> None:
    topology = Topology(2)
    table = RoutingTable(Placement.identity(topology, 1), 0)
    ids = torch.tensor([[0, 1]])
    table.refresh(Placement(topology, [[1, 0]]), 0)
    assert table.look_up(ids).tolist() == [[1, 0]]
    table.refresh(Placement.identity(topology, 1), 0)
    assert table.look_up(ids).tolist() == [[0, 1]]
