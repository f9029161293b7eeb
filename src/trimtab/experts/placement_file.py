"""Placements on disk: what `initial_placement` names. JSON, so that a person can read and write one. No torch here.

{"format": "trimtab-placement", "version": 1, "num_experts": 4,
 "layers": [[[0, 1, 2], [3, 0, 1]],     one list per MoE layer, in it one per rank: the experts in its slots
            ...],
 "shares": [[[1, 1, 1], [1, 2, 1]],     may be left out: tokens of an expert go to its replicas in these parts
            ...]}
"""

# L MoE layers  P slots

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.experts.placement import Placement, Topology

FORMAT = "trimtab-placement"
VERSION = 1


def write_placement(placement: Placement, path: str | Path) -> None:
    """Replaces the file only by a complete one."""
    topology = placement.topology

    def by_rank(row: list[int]) -> list[list[int]]:
        return [[row[slot] for slot in topology.slots_of(rank)] for rank in range(topology.num_ranks)]

    content = {
        "format": FORMAT,
        "version": VERSION,
        "num_experts": topology.num_experts,
        "layers": [by_rank(row) for row in placement.slot_to_expert.tolist()],
        "shares": [by_rank(row) for row in placement.shares.tolist()],
    }
    partial = Path(path).with_name(Path(path).name + ".partial")
    # One line per layer: a change of placement is then a change of few lines.
    text = json.dumps(content).replace("]], [[", "]],\n [[")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def read_placement(path: str | Path, topology: Topology, num_layers: int) -> Placement:
    """The file's placement, which must fit the model and the ranks: whole, before any weight is read (B38).

    Raises ValueError naming the file and, where one is at fault, layer and rank.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"initial_placement ({path}) cannot be read: {error.strerror}; name another file") from error
    except ValueError as error:
        raise ValueError(f"initial_placement ({path}) is not valid JSON: {error}; write it anew") from error
    try:
        return _parse(content, topology, num_layers)
    except ValueError as error:
        raise ValueError(f"initial_placement ({path}): {error}") from error


def _parse(content: Any, topology: Topology, num_layers: int) -> Placement:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'"format" must be "{FORMAT}"; this is another kind of file')
    if content.get("version") != VERSION:
        raise ValueError(f'"version" ({content.get("version")!r}) must be {VERSION}; write the file with this trimtab')
    unknown = sorted(set(content) - {"format", "version", "num_experts", "layers", "shares"})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no key of a placement; take it out")
    if content.get("num_experts") != topology.num_experts:
        raise ValueError(
            f'"num_experts" ({content.get("num_experts")!r}) must be {topology.num_experts}, as in the model; '
            "take a placement made for it"
        )
    slots = _flatten("layers", content.get("layers"), topology, num_layers)
    shares = _flatten("shares", content["shares"], topology, num_layers) if "shares" in content else None
    _check_experts(slots, topology)
    return Placement(topology, slots, shares)


def _flatten(key: str, layers: Any, topology: Topology, num_layers: int) -> list[list[int]]:
    """[layer][rank][slot] -> [L][P]."""
    if not isinstance(layers, list) or len(layers) != num_layers:
        count = len(layers) if isinstance(layers, list) else None
        found = type(layers).__name__ if count is None else f"{count} layers"
        missing = f"; layer {count} is the first missing" if count is not None and count < num_layers else ""
        raise ValueError(f'"{key}" ({found}) must list the {num_layers} MoE layers of the model{missing}')
    for layer, ranks in enumerate(layers):
        if not isinstance(ranks, list) or len(ranks) != topology.num_ranks:
            found = f"{len(ranks)} ranks" if isinstance(ranks, list) else type(ranks).__name__
            raise ValueError(
                f'"{key}", layer {layer} ({found}) must list the slots of {topology.num_ranks} ranks '
                "(data_parallel_size x tensor_parallel_size)"
            )
        for rank, values in enumerate(ranks):
            where = f'"{key}", layer {layer}, rank {rank}'
            if not isinstance(values, list) or any(type(value) is not int for value in values):
                raise ValueError(f"{where} must be a list of integers, one per slot")
            if len(values) != topology.slots_per_rank:
                raise ValueError(f"{where} has {len(values)} slots and must have {_slots_in_words(topology)}")
    return [[value for values in ranks for value in values] for ranks in layers]


def _slots_in_words(topology: Topology) -> str:
    return (
        f"{topology.slots_per_rank}, as every rank: ({topology.num_experts} experts + {topology.num_redundant} "
        f"redundant) / {topology.num_ranks} ranks; correct the file or num_redundant_experts"
    )


def _check_experts(slots: list[list[int]], topology: Topology) -> None:
    for layer, row in enumerate(slots):
        for slot, expert in enumerate(row):
            if not 0 <= expert < topology.num_experts:
                raise ValueError(
                    f'"layers", layer {layer}, rank {topology.rank_of(slot)}: expert {expert} must be in '
                    f"[0, {topology.num_experts})"
                )
