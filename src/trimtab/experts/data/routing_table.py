"""From logical expert ids to slot ids, by a tensor whose identity never changes."""

# T tokens  K top-k  E experts  P slots

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trimtab.experts.placement import IntArray, Placement

# Divisible by 1 to 6: up to six replicas with equal shares meet them exactly, more of them nearly.
_PERIOD = 60


class RoutingTable:
    """`slots` [E, period]: column c of expert e is the replica that takes e's tokens at batch positions c mod period.

    Built from one layer of a placement and the token group it serves; `refresh` rewrites it in place, so anything
    that captured the tensor sees the new placement. Every entry is a live replica, and each replica's number of
    entries is its share of the period within one.
    """

    def __init__(self, placement: Placement, layer: int, token_group: int = 0) -> None:
        topology = placement.topology
        # An expert can have at most one slot more than there are redundant ones: each replica gets an entry.
        most_replicas = topology.num_redundant + 1
        self.period = 1 if most_replicas == 1 else -(-most_replicas // _PERIOD) * _PERIOD
        self.token_group = token_group
        self.slots = torch.empty(topology.num_experts, self.period, dtype=torch.int64)
        self._identity = False
        self.refresh(placement, layer)

    def refresh(self, placement: Placement, layer: int) -> None:
        """Rewrites the table for this placement. Called on: the runner's thread, between forwards."""
        self._identity = placement.is_identity(layer)
        table = spread(
            placement.slot_to_expert[layer], placement.shares[layer], placement.topology.num_experts, self.period
        )
        self.slots.copy_(torch.from_numpy(np.roll(table, -self.token_group, axis=1)))

    def look_up(self, expert_ids: Tensor) -> Tensor:
        """expert_ids [T, K] -> slot ids [T, K]; -1 stays -1."""
        if self._identity:
            return expert_ids
        positions = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] % self.period
        # -1 indexes the last expert's row: the drop test must win over whatever is found there (B20).
        return self.slots[expert_ids, positions].masked_fill_(expert_ids < 0, -1)


def spread(slot_to_expert: IntArray, shares: IntArray, num_experts: int, period: int) -> IntArray:
    """slot_to_expert [P], shares [P] -> [E, period]: each row an even interleaving of its expert's replicas.

    A replica has `period * share / sum of shares` entries, rounded down or up; what rounding down leaves goes to the
    largest remainders, to the lower slot where they are equal.
    """
    num_replicas = np.bincount(slot_to_expert, minlength=num_experts)
    table = np.empty((num_experts, period), dtype=np.int64)
    table[slot_to_expert] = np.arange(len(slot_to_expert))[:, None]  # all that is needed of an expert with one slot
    slots = np.flatnonzero(num_replicas[slot_to_expert] > 1)
    if not slots.size:
        return table
    experts = slot_to_expert[slots]
    totals = np.bincount(experts, weights=shares[slots], minlength=num_experts).astype(np.int64)[experts]
    num_entries, remainders = np.divmod(period * shares[slots], totals)
    left = period - np.bincount(experts, weights=num_entries, minlength=num_experts).astype(np.int64)
    by_remainder = np.lexsort((slots, -remainders, experts))
    sorted_experts = experts[by_remainder]
    place = np.arange(slots.size) - np.searchsorted(sorted_experts, sorted_experts)  # within its expert
    num_entries[by_remainder] += place < left[sorted_experts]

    entries = np.repeat(slots, num_entries)
    counts = np.repeat(num_entries, num_entries)
    nth = np.arange(entries.size) - np.repeat(np.cumsum(num_entries) - num_entries, num_entries)
    # The n-th of c entries lies in the middle of the n-th of c equal parts of the period.
    order = np.lexsort((entries, (2 * nth + 1) / counts, slot_to_expert[entries]))
    table[np.flatnonzero(num_replicas > 1)] = entries[order].reshape(-1, period)
    return table
