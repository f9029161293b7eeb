"""From logical expert ids to slot ids, by a tensor whose identity never changes."""

# T tokens  K top-k  E experts

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.placement import Placement


class RoutingTable:
    """`slots` [E, period]: column c of expert e is the replica that takes e's tokens at batch positions c mod period.

    Built from one layer of a placement and the token group it serves; `refresh` rewrites it in place, so anything
    that captured the tensor sees the new placement. Every entry is a live replica, and each replica's number of
    entries is its share of the period within one.
    """

    def __init__(self, placement: Placement, layer: int, token_group: int = 0) -> None:
        topology = placement.topology
        # An expert can have at most one slot more than there are redundant ones: each replica gets an entry.
        self.period = topology.num_redundant + 1
        self.token_group = token_group
        self.slots = torch.empty(topology.num_experts, self.period, dtype=torch.int64)
        self._identity = False
        self.refresh(placement, layer)

    def refresh(self, placement: Placement, layer: int) -> None:
        """Rewrites the table for this placement. Called on: the runner's thread, between forwards."""
        self._identity = placement.is_identity(layer)
        for expert, slots in enumerate(placement.expert_to_slots(layer)):
            shares = [int(placement.shares[layer, slot]) for slot in slots]
            self.slots[expert] = torch.tensor(_spread(slots, shares, self.period)).roll(-self.token_group)

    def look_up(self, expert_ids: Tensor) -> Tensor:
        """expert_ids [T, K] -> slot ids [T, K]; -1 stays -1."""
        if self._identity:
            return expert_ids
        positions = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] % self.period
        # -1 indexes the last expert's row: the drop test must win over whatever is found there (B20).
        return self.slots[expert_ids, positions].masked_fill_(expert_ids < 0, -1)


def _spread(slots: tuple[int, ...], shares: list[int], period: int) -> list[int]:
    """`period` entries in which each slot appears by its share within one, at least once, evenly interleaved."""
    total = sum(shares)
    entries: list[int] = []
    used = [0] * len(slots)
    for step in range(1, period + 1):
        owed = [step * share / total - count for share, count in zip(shares, used, strict=True)]
        chosen = max(range(len(slots)), key=lambda index: (owed[index], -index))
        used[chosen] += 1
        entries.append(slots[chosen])
    return entries
