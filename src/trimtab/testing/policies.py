"""Placement policies that no engine should run: one that moves as much as it can, and ones that are at fault.

Named `trimtab.testing.policies:Class` in `eplb_config`'s policy. No torch here: a policy's process imports them.
"""

from __future__ import annotations

import time

import numpy as np

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement


class ShufflingPolicy:
    """Another random placement each time, shares included: what a rebalance may do to output, this one brings out."""

    is_movement_aware = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        topology = current.topology
        random = np.random.default_rng([load.num_pairs, int(current.digest()[:12], 16)])
        rows = []
        for _ in range(current.num_layers):
            spare = random.integers(0, topology.num_experts, topology.num_redundant)
            row = np.concatenate([np.arange(topology.num_experts), spare])
            rows.append(random.permutation(row))
        return Placement(topology, np.stack(rows), random.integers(1, 4, (current.num_layers, topology.num_slots)))


class RaisingPolicy(ShufflingPolicy):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        raise ZeroDivisionError("no load to divide by")


class HangingPolicy(ShufflingPolicy):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        time.sleep(3600)
        raise AssertionError("nobody waits so long")


class InvalidPolicy(ShufflingPolicy):
    """Plans an expert away. What a `Placement` cannot even be, it hands over as the bare arrays."""

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        plan = object.__new__(Placement)
        object.__setattr__(plan, "topology", current.topology)
        object.__setattr__(plan, "slot_to_expert", np.zeros_like(current.slot_to_expert))
        object.__setattr__(plan, "shares", current.shares)
        return plan
