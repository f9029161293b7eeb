"""Policies written for vLLM (`AbstractEplbPolicy`), to plug in and to compare with.

Their signature: rebalance_experts(weight [L, E], num_replicas, num_groups, num_nodes, num_ranks,
old_global_expert_indices [L, P]) -> [L, P], or a tuple that begins with it: the other maps are derived (B49). They take
and give torch tensors.
"""

# L MoE layers  E experts  P slots

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from trimtab.experts.control.policy.base import PolicySettings, check_load
from trimtab.experts.control.policy.check import check_plan
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement


class VllmPolicyAdapter:
    """Gives what the policy answers, as it is: an answer that cannot be put into force raises; nothing is mended."""

    is_movement_aware = False

    def __init__(self, policy: Any, settings: PolicySettings) -> None:
        if settings.max_moves_per_layer is not None:
            raise ValueError(
                f"max_moves_per_layer ({settings.max_moves_per_layer}) cannot be told to a policy with vLLM's "
                "signature; leave it out"
            )
        self.policy, self.settings = policy, settings
        self._takes_old_map = len(inspect.signature(policy.rebalance_experts).parameters) > 5

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        """Raises InvalidPlanError for an answer that is no placement of this topology."""
        import torch  # here alone: their policies speak tensors, the room does not

        check_load(load, current)
        topology, settings = current.topology, self.settings
        arguments = [
            torch.tensor(load.counts, dtype=torch.float32),
            topology.num_slots,
            settings.num_groups,
            settings.num_nodes,
            topology.num_ranks,
        ]
        if self._takes_old_map:
            arguments.append(torch.tensor(current.slot_to_expert))
        answer = self.policy.rebalance_experts(*arguments)
        first = answer[0] if isinstance(answer, tuple) else answer
        rows = first.numpy() if isinstance(first, torch.Tensor) else first
        shares = np.ones_like(current.shares)
        return check_plan(rows, shares, current, current.digest())
