"""The published algorithm's own figures, and the repairs."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.experts.control.policy.base import PolicySettings, keep_slots, rank_loads, scaled_counts
from trimtab.experts.control.policy.default import pack, plan_rows, replicate, separate_duplicates
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology


def test_the_published_example_gives_the_published_placement() -> None:
    """The README of github.com/deepseek-ai/EPLB."""
    counts = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    rows = plan_rows(ExpertLoad(counts, 1), Topology(12, 4, 8), PolicySettings(num_groups=4, num_nodes=2))
    assert rows.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_packs_take_the_heaviest_first_and_fill_evenly() -> None:
    packs, places = pack(np.array([[9, 1, 8, 2]]), 2)
    assert packs.tolist() == [[0, 0, 1, 1]] and places.tolist() == [[0, 1, 0, 1]]
    assert pack(np.array([[5, 5, 5, 5]]), 2)[0].tolist() == [[0, 1, 0, 1]]  # ties: the first


def test_spare_slots_go_where_replicas_carry_most() -> None:
    replicas, counts = replicate(np.array([[60, 30, 10], [0, 0, 0]]), num_slots=5, num_ranks=5)
    assert counts.tolist() == [[2, 2, 1], [2, 2, 1]]  # 30, 30, 10: of equals the one with fewest replicas
    assert replicas.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]


def test_no_expert_gets_more_replicas_than_ranks() -> None:
    counts = replicate(np.array([[1000, 1, 1, 1]]), num_slots=8, num_ranks=2)[1]
    assert counts.tolist() == [[2, 2, 2, 2]]


@pytest.mark.parametrize(
    ("row", "num_ranks"),
    [([0, 0, 1, 2], 2), ([0, 0, 1, 1], 2), ([0, 0, 1, 1, 2, 2], 3), ([0, 0, 0, 1, 2, 3, 1, 2, 3], 3)],
)
def test_duplicates_on_a_rank_are_separated(row: list[int], num_ranks: int) -> None:
    mended = np.array(row)
    separate_duplicates(mended, np.array([9, 5, 3, 1]), num_ranks)
    assert sorted(mended.tolist()) == sorted(row)
    assert all(len(set(rank)) == len(rank) for rank in mended.reshape(num_ranks, -1).tolist())


def test_staying_experts_keep_their_slots() -> None:
    topology = Topology(6, 0, 2)
    assert keep_slots(np.array([0, 1, 2, 3, 4, 5]), np.array([2, 5, 0, 1, 3, 4]), topology).tolist() == [
        0,
        5,
        2,
        3,
        4,
        1,
    ]


def test_a_replicas_load_is_its_share() -> None:
    placement = Placement(Topology(2, 2, 2), [[0, 1, 0, 1]], [[3, 1, 1, 1]])
    load = ExpertLoad(np.array([[8, 4]]), 1)
    unit = int(scaled_counts(load)[0, 0]) // 8
    assert (rank_loads(scaled_counts(load), placement) // unit).tolist() == [[8, 4]]
