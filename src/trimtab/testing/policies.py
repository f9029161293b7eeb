"""Placement policies that no engine should run: one that moves as much as it can, and ones that are at fault.

Named `trimtab.testing.policies:Class` in `eplb_config`'s policy. No torch here: a policy's process imports them.
"""

from __future__ import annotations

import os
import time

import numpy as np

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.control.policy.shuffle import ShufflingPolicy
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement


class RaisingPolicy(ShufflingPolicy):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        raise ZeroDivisionError("no load to divide by")


class HangingPolicy(ShufflingPolicy):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        time.sleep(3600)
        raise AssertionError("nobody waits so long")


class CrashingPolicy(ShufflingPolicy):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        os._exit(9)


class InvalidPolicy(ShufflingPolicy):
    """Plans an expert away."""

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        return _bare(current, np.zeros_like(current.slot_to_expert), current.shares)


class InvalidPlansPolicy(ShufflingPolicy):
    """Eight plans that are invalid, each in its own way, one after the other; then sound ones."""

    def __init__(self, settings: PolicySettings) -> None:
        self._num_asked = 0

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        slots, shares, experts = current.slot_to_expert, current.shares, current.topology.num_experts
        too_large, negative = slots.copy(), slots.copy()
        too_large[0, 0], negative[0, 0] = experts, -1
        plans: list[tuple[np.ndarray, np.ndarray]] = [
            (np.zeros_like(slots), shares),  # experts that nobody holds
            (too_large, shares),
            (negative, shares),
            (slots[:, :-1], shares[:, :-1]),  # a slot too few
            (slots[:-1], shares[:-1]),  # a layer too few
            (slots.astype(np.float32), shares),
            (slots, np.zeros_like(shares)),  # replicas that take no tokens
            (slots.astype(object), shares),
        ]
        self._num_asked += 1
        if self._num_asked > len(plans):
            return super().rebalance(load, current)
        return _bare(current, *plans[self._num_asked - 1])


def _bare(current: Placement, slot_to_expert: np.ndarray, shares: np.ndarray) -> Placement:
    """What a `Placement` cannot even be."""
    plan = object.__new__(Placement)
    object.__setattr__(plan, "topology", current.topology)
    object.__setattr__(plan, "slot_to_expert", slot_to_expert)
    object.__setattr__(plan, "shares", shares)
    return plan
