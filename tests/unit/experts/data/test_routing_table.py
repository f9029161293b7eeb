"""The look-up is one tensor of stable identity whose every entry is a live replica."""

from __future__ import annotations

import numpy as np
import pytest
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


def test_rule_03_entries_are_live_replicas_and_meet_shares_within_one() -> None:
    generator = np.random.default_rng(3)
    most_replicas = 0
    for _ in range(60):
        experts, redundant = int(generator.integers(1, 6)), int(generator.integers(0, 70))
        slots = generator.permutation(np.concatenate([np.arange(experts), generator.integers(0, experts, redundant)]))
        shares = generator.integers(1, 5, (1, slots.size))
        placement = Placement(Topology(experts, redundant), slots[None], shares)
        table = RoutingTable(placement, 0, token_group=int(generator.integers(0, 4)))
        for expert, replicas in enumerate(placement.expert_to_slots(0)):
            row = table.slots[expert].tolist()
            assert set(row) <= set(replicas)
            most_replicas = max(most_replicas, len(replicas))
            total = sum(shares[0, slot] for slot in replicas)
            for slot in replicas:
                assert abs(row.count(slot) - table.period * shares[0, slot] / total) < 1
    assert most_replicas > 60, "some had more replicas than the shortest period"


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5, 6])
def test_rule_03_up_to_six_equal_replicas_get_exactly_equal_shares(num_replicas: int) -> None:
    """Though the layer has ten redundant slots: 2 of 3 tokens to one of two replicas would undo a balanced plan."""
    slots = [0] * num_replicas + [1] * (12 - num_replicas)
    row = RoutingTable(Placement(Topology(2, 10), [slots]), 0).slots[0]
    assert row.bincount().tolist() == [60 // num_replicas] * num_replicas


def test_rule_03_replicas_are_interleaved_so_that_few_tokens_spread_too() -> None:
    """Any 10 neighbouring positions differ from the shares by less than two tokens."""
    table = RoutingTable(Placement(Topology(2, 2), [[0, 0, 0, 1]], [[1, 2, 3, 1]]), 0)
    row = torch.cat([table.slots[0], table.slots[0]])
    for first in range(table.period):
        counts = row[first : first + 10].bincount(minlength=3)
        assert (counts - 10 * torch.tensor([1, 2, 3]) / 6).abs().max() < 2


def test_b18_maps_from_placement_to_table_are_inverse_for_many_sizes() -> None:
    """B18: every entry in range, every expert found, replica counts summing to P."""
    for experts, redundant, ranks in ((8, 0, 2), (8, 4, 4), (10, 2, 4), (60, 4, 8)):
        topology = Topology(experts, redundant, ranks)
        placement = Placement.identity(topology, 1)
        table = RoutingTable(placement, 0)
        assert int(table.slots.min()) >= 0 and int(table.slots.max()) < topology.num_slots
        back = torch.from_numpy(placement.slot_to_expert[0].copy())[table.slots]
        assert torch.equal(back, torch.arange(experts)[:, None].expand_as(back))
        assert table.slots.unique().numel() == topology.num_slots


def test_rule_03_the_tensor_keeps_its_identity_over_refreshes() -> None:
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
