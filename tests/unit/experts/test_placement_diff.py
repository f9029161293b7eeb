"""Placements' differences in words, by hand."""

from __future__ import annotations

from trimtab.experts.placement import Placement, Topology
from trimtab.experts.placement_diff import describe

TOPOLOGY = Topology(3, 1, 2)  # slots 0 and 1 on rank 0, slots 2 and 3 on rank 1
START = Placement(TOPOLOGY, [[0, 1, 2, 0]] * 4)


def changed(*rows: list[int], shares: list[list[int]] | None = None) -> Placement:
    return Placement(TOPOLOGY, [*rows, *([[0, 1, 2, 0]] * (4 - len(rows)))], shares)


def test_a_replica_a_move_and_a_change_of_place_are_told_apart() -> None:
    assert describe(START, changed([0, 1, 2, 1], [0, 2, 1, 0], [1, 0, 2, 0])) == [
        "5 slots get another expert in 3 layers; most replicas of one expert: 2",
        "layer 0: expert 1 gets its 2nd replica on rank 1 (slot 3, was expert 0)",
        "layer 1: expert 2 moves to rank 0 (slot 1, was expert 1)",
        "layer 1: expert 1 moves to rank 1 (slot 2, was expert 2)",
        "layer 2: expert 1 changes its place on rank 0 (slot 0, was expert 0)",
        "layer 2: expert 0 changes its place on rank 0 (slot 1, was expert 1)",
    ]


def test_replicas_are_counted_up_to_what_there_will_be() -> None:
    topology = Topology(2, 4, 3)
    old, new = Placement(topology, [[0, 1, 1, 1, 1, 1]]), Placement(topology, [[0, 0, 0, 0, 1, 1]])
    assert describe(old, new)[:4] == [
        "3 slots get another expert in 1 layer; most replicas of one expert: 4, 5 before",
        "layer 0: expert 0 gets its 2nd replica on rank 0 (slot 1, was expert 1)",
        "layer 0: expert 0 gets its 3rd replica on rank 1 (slot 2, was expert 1)",
        "layer 0: expert 0 gets its 4th replica on rank 1 (slot 3, was expert 1)",
    ]


def test_many_changes_are_cut_off_and_what_is_left_out_is_counted() -> None:
    everything = changed(*[[1, 2, 0, 1]] * 4)
    lines = describe(START, everything, max_lines=5)
    assert len(lines) == 5 and lines[0].startswith("16 slots") and lines[-1] == "and 13 more slots"
    assert len(describe(START, everything, max_lines=17)) == 17  # all of them, and nothing to add


def test_layers_whose_shares_alone_change_are_named() -> None:
    shares = [[1, 1, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 3]]
    assert describe(START, changed(shares=shares)) == [
        "0 slots get another expert in 0 layers; most replicas of one expert: 2",
        "layer 1 and 1 more: shares alone change",
    ]
    assert describe(START, START) == ["nothing changes"]
