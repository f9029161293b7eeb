"""What every placement policy must do, and the integer arithmetic that makes all CPUs agree."""

# L MoE layers  E experts  P slots  n ranks

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

IntArray = npt.NDArray[np.int64]
_LOAD_BITS = 50  # a layer's load is scaled to this many bits: a sum of all ranks' loads stays far below 2**63


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy may know beside load and placement. Experts come in groups that want to stay on one node."""

    num_groups: int = 1
    num_nodes: int = 1
    max_moves_per_layer: int | None = None  # slots that may change; for movement-aware policies

    def __post_init__(self) -> None:
        for name in ("num_groups", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1; 1 is none at all")

    def hierarchy_refusal(self, topology: Topology) -> str:
        """Why nodes cannot be respected and the experts are balanced over all ranks at once; empty where they can."""
        for name, value, other, by in (
            ("num_ranks", topology.num_ranks, "num_nodes", self.num_nodes),
            ("num_experts", topology.num_experts, "num_groups", self.num_groups),
            ("num_groups", self.num_groups, "num_nodes", self.num_nodes),
        ):
            if self.num_nodes > 1 and value % by:
                return (
                    f"{name} ({value}) is no multiple of {other} ({by}): experts are balanced without regard to nodes"
                )
        return ""


class PlacementPolicy(Protocol):
    """Pure and deterministic: the same placement on every machine (integers, stable sorts, explicit ties).

    A layer is returned as it is where nothing better is found: without load, evenly loaded, or as good as can be. Else
    it is better than before, no rank holds two replicas of an expert, and an expert that stays on a rank keeps its slot
    (B35). Any number of slots that the topology allows is served, also one rank and no redundant slot.

    Built as `Policy(settings)`; `is_movement_aware` policies weigh what a move costs and keep `max_moves_per_layer`.
    """

    is_movement_aware: bool

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement: ...


def check_load(load: ExpertLoad, current: Placement) -> None:
    """Raises ValueError for a load that is not of the placement's layers and experts."""
    expected = (current.num_layers, current.topology.num_experts)
    if load.counts.shape != expected:
        raise ValueError(f"the load {load.counts.shape} must have the placement's shape {expected} [layers, experts]")


def scaled_counts(load: ExpertLoad) -> IntArray:
    """[L, E]: each layer's counts times a power of two, so that shares of them can be compared as integers."""
    totals = [int(total) for total in load.counts.sum(axis=1, dtype=object)]
    shifts = np.array([_LOAD_BITS - total.bit_length() for total in totals], dtype=np.int64)[:, None]
    return np.where(shifts >= 0, load.counts << np.maximum(shifts, 0), load.counts >> np.maximum(-shifts, 0))


def rank_loads(scaled: IntArray, placement: Placement) -> IntArray:
    """[L, n]: each rank's load where an expert's replicas take their shares of it."""
    topology = placement.topology
    loads = np.zeros((placement.num_layers, topology.num_ranks), dtype=np.int64)
    ranks = np.arange(topology.num_slots) // topology.slots_per_rank
    for layer, (experts, shares) in enumerate(zip(placement.slot_to_expert, placement.shares, strict=True)):
        totals = np.zeros(topology.num_experts, dtype=np.int64)
        np.add.at(totals, experts, shares)
        np.add.at(loads[layer], ranks, _share_of(scaled[layer, experts], shares, totals[experts]))
    return loads


def _share_of(load: IntArray, shares: IntArray, totals: IntArray) -> IntArray:
    """load * shares // totals, without the product's overflow."""
    return load // totals * shares + load % totals * shares // totals


def keep_slots(old_row: IntArray, new_row: IntArray, topology: Topology) -> IntArray:
    """new_row [P] with each rank's slots in another order: an expert that a rank held already keeps its slot (B35)."""
    row = np.full_like(new_row, -1)
    for rank in range(topology.num_ranks):
        slots = topology.slots_of(rank)
        arriving = new_row[slots.start : slots.stop].tolist()
        for slot in slots:
            if old_row[slot] in arriving:
                arriving.remove(old_row[slot])
                row[slot] = old_row[slot]
        for slot in slots:
            if row[slot] < 0:
                row[slot] = arriving.pop(0)
    return row


def better_layers(load: ExpertLoad, current: Placement, rows: IntArray) -> Placement:
    """`current`, with those layers of rows [L, P] that lower the most loaded rank's load, their slots kept."""
    topology = current.topology
    scaled = scaled_counts(load)
    proposed = Placement(topology, rows)
    is_better = rank_loads(scaled, proposed).max(axis=1) < rank_loads(scaled, current).max(axis=1)
    slots, shares = current.slot_to_expert.copy(), current.shares.copy()
    for layer in np.flatnonzero(is_better).tolist():
        slots[layer] = keep_slots(current.slot_to_expert[layer], rows[layer], topology)
        shares[layer] = 1
    return Placement(topology, slots, shares)
