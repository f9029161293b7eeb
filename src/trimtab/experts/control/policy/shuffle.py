"""A policy for diagnosis: it moves as much as it can, so that a fault in moving shows."""

from __future__ import annotations

import numpy as np

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement


class ShufflingPolicy:
    """Another random placement each time, shares included. Named by `trimtab doctor`; nobody should serve with it."""

    is_movement_aware = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        """The same load and placement give the same answer."""
        topology = current.topology
        random = np.random.default_rng([load.num_pairs, int(current.digest()[:12], 16)])
        rows = []
        for _ in range(current.num_layers):
            spare = random.integers(0, topology.num_experts, topology.num_redundant)
            row = np.concatenate([np.arange(topology.num_experts), spare])
            rows.append(random.permutation(row))
        return Placement(topology, np.stack(rows), random.integers(1, 4, (current.num_layers, topology.num_slots)))
