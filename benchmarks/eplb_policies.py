"""A policy for measurements: at least a quarter of the slots get another expert, in every layer, every time."""

from __future__ import annotations

import numpy as np

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement

MOVED_SHARE = 0.25


class QuarterPolicy:
    """Passes experts round among randomly chosen slots, with their shares: each of them gets another expert."""

    is_movement_aware = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        random = np.random.default_rng([load.num_pairs, int(current.digest()[:12], 16)])
        slots, shares = current.slot_to_expert.copy(), current.shares.copy()
        for layer in range(current.num_layers):
            chosen = _slots_of_different_experts(random, slots[layer])
            slots[layer, chosen] = slots[layer, np.roll(chosen, 1)]
            shares[layer, chosen] = shares[layer, np.roll(chosen, 1)]
        return Placement(current.topology, slots, shares)


def _slots_of_different_experts(random: np.random.Generator, row: np.ndarray) -> np.ndarray:
    """slot_to_expert [P] of a layer -> the slots to pass experts round, in this order; no two hold the same expert."""
    order = random.permutation(len(row))
    _, first = np.unique(row[order], return_index=True)
    count = -int(-len(row) * MOVED_SHARE // 1)
    return np.asarray(order[np.sort(first)][: max(2, count)])
