"""What changes between two placements, in words for a log. No torch here."""

# L MoE layers  n ranks  E experts  P slots

from __future__ import annotations

from collections import Counter

import numpy as np

from trimtab.experts.placement import Placement

MAX_LINES = 8


def describe(old: Placement, new: Placement, max_lines: int = MAX_LINES) -> list[str]:
    """One line that counts, then one per slot that gets another expert: as many as fit, and how many more there are.

    The placements are of one topology and depth. It runs beside a step: what is not shown is not put into words.
    """
    assert old.topology == new.topology and old.num_layers == new.num_layers, "placements of two models"
    differs = old.slot_to_expert != new.slot_to_expert
    with_moves = differs.any(axis=1)
    shares_alone = np.flatnonzero((old.shares != new.shares).any(axis=1) & ~with_moves)
    if not with_moves.any() and not shares_alone.size:
        return ["nothing changes"]
    changed = np.argwhere(differs).tolist()
    room = max_lines - 1 - bool(shares_alone.size)
    shown = changed if len(changed) <= room else changed[: max(0, room - 1)]
    lines = [_summary(old, new, len(changed), int(with_moves.sum()))]
    for layer in dict.fromkeys(layer for layer, _ in shown):
        lines += _layer_lines(old, new, layer, [slot for other, slot in shown if other == layer])
    if len(shown) < len(changed):
        lines.append(f"and {len(changed) - len(shown)} more slots")
    if shares_alone.size:
        more = f" and {shares_alone.size - 1} more" if shares_alone.size > 1 else ""
        lines.append(f"layer {shares_alone[0]}{more}: shares alone change")
    return lines


def _summary(old: Placement, new: Placement, num_changes: int, num_layers: int) -> str:
    before, after = (int(placement.replica_counts().max()) for placement in (old, new))
    most = f"{after}" if before == after else f"{after}, {before} before"
    slots = "1 slot gets" if num_changes == 1 else f"{num_changes} slots get"
    layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
    return f"{slots} another expert in {layers}; most replicas of one expert: {most}"


def _layer_lines(old: Placement, new: Placement, layer: int, slots: list[int]) -> list[str]:
    """A line per slot of `slots`, which get another expert."""
    topology = old.topology
    before, after = old.slot_to_expert[layer].tolist(), new.slot_to_expert[layer].tolist()
    num_before, num_after = Counter(before), Counter(after)
    num_replicas = dict(num_before)  # counts up as the lines go
    lines = []
    for slot in slots:
        expert, rank = after[slot], topology.rank_of(slot)
        where = f"rank {rank} (slot {slot}, was expert {before[slot]})"
        held = any(before[other] == expert for other in topology.slots_of(rank))
        if num_replicas[expert] < num_after[expert]:
            num_replicas[expert] += 1
            words = f"expert {expert} gets its {_ordinal(num_replicas[expert])} replica on {where}"
        elif held:
            words = f"expert {expert} changes its place on {where}"
        else:
            words = f"expert {expert} moves to {where}"
        lines.append(f"layer {layer}: {words}")
    return lines


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
