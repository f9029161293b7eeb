"""What has to move between two placements, by hand and against an executed copy."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.experts.delta import LayerDelta, Transfer, diff
from trimtab.experts.placement import Placement, Topology

FOUR_ON_TWO = Topology(4, 0, 2)  # slots 0, 1 | 2, 3
WITH_SPARE = Topology(4, 2, 2)  # slots 0, 1, 2 | 3, 4, 5


def test_equal_placements_differ_in_nothing() -> None:
    """B35: 0 bytes."""
    placement = Placement(FOUR_ON_TWO, [[0, 1, 2, 3]] * 2)
    assert diff(placement, Placement(FOUR_ON_TWO, [[0, 1, 2, 3]] * 2)) == ()


def test_a_swap_between_ranks_is_two_transfers_ordered_by_target() -> None:
    old, new = Placement(FOUR_ON_TWO, [[0, 1, 2, 3]]), Placement(FOUR_ON_TWO, [[0, 2, 1, 3]])
    (delta,) = diff(old, new)
    assert delta == LayerDelta(0, (Transfer(2, 2, (1,)), Transfer(1, 1, (2,))))
    assert [(t.source_rank(old), t.target_rank(old)) for t in delta.transfers] == [(1, 0), (0, 1)]
    assert delta.num_slots == 2


def test_only_layers_that_change_are_named_ascending() -> None:
    old = Placement(FOUR_ON_TWO, [[0, 1, 2, 3]] * 4)
    new = Placement(FOUR_ON_TWO, [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3], [0, 1, 3, 2]])
    assert [delta.layer for delta in diff(old, new)] == [1, 3]


def test_shares_alone_move_no_bytes() -> None:
    old = Placement(FOUR_ON_TWO, [[0, 1, 2, 3]])
    assert diff(old, Placement(FOUR_ON_TWO, [[0, 1, 2, 3]], [[1, 2, 1, 1]])) == (LayerDelta(0, ()),)


def test_a_rank_that_holds_an_expert_copies_it_from_itself() -> None:
    """B35: a permutation within ranks sends nothing between them."""
    old, new = Placement(FOUR_ON_TWO, [[0, 1, 2, 3]]), Placement(FOUR_ON_TWO, [[1, 0, 3, 2]])
    (delta,) = diff(old, new)
    assert all(t.source_rank(old) == t.target_rank(old) for t in delta.transfers) and delta.num_slots == 4
    twice = Placement(WITH_SPARE, [[0, 1, 0, 2, 3, 1]])
    spread = Placement(WITH_SPARE, [[0, 1, 1, 2, 3, 0]])
    (delta,) = diff(twice, spread)
    assert delta.transfers == (Transfer(1, 1, (2,)), Transfer(0, 0, (5,)))


def test_two_slots_of_a_rank_are_filled_by_one_transfer() -> None:
    """Rule 16: duplicates on one rank are one receive with local fan-out."""
    old, new = Placement(WITH_SPARE, [[0, 1, 0, 2, 3, 1]]), Placement(WITH_SPARE, [[0, 3, 3, 2, 3, 1]])
    (delta,) = diff(old, new)
    assert delta == LayerDelta(0, (Transfer(3, 4, (1, 2)),)) and delta.num_slots == 2


def test_sending_is_spread_over_the_replicas_ranks() -> None:
    topology = Topology(4, 4, 4)  # two slots per rank
    old = Placement(topology, [[0, 1, 0, 1, 2, 3, 2, 3]])
    new = Placement(topology, [[0, 1, 0, 1, 0, 3, 2, 1]])  # rank 2 gets expert 0, rank 3 expert 1
    (delta,) = diff(old, new)
    assert [(t.expert, t.source_rank(old)) for t in delta.transfers] == [(0, 0), (1, 1)]


def test_placements_of_two_models_have_no_difference() -> None:
    old = Placement(FOUR_ON_TWO, [[0, 1, 2, 3]])
    for other in (Placement(FOUR_ON_TWO, [[0, 1, 2, 3]] * 2), Placement(WITH_SPARE, [[0, 1, 2, 3, 0, 1]])):
        with pytest.raises(ValueError, match="must have the 1 layers and the topology"):
            diff(old, other)


def test_executing_the_transfers_gives_the_new_placement() -> None:
    """Random placements, duplicates on a rank among them; sources are read from the old contents alone."""
    rng = np.random.default_rng(seed := 11)
    topology = Topology(6, 6, 4)
    for _ in range(50):
        rows = [rng.permutation([*range(6), *rng.integers(0, 6, 6)]) for _ in range(2)]
        old, new = Placement(topology, rows[:1]), Placement(topology, rows[1:])
        slots = old.slot_to_expert[0].copy()
        for delta in diff(old, new):
            targets = [(t.target_rank(old), t.expert) for t in delta.transfers]
            assert targets == sorted(set(targets)), f"seed {seed}"  # ordered, and each expert comes to a rank once
            for transfer in delta.transfers:
                assert old.slot_to_expert[0, transfer.source_slot] == transfer.expert
                assert len({old.topology.rank_of(slot) for slot in transfer.target_slots}) == 1
                slots[list(transfer.target_slots)] = old.slot_to_expert[0, transfer.source_slot]
        assert slots.tolist() == new.slot_to_expert[0].tolist(), f"seed {seed}"
