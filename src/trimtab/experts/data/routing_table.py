"""From logical expert ids to slot ids, by a tensor whose identity never changes."""

# T tokens  K top-k  E experts  P slots

from __future__ import annotations

import functools

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
        self._numbers = np.arange(topology.num_slots)[:, None]
        self.refresh(placement, layer)

    def refresh(self, placement: Placement, layer: int) -> None:
        """Rewrites the table for this placement. Called on: the runner's thread, between forwards."""
        self._identity = placement.is_identity(layer)
        experts, rows = placement.slot_to_expert[layer], self.slots.numpy()
        rows[experts] = self._numbers  # all that is needed of an expert with one slot
        if placement.topology.num_redundant:
            self._spread_replicas(rows, experts, placement.shares[layer])

    def _spread_replicas(self, rows: IntArray, experts: IntArray, shares: IntArray) -> None:
        """experts [P], shares [P] -> rows [E, period] of the experts that have several slots."""
        slots_of: dict[int, list[int]] = {}
        for slot, expert in enumerate(experts.tolist()):
            slots_of.setdefault(expert, []).append(slot)
        for expert, slots in slots_of.items():
            if len(slots) > 1:
                order = interleave(tuple(shares[slots].tolist()), self.period, self.token_group % self.period)
                rows[expert] = np.array(slots)[order]

    def look_up(self, expert_ids: Tensor) -> Tensor:
        """expert_ids [T, K] -> slot ids [T, K]; -1 stays -1."""
        if self._identity:
            return expert_ids
        positions = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] % self.period
        # -1 indexes the last expert's row: the drop test must win over whatever is found there (B20).
        return self.slots[expert_ids, positions].masked_fill_(expert_ids < 0, -1)


@functools.lru_cache(maxsize=1024)  # few shares are in use, and a refresh lies between two forwards
def interleave(shares: tuple[int, ...], period: int, first: int) -> IntArray:
    """An expert's replicas, by their number, in even interleaving: [period], of which entry `first` comes first.

    A replica has `period * share / sum of shares` entries, rounded down or up; what rounding down leaves goes to the
    largest remainders, to the lower number where they are equal.
    """
    total = sum(shares)
    counts = [period * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda replica: -(period * shares[replica] % total))
    for replica in by_remainder[: period - sum(counts)]:
        counts[replica] += 1
    # The n-th of c entries lies in the middle of the n-th of c equal parts of the period.
    places = sorted(((2 * nth + 1) / count, replica) for replica, count in enumerate(counts) for nth in range(count))
    order = np.roll([replica for _, replica in places], -first)
    order.setflags(write=False)
    return order
