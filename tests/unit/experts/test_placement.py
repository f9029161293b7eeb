"""A placement is checked whole, frozen, and the only source of replica counts and slots."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from trimtab.experts.placement import Placement, Topology


def test_ranks_own_contiguous_slots() -> None:
    topology = Topology(num_experts=6, num_redundant=2, num_ranks=4)
    assert (topology.num_slots, topology.slots_per_rank) == (8, 2)
    assert [list(topology.slots_of(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [topology.rank_of(slot) for slot in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_slots_that_do_not_divide_over_ranks_are_refused_with_a_number_that_does() -> None:
    with pytest.raises(ValueError, match=r"num_slots \(37 = .*multiple of num_ranks \(8\); try .*=8"):
        Topology(num_experts=32, num_redundant=5, num_ranks=8)
    assert Topology(num_experts=32, num_redundant=8, num_ranks=8).slots_per_rank == 5


@pytest.mark.parametrize(("field", "value"), [("num_experts", 0), ("num_redundant", -1), ("num_ranks", 0)])
def test_impossible_sizes_are_refused_by_name(field: str, value: int) -> None:
    sizes = {"num_experts": 4, "num_redundant": 0, "num_ranks": 1} | {field: value}
    with pytest.raises(ValueError, match=rf"{field} \({value}\) must be at least"):
        Topology(**sizes)


def test_identity_gives_each_expert_the_slot_of_its_number() -> None:
    placement = Placement.identity(Topology(4), num_layers=2)
    assert placement.slot_to_expert.tolist() == [[0, 1, 2, 3]] * 2
    assert placement.is_identity(0) and placement.is_identity(1)


def test_identity_fills_redundant_slots_with_the_first_experts_again() -> None:
    placement = Placement.identity(Topology(3, 5), num_layers=1)
    assert placement.slot_to_expert.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert not placement.is_identity(0)


def test_a_permutation_is_not_the_identity() -> None:
    placement = Placement(Topology(3), [[0, 1, 2], [1, 0, 2]])
    assert [placement.is_identity(layer) for layer in range(2)] == [True, False]


def test_slots_and_replica_counts_are_derived() -> None:
    placement = Placement(Topology(3, 2), [[2, 0, 1, 2, 2]])
    assert placement.expert_to_slots(0) == ((1,), (2,), (0, 3, 4))
    assert placement.replica_counts().tolist() == [[1, 1, 3]]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 1, 1]], r"layer 0 has no slot for expert 2 \(1 missing\)"),
        ([[0, 1, 2, 3]], r"slot_to_expert\[0, 3\] \(3\) must be in \[0, 3\)"),
        ([[0, 1, 2, 0], [0, 1, -1, 2]], r"slot_to_expert\[1, 2\] \(-1\)"),
        ([[0, 1, 2]], r"must be integers \[num_layers, 4\]"),
        ([0, 1, 2, 0], r"must be integers \[num_layers, 4\]"),
        ([[0.0, 1.0, 2.0, 0.0]], r"float64"),
    ],
)
def test_a_wrong_placement_is_refused_by_entry(slots: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(Topology(3, 1), slots)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([[1, 0, 1]], r"shares\[0, 1\] \(0\) must be at least 1"),
        ([[1, 1]], r"shares .* must be integers"),
        ([[1, 1, 1]] * 2, r"shares \(2, 3\) must have the shape"),
    ],
)
def test_wrong_shares_are_refused(shares: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(Topology(2, 1), [[0, 1, 0]], shares)


def test_a_placement_cannot_be_changed_not_even_through_its_source() -> None:
    source = np.array([[0, 1, 2]])
    placement = Placement(Topology(3), source)
    source[0, 0] = 2
    assert placement.slot_to_expert.tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="read-only"):
        placement.slot_to_expert[0, 0] = 1
    with pytest.raises(AttributeError):
        placement.shares = None  # type: ignore[misc]


def test_the_digest_covers_topology_slots_and_shares() -> None:
    base = Placement(Topology(2, 2), [[0, 1, 0, 1]])
    same = Placement(Topology(2, 2), np.array([[0, 1, 0, 1]], dtype=np.int32), [[1, 1, 1, 1]])
    assert base == same and hash(base) == hash(same) and base.digest() == same.digest()
    others = [
        Placement(Topology(2, 2), [[0, 1, 1, 0]]),
        Placement(Topology(2, 2), [[0, 1, 0, 1]], [[2, 1, 1, 1]]),
        Placement(Topology(2, 2, num_ranks=2), [[0, 1, 0, 1]]),
    ]
    assert len({placement.digest() for placement in (base, *others)}) == 4


def test_the_words_of_placement_load_no_torch() -> None:
    code = "import sys, trimtab.experts.placement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rule_17_redundant_slots_are_spread_over_ranks_from_the_start() -> None:
    placement = Placement.initial(Topology(8, 4, 4), num_layers=2)
    assert placement.slot_to_expert.tolist() == 2 * [[0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0]]
    for experts, redundant, ranks in ((8, 2, 2), (60, 4, 2), (6, 2, 4), (128, 32, 16), (5, 7, 4)):
        topology = Topology(experts, redundant, ranks)
        row = Placement.initial(topology, 1).slot_to_expert[0].reshape(ranks, -1)
        assert all(len(set(slots)) == len(slots) for slots in row.tolist()), "a replica on its expert's own rank"
        counts = Placement.initial(topology, 1).replica_counts()
        assert counts.max() - counts.min() <= 2
    assert Placement.initial(Topology(8, 0, 2), 1) == Placement.identity(Topology(8, 0, 2), 1)


def test_one_layer_of_a_placement_follows_another_placement() -> None:
    topology = Topology(4, 2, 2)
    old, new = Placement.identity(topology, 3), Placement.initial(topology, 3)
    mixed = old.with_layer(1, new)
    assert mixed == Placement(topology, np.stack([old.slot_to_expert[0], new.slot_to_expert[1], old.slot_to_expert[2]]))
    assert old.with_layer(0, new).with_layer(1, new).with_layer(2, new).digest() == new.digest()
    with pytest.raises(ValueError, match="read-only"):
        mixed.slot_to_expert[1, 0] = 0
