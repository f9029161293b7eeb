"""Policies that fail in all the ways there are; found by 'odd_policies:Name'."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology


class Reversed:
    """Sound: every layer's slots the other way round. Prints, which must not disturb the answers."""

    is_movement_aware = False

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def rebalance(self, load: ExpertLoad, current: Placement) -> Any:
        print("a policy may print")
        return Placement(current.topology, current.slot_to_expert[:, ::-1])


class Raising(Reversed):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Any:
        raise RuntimeError("no idea")


class Hanging(Reversed):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Any:
        time.sleep(3600)


class Dying(Reversed):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Any:
        os._exit(7)


class RaisingWhenBuilt(Reversed):
    def __init__(self, settings: PolicySettings) -> None:
        raise RuntimeError("no licence")


class WithoutMethod:
    def __init__(self, settings: PolicySettings) -> None: ...


class Raw:
    """What a policy answers that does not build `Placement`s."""

    def __init__(self, slot_to_expert: Any, shares: Any) -> None:
        self.slot_to_expert, self.shares = slot_to_expert, shares


class OtherTopology(Reversed):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Any:
        return Placement.identity(Topology(2, 0, 1), current.num_layers)


class Objects(Reversed):
    def rebalance(self, load: ExpertLoad, current: Placement) -> Any:
        return Raw(current.slot_to_expert.astype(object), current.shares)


class VllmReversed:
    """As vLLM's policies: a class with a class method."""

    @classmethod
    def rebalance_experts(
        cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int, old: Any = None
    ) -> Any:
        assert weight.shape[0] == old.shape[0] and old.shape[1] == num_replicas and num_ranks == 2
        return old.flip(1)


class VllmTuple:
    """An older one: three maps, no old placement."""

    @classmethod
    def rebalance_experts(cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> Any:
        import torch

        num_layers, num_experts = weight.shape
        map_ = torch.arange(num_replicas).flip(0).remainder(num_experts).repeat(num_layers, 1)
        return map_, None, None


class VllmInteger(VllmTuple):
    """B36: an integer instead of a tensor."""

    @classmethod
    def rebalance_experts(cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> Any:
        return 3


class VllmIncomplete(VllmTuple):
    @classmethod
    def rebalance_experts(cls, weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> Any:
        return np.zeros((weight.shape[0], num_replicas), dtype=np.int64)
