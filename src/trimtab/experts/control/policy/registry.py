"""A policy by its name: one of ours, or 'module:Class' of anybody."""

from __future__ import annotations

import importlib
from typing import Any

from trimtab.experts.control.config import MOVEMENT_AWARE_POLICIES, POLICIES
from trimtab.experts.control.policy.base import PlacementPolicy, PolicySettings
from trimtab.experts.control.policy.default import DefaultPolicy
from trimtab.experts.control.policy.incremental import IncrementalPolicy
from trimtab.experts.control.policy.vllm_adapter import VllmPolicyAdapter

_SHIPPED: dict[str, type[DefaultPolicy] | type[IncrementalPolicy]] = {
    "default": DefaultPolicy,
    "incremental": IncrementalPolicy,
}
assert tuple(_SHIPPED) == POLICIES
assert tuple(name for name, policy in _SHIPPED.items() if policy.is_movement_aware) == MOVEMENT_AWARE_POLICIES


def make_policy(name: str, settings: PolicySettings) -> PlacementPolicy:
    """Raises ValueError for a name that leads to no policy, naming what is missing."""
    policy_class: Any = _SHIPPED.get(name) or _load_class(name)
    if hasattr(policy_class, "rebalance_experts"):
        return VllmPolicyAdapter(policy_class, settings)
    if not callable(getattr(policy_class, "rebalance", None)):
        raise ValueError(f"policy ({name!r}) must have a method rebalance, or rebalance_experts as vLLM's policies do")
    policy = policy_class(settings)
    if settings.max_moves_per_layer is not None and not getattr(policy, "is_movement_aware", False):
        raise ValueError(
            f"max_moves_per_layer ({settings.max_moves_per_layer}) needs a policy that counts moves, and {name!r} does "
            "not say is_movement_aware; leave it out"
        )
    return policy


def _load_class(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"policy ({name!r}) must be one of {', '.join(map(repr, POLICIES))} or 'module:Class' that can be "
            f"imported here: {error}"
        ) from error
