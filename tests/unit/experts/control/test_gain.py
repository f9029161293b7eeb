"""Balancedness, predicted gain and cost, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.experts.control.gain import Outlook, balancedness, count_changes, look_ahead, mean_balancedness
from trimtab.experts.delta import diff
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

FOUR_RANKS = Placement(Topology(4, 0, 4), [[0, 1, 2, 3]] * 3)
TWO_RANKS = Placement(Topology(4, 0, 2), [[0, 1, 2, 3]])
SWAPPED = Placement(Topology(4, 0, 2), [[0, 2, 1, 3]])


def test_balancedness_is_mean_over_max_of_the_ranks_loads() -> None:
    """B29: (10,10,10,10) is 1, (40,0,0,0) is 0.25, and a layer without load counts as even."""
    load = ExpertLoad(np.array([[10, 10, 10, 10], [40, 0, 0, 0], [0, 0, 0, 0]]), 1)
    by_layer = balancedness(load, FOUR_RANKS)
    assert by_layer.tolist() == [1.0, 0.25, 1.0]
    assert mean_balancedness(load, by_layer) == 0.625  # over the two layers that had traffic
    nothing = ExpertLoad(np.zeros((3, 4), dtype=np.int64), 0)
    assert mean_balancedness(nothing, balancedness(nothing, FOUR_RANKS)) == 1.0


def outlook(
    *, times: tuple[float, float, float] = (10.0, 4.0, 1.0), min_gain: float = 0.02, bandwidth: float = 1e6
) -> Outlook:
    """Ranks' loads go from (30, 10) to (20, 20)."""
    load = ExpertLoad(np.array([[15, 15, 5, 5]]), 100)
    return look_ahead(
        load, np.array([times, (9.0, 1.0, 1.0)]), TWO_RANKS, SWAPPED, count_changes(TWO_RANKS, SWAPPED),
        slot_nbytes=1000, bandwidth=bandwidth, horizon_steps=1000, min_gain=min_gain,
    )  # fmt: skip


def test_gain_is_the_experts_share_of_a_step_times_what_the_most_loaded_rank_loses() -> None:
    found = outlook()
    assert (found.balancedness, found.predicted_balancedness) == (pytest.approx(2 / 3), 1.0)
    assert found.experts_share == 0.5 and found.step_s == 0.1  # the slowest rank's
    assert found.gain == pytest.approx(0.5 * (1 - 20 / 30))


def test_cost_is_the_busiest_ranks_receiving_over_the_horizon() -> None:
    found = outlook()
    assert (found.num_moves, found.num_bytes, found.busiest_rank_bytes) == (2, 2000, 1000)
    assert found.cost == pytest.approx(1000 / 1e6 / (1000 * 0.1))
    assert found.pays
    slow = outlook(bandwidth=50.0)  # 20 s of moving in 100 s of steps: more than the sixth that is won
    assert slow.cost == pytest.approx(0.2) and not slow.pays
    assert outlook(bandwidth=50.0, min_gain=0.0).pays  # 0: always


def test_without_measured_times_the_whole_step_counts_as_experts() -> None:
    load = ExpertLoad(np.array([[15, 15, 5, 5]]), 100)
    unmeasured = look_ahead(
        load, np.zeros((2, 3)), TWO_RANKS, SWAPPED, count_changes(TWO_RANKS, SWAPPED),
        slot_nbytes=1000, bandwidth=1e6, horizon_steps=1000, min_gain=0.02,
    )  # fmt: skip
    assert (unmeasured.experts_share, unmeasured.step_s, unmeasured.cost) == (1.0, 0.0, 0.0)


def test_changes_are_those_of_the_delta() -> None:
    """The count that decides and the moves that ranks make are the same."""
    rng = np.random.default_rng(SEED := 7)
    for _ in range(20):
        topology = Topology(6, 3, 3)
        old, new = (
            Placement(topology, [rng.permutation([*range(6), 0, 1, 2]) for _ in range(3)], rng.integers(1, 3, (3, 9)))
            for _ in range(2)
        )
        new = old.with_layer(0, new).with_layer(2, new)
        changes, deltas = count_changes(old, new), diff(old, new)
        assert changes.layers == tuple(delta.layer for delta in deltas), f"seed {SEED}"
        received = np.zeros((3, 3), dtype=np.int64)
        for delta in deltas:
            assert changes.num_moves[delta.layer] == delta.num_slots
            for transfer in delta.transfers:
                received[delta.layer, transfer.target_rank(old)] += transfer.source_rank(old) != transfer.target_rank(
                    old
                )
        assert changes.num_received.tolist() == received.tolist()


def test_numbers_are_plain_values() -> None:
    assert all(type(value) in (int, float) for value in outlook().numbers().values())
