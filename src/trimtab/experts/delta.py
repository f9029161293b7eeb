"""What has to move between two placements: pure, the same on every rank, and the same live and in the planner."""

# L MoE layers  P slots

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.experts.placement import Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert travels from a slot that holds it to one rank, once, and fills all its slots there that lack it."""

    expert: int
    source_slot: int
    target_slots: tuple[int, ...]  # ascending, all of one rank

    def source_rank(self, placement: Placement) -> int:
        return placement.topology.rank_of(self.source_slot)

    def target_rank(self, placement: Placement) -> int:
        return placement.topology.rank_of(self.target_slots[0])


@dataclass(frozen=True, slots=True)
class LayerDelta:
    """One layer's change: transfers ordered by target rank and expert. None of them: shares alone change."""

    layer: int
    transfers: tuple[Transfer, ...]

    @property
    def num_slots(self) -> int:
        """Slots that get another expert."""
        return sum(len(transfer.target_slots) for transfer in self.transfers)


def diff(old: Placement, new: Placement) -> tuple[LayerDelta, ...]:
    """The layers that change, ascending. Raises ValueError where the placements are not of one topology and depth.

    A rank that holds an expert already copies it; else the replica whose rank has sent least so far in this layer
    sends it, the lowest slot of equals.
    """
    if old.topology != new.topology or old.num_layers != new.num_layers:
        raise ValueError(
            f"the placement ({new.num_layers} layers, {new.topology}) must have the {old.num_layers} layers and the "
            f"topology ({old.topology}) of the one it follows; plan anew from that one"
        )
    changed = np.flatnonzero(
        np.any(old.slot_to_expert != new.slot_to_expert, axis=1) | np.any(old.shares != new.shares, axis=1)
    )
    return tuple(LayerDelta(layer, _transfers(old, new, layer)) for layer in changed.tolist())


def _transfers(old: Placement, new: Placement, layer: int) -> tuple[Transfer, ...]:
    slots_per_rank = old.topology.slots_per_rank
    holders: list[list[int]] = [[] for _ in range(old.topology.num_experts)]  # expert -> its slots now, ascending
    targets: dict[tuple[int, int], list[int]] = {}  # (rank, expert) -> slots
    before, after = old.slot_to_expert[layer].tolist(), new.slot_to_expert[layer].tolist()
    for slot, (held, expert) in enumerate(zip(before, after, strict=True)):
        holders[held].append(slot)
        if held != expert:
            targets.setdefault((slot // slots_per_rank, expert), []).append(slot)
    num_sent = [0] * old.topology.num_ranks
    transfers = []
    for (rank, expert), slots in sorted(targets.items()):
        source = -1
        for slot in holders[expert]:
            if slot // slots_per_rank == rank:
                source = slot
                break
            if source < 0 or num_sent[slot // slots_per_rank] < num_sent[source // slots_per_rank]:
                source = slot
        if source // slots_per_rank != rank:
            num_sent[source // slots_per_rank] += 1
        transfers.append(Transfer(expert, source, tuple(slots)))
    return tuple(transfers)
