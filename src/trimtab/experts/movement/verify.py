"""Are the bytes where they belong? What every expert's slots must hold, agreed between ranks, and checked again."""

# L MoE layers  E experts  P slots  S slots/rank

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.movement.communicator.base import Communicator, Words
from trimtab.experts.placement import Placement
from trimtab.experts.ports import SlotStorage


class SlotMismatchError(RuntimeError):
    """Slots, or ranks, do not hold what they should: output would be wrong without a sign of it."""


def exchange_slots(
    storages: Sequence[SlotStorage], placement: Placement, communicator: Communicator, timeout_s: float | None = None
) -> Words:
    """Agrees with the other ranks on what slots are and hold -> uint64 [L, E]: what each expert's slots hold.

    Raises SlotMismatchError where bytes would not mean the same in every layer and on every rank, or where replicas of
    an expert differ; RankFailureError where another rank could not tell.

    Collective: every rank, at start and after new weights. A rank takes part in one gathering per call, whatever fails
    on it or on others: ranks that gathered unequally often would never agree again.
    """
    failure: Exception | None = None
    try:
        own = {"layouts": _layouts(storages), "checksums": slot_checksums(storages).tolist()}
    except Exception as error:
        failure, own = error, {"failure": f"{type(error).__name__}: {error}"}
    by_rank = [json.loads(data) for data in communicator.all_gather(json.dumps(own).encode(), timeout_s)]
    if failure is not None:
        raise failure
    for rank, found in enumerate(by_rank):
        if "failure" in found:
            raise RankFailureError(f"rank {rank} cannot tell what its slots hold: {found['failure']}")
    _check_layouts([found["layouts"] for found in by_rank])
    return expert_checksums(placement, np.concatenate([_words(found["checksums"]) for found in by_rank], axis=1))


def _layouts(storages: Sequence[SlotStorage]) -> list[str]:
    return [f"{storage.num_slots} slots of {storage.slot_nbytes} bytes, {storage.layout}" for storage in storages]


def _check_layouts(by_rank: Sequence[Sequence[str]]) -> None:
    for rank, layouts in enumerate(by_rank):
        if len(layouts) != len(by_rank[0]):
            raise SlotMismatchError(f"rank {rank} has {len(layouts)} MoE layers and rank 0 has {len(by_rank[0])}")
        for layer, layout in enumerate(layouts):
            if layout != by_rank[0][0]:
                raise SlotMismatchError(
                    f"experts of layer {layer} on rank {rank} are kept as ({layout}), those of layer 0 on rank 0 as "
                    f"({by_rank[0][0]}); experts move only where all layers and ranks keep them alike"
                )


def _words(rows: Sequence[Sequence[int]]) -> Words:
    return np.array(rows, dtype=np.uint64)


def slot_checksums(storages: Sequence[SlotStorage]) -> Words:
    """uint64 [L, S] of what this rank's kernels read now."""
    scratch = torch.empty(max((storage.slot_nbytes for storage in storages), default=0), dtype=torch.uint8)
    return np.array(
        [
            [storage.export_slot(slot, scratch[: storage.slot_nbytes]) for slot in range(storage.num_slots)]
            for storage in storages
        ],
        dtype=np.uint64,
    )


def expert_checksums(placement: Placement, by_slot: Words) -> Words:
    """by_slot uint64 [L, P] -> uint64 [L, E]; raises SlotMismatchError naming layer, expert and ranks."""
    table = np.zeros((placement.num_layers, placement.topology.num_experts), dtype=np.uint64)
    rows = np.arange(placement.num_layers)[:, None]
    table[rows, placement.slot_to_expert] = by_slot
    differing = np.argwhere(table[rows, placement.slot_to_expert] != by_slot)
    if differing.size:
        layer, slot = differing[0].tolist()
        expert = int(placement.slot_to_expert[layer, slot])
        ranks = sorted({placement.topology.rank_of(other) for other in placement.slots_of_expert(layer, expert)})
        raise SlotMismatchError(
            f"replicas of expert {expert} of layer {layer} on ranks {ranks} differ ({len(differing)} slots in all); "
            "every rank must load the same checkpoint"
        )
    return table


def check_slots(storages: Sequence[SlotStorage], placement: Placement, rank: int, table: Words) -> None:
    """Raises SlotMismatchError naming the slots of this rank that do not hold the bytes of their expert."""
    slots = placement.topology.slots_of(rank)
    experts = placement.slot_to_expert[:, slots.start : slots.stop]
    expected = table[np.arange(placement.num_layers)[:, None], experts]
    wrong = np.argwhere(slot_checksums(storages) != expected).tolist()
    if wrong:
        named = ", ".join(
            f"layer {layer} slot {slots.start + slot} (expert {experts[layer, slot]})" for layer, slot in wrong[:4]
        )
        raise SlotMismatchError(f"rank {rank}: {len(wrong)} slots do not hold the bytes of their expert: {named}")
