"""What every placement policy must do; one joins with a line in POLICIES."""

# L MoE layers  E experts  P slots  n ranks

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from trimtab.experts.control.policy.base import PlacementPolicy, PolicySettings
from trimtab.experts.control.policy.default import DefaultPolicy
from trimtab.experts.control.policy.incremental import IncrementalPolicy
from trimtab.experts.delta import diff
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

SEED = 20_261_130
POLICIES = {"default": DefaultPolicy, "incremental": IncrementalPolicy}
MOVEMENT_AWARE = {name: policy for name, policy in POLICIES.items() if policy.is_movement_aware}
TOPOLOGIES = [(8, 0, 2), (8, 4, 4), (10, 2, 4), (60, 4, 8), (4, 0, 1), (4, 4, 2), (6, 12, 9), (3, 5, 2), (16, 16, 32)]


@pytest.fixture(params=POLICIES)
def policy_class(request: pytest.FixtureRequest) -> type:
    return POLICIES[request.param]


@pytest.fixture
def policy(policy_class: type) -> PlacementPolicy:
    return policy_class(PolicySettings())


def max_loads(load: ExpertLoad, placement: Placement) -> list[Fraction]:
    """Per layer, by fractions: independent of the policies' arithmetic."""
    topology, found = placement.topology, []
    for layer in range(placement.num_layers):
        ranks = [Fraction(0)] * topology.num_ranks
        for expert, slots in enumerate(placement.expert_to_slots(layer)):
            total = sum(int(placement.shares[layer, slot]) for slot in slots)
            for slot in slots:
                share = Fraction(int(placement.shares[layer, slot]), total)
                ranks[topology.rank_of(slot)] += share * int(load.counts[layer, expert])
        found.append(max(ranks))
    return found


def num_duplicates(placement: Placement, layer: int) -> int:
    rows = placement.slot_to_expert[layer].reshape(placement.topology.num_ranks, -1)
    return sum(len(row) - len(set(row.tolist())) for row in rows)


def num_moves(old: Placement, new: Placement) -> list[int]:
    moves = {delta.layer: delta.num_slots for delta in diff(old, new)}
    return [moves.get(layer, 0) for layer in range(old.num_layers)]


def random_load(rng: np.random.Generator, num_experts: int, num_layers: int = 4) -> ExpertLoad:
    return ExpertLoad((rng.lognormal(0, 1.0, (num_layers, num_experts)) * 1000).astype(np.int64), 100)


def scrambled(rng: np.random.Generator, topology: Topology, num_layers: int = 4) -> Placement:
    rows = [rng.permutation(np.arange(topology.num_slots) % topology.num_experts) for _ in range(num_layers)]
    return Placement(topology, rows, rng.integers(1, 4, (num_layers, topology.num_slots)))


@pytest.mark.parametrize("sizes", TOPOLOGIES)
def test_a_layer_stays_or_gets_better_without_duplicates(policy: PlacementPolicy, sizes: tuple[int, int, int]) -> None:
    """B18, B36: any sizes that divide; from the initial placement and from scrambled ones with unequal shares."""
    topology = Topology(*sizes)
    rng = np.random.default_rng(SEED)
    num_better = 0
    for start in (Placement.initial(topology, 4), scrambled(rng, topology), scrambled(rng, topology)):
        load = random_load(rng, topology.num_experts)
        new = policy.rebalance(load, start)
        assert new.topology == topology and new.num_layers == start.num_layers
        assert new.replica_counts().sum(axis=1).tolist() == [topology.num_slots] * 4
        before, after = max_loads(load, start), max_loads(load, new)
        for layer in range(start.num_layers):
            changed = not np.array_equal(new.slot_to_expert[layer], start.slot_to_expert[layer])
            if not changed and np.array_equal(new.shares[layer], start.shares[layer]):
                continue
            assert after[layer] < before[layer]
            num_better += 1
            if topology.slots_per_rank <= topology.num_experts:
                assert num_duplicates(new, layer) == 0 and new.replica_counts()[layer].max() <= topology.num_ranks
    assert num_better > 0 or topology.num_ranks == 1


@pytest.mark.parametrize("start_kind", ["initial", "scrambled"])
def test_loads_that_ask_for_nothing_move_nothing(policy: PlacementPolicy, start_kind: str) -> None:
    topology = Topology(8, 0, 4)
    rng = np.random.default_rng(SEED)
    start = Placement.initial(topology, 3) if start_kind == "initial" else scrambled(rng, topology, 3)
    for counts in (np.zeros((3, 8)), np.full((3, 8), 7), np.eye(3, 8) * 100):
        # without redundant slots a single hot expert loads one rank alike, wherever it is
        assert policy.rebalance(ExpertLoad(counts.astype(np.int64), 5), start) == start


def test_one_hot_load_gives_the_hot_expert_replicas_and_no_other(policy: PlacementPolicy) -> None:
    topology = Topology(8, 4, 4)
    counts = np.zeros((1, 8), dtype=np.int64)
    counts[0, 5] = 1000
    load = ExpertLoad(counts, 10)
    new = policy.rebalance(load, Placement.initial(topology, 1))
    assert new.replica_counts()[0, 5] == 4 and max_loads(load, new) == [250]


def test_the_same_load_again_moves_nothing(policy: PlacementPolicy) -> None:
    """B35: 0 bytes when the new load equals the old."""
    topology = Topology(60, 4, 8)
    rng = np.random.default_rng(SEED)
    load = random_load(rng, 60)
    once = policy.rebalance(load, Placement.initial(topology, 4))
    assert sum(num_moves(Placement.initial(topology, 4), once)) > 0
    assert policy.rebalance(load, once) == once


def test_experts_that_stay_on_a_rank_keep_their_slot(policy: PlacementPolicy) -> None:
    """B35: only what arrives on a rank changes its slots."""
    topology = Topology(16, 4, 4)
    rng = np.random.default_rng(SEED)
    for _ in range(5):
        start = Placement.initial(topology, 4)
        new = policy.rebalance(random_load(rng, 16), start)
        for delta in diff(start, new):
            for transfer in delta.transfers:
                rank = transfer.target_rank(start)
                held = start.slot_to_expert[delta.layer][list(topology.slots_of(rank))]
                assert transfer.expert not in held


def test_a_policy_is_pure_and_its_answer_is_the_same_in_another_process(policy_class: type) -> None:
    """Also with other CPU features in numpy: integers and stable sorts leave nothing to the machine."""
    topology = Topology(60, 4, 8)
    load, start = random_load(np.random.default_rng(SEED), 60), Placement.initial(topology, 4)
    digests = {policy_class(PolicySettings()).rebalance(load, start).digest() for _ in range(2)}
    script = f"""
import numpy as np
from trimtab.experts.control.policy.base import PolicySettings
from {policy_class.__module__} import {policy_class.__name__} as policy
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology
load = ExpertLoad(np.array({load.counts.tolist()}), 100)
start = Placement.initial(Topology(60, 4, 8), 4)
print(policy(PolicySettings()).rebalance(load, start).digest())
"""
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert digests == {run.stdout.strip()}


def test_huge_loads_do_not_overflow(policy: PlacementPolicy) -> None:
    start = Placement.initial(Topology(8, 4, 4), 1)
    small = np.array([[1, 2, 3, 40, 5, 6, 7, 8]])
    assert policy.rebalance(ExpertLoad(small * 2**56, 1), start) == policy.rebalance(ExpertLoad(small, 1), start)


def test_a_load_of_another_model_is_refused(policy: PlacementPolicy) -> None:
    start = Placement.initial(Topology(8, 0, 2), 2)
    with pytest.raises(ValueError, match=r"the load \(2, 6\) must have the placement's shape \(2, 8\)"):
        policy.rebalance(ExpertLoad(np.ones((2, 6), dtype=np.int64), 1), start)


def test_groups_stay_on_their_nodes_where_they_divide(policy_class: type) -> None:
    topology = Topology(16, 8, 4)
    settings = PolicySettings(num_groups=4, num_nodes=2)
    rng = np.random.default_rng(SEED)
    placement = Placement.initial(topology, 4)
    for _ in range(3):
        new = policy_class(settings).rebalance(random_load(rng, 16), placement)
        for layer, row in enumerate(new.slot_to_expert):
            if np.array_equal(row, placement.slot_to_expert[layer]):
                continue
            nodes = [set((half // 4).tolist()) for half in row.reshape(2, -1)]
            assert nodes[0].isdisjoint(nodes[1]) and len(nodes[0]) == len(nodes[1]) == 2
        placement = new


@pytest.mark.parametrize("settings", [PolicySettings(4, 3), PolicySettings(3, 2), PolicySettings(4, 4)])
def test_where_nodes_do_not_divide_all_ranks_are_balanced_at_once(policy_class: type, settings: PolicySettings) -> None:
    """B33: no assertion at the first rearrangement; what cannot be respected is said."""
    topology = Topology(16, 2, 6)
    load, start = random_load(np.random.default_rng(SEED), 16), Placement.initial(topology, 4)
    assert "is no multiple of" in settings.hierarchy_refusal(topology)
    flat = policy_class(PolicySettings()).rebalance(load, start)
    assert policy_class(settings).rebalance(load, start) == flat


@pytest.mark.parametrize("max_moves", [1, 2, 5])
@pytest.mark.parametrize("settings", [PolicySettings(), PolicySettings(4, 2)])
@pytest.mark.parametrize("name", MOVEMENT_AWARE)
def test_movement_aware_policies_keep_the_bound_on_moves(name: str, settings: PolicySettings, max_moves: int) -> None:
    bounded = PolicySettings(settings.num_groups, settings.num_nodes, max_moves)
    rows = np.concatenate([np.arange(8), np.arange(4), np.arange(8, 16), np.arange(8, 12)])
    start = Placement(Topology(16, 8, 4), [rows] * 4)
    load = random_load(np.random.default_rng(SEED), 16)
    moves = num_moves(start, MOVEMENT_AWARE[name](bounded).rebalance(load, start))
    assert 0 < max(moves) <= max_moves
