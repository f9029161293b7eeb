"""Lays routes over a trainer's batch: each token gets its captured row, or none; anything doubtful is an error."""

# B rows of the batch  T tokens of each, padding included  N = B x T  S tokens of a completion  L MoE layers  K top-k

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.replay.layers import ReplayLayer
from trimtab.replay.routes import Routes

LIVE = -1  # stands where a token has no captured row: the live router chooses


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model's forward was called with."""

    input_ids: Tensor | None  # [B, T]
    valid: Tensor  # bool [B, T]: not padding
    position_ids: Tensor | None  # [B, T]


def check_model(routes: Sequence[Routes], layers: Sequence[ReplayLayer], architecture: str) -> None:
    """Raises ValueError where routes are of another model than the one that has these layers."""
    if not routes:
        raise ValueError("routes ([]) must hold one completion per sequence of the batch")
    layer_ids = tuple(layer.layer_id for layer in layers)
    for entry in routes:
        model = entry.model
        if model.layer_ids != layer_ids:
            raise ValueError(
                f"{entry.label}: routes of {model.architecture} have MoE layers {list(model.layer_ids)}, "
                f"{architecture} has {list(layer_ids)}"
            )
        for layer in layers:
            num_experts = getattr(layer.experts, "num_experts", model.num_experts)
            if num_experts != model.num_experts:
                raise ValueError(
                    f"{entry.label}: routes of {model.architecture} have {model.num_experts} experts, "
                    f"layer {layer.layer_id} of {architecture} has {num_experts}"
                )


def read_batch(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """Finds ids, mask and positions among the arguments of a call of `forward`."""
    given = dict(inspect.signature(forward).bind_partial(*args, **kwargs).arguments)
    for name, value in list(given.items()):
        if isinstance(value, dict) and name not in ("attention_mask", "position_ids"):
            given |= value  # **kwargs of a wrapper
    input_ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    shown = input_ids if input_ids is not None else embeddings
    if shown is None:
        raise ValueError("replay needs input_ids or inputs_embeds by name, to see which token each row belongs to")
    shape = tuple(shown.shape[:2])
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != shape):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask ({found}) must be [B, T] {list(shape)}, 1 for tokens and 0 for padding")
    valid = torch.ones(shape, dtype=torch.bool, device=shown.device) if mask is None else mask.to(torch.bool)
    if positions is not None:
        while positions.dim() > 2:  # one per axis of an image; the first one is time
            positions = positions[0]
        positions = positions.reshape(-1, shape[1]).expand(shape)
    return Batch(input_ids, valid, positions)


def align(routes: Sequence[Routes], batch: Batch) -> Tensor:
    """int64 [N, L, K] on the CPU: the row of each token of the batch, LIVE where there is none.

    Sequences are the rows of the batch without their padding, left or right, or the parts of packed rows, which begin
    where position_ids restart. The i-th sequence is the i-th completion, whole or without its last token.
    """
    sequences = _sequences(batch)
    if len(sequences) != len(routes):
        hint = "" if batch.position_ids is not None else "; packed sequences need position_ids that restart at each"
        raise ValueError(f"routes of {len(routes)} completions for {len(sequences)} sequences in the batch{hint}")
    ids = None if batch.input_ids is None else batch.input_ids.reshape(-1).cpu().numpy()
    layers, top_k = len(routes[0].model.layer_ids), routes[0].model.top_k
    aligned = np.full((batch.valid.numel(), layers, top_k), LIVE, np.int64)
    for number, (entry, places) in enumerate(zip(routes, sequences, strict=True)):
        if len(places) not in (entry.num_tokens, entry.num_tokens - 1):
            raise ValueError(
                f"sequence {number} ({entry.label}) has {len(places)} tokens in the batch; its routes are of "
                f"{entry.num_tokens}, and {entry.num_tokens - 1} without the last. Is a mask or truncation missing?"
            )
        if ids is not None:
            _check_tokens(number, entry, ids[places])
        rows = entry.experts[: max(len(places) - entry.start, 0)]
        aligned[places[entry.start : entry.start + len(rows)]] = rows
    return torch.from_numpy(aligned)


def _check_tokens(number: int, entry: Routes, ids: np.ndarray) -> None:
    differ = np.flatnonzero(ids != entry.token_ids[: len(ids)])
    if differ.size:
        first = int(differ[0])
        raise ValueError(
            f"sequence {number} ({entry.label}) differs from its routes at token {first}: {int(ids[first])} in the "
            f"batch, {int(entry.token_ids[first])} in the routes ({differ.size} of {len(ids)} differ)"
        )


def _sequences(batch: Batch) -> list[np.ndarray]:
    """Places in [N] of each sequence's tokens, in order."""
    valid = batch.valid.cpu().numpy()
    positions = None if batch.position_ids is None else batch.position_ids.cpu().numpy()
    width = valid.shape[1]
    found: list[np.ndarray] = []
    for row in range(valid.shape[0]):
        places = np.flatnonzero(valid[row])
        if positions is None:
            found.append(places + row * width)
            continue
        restarts = np.flatnonzero(np.diff(positions[row, places]) <= 0) + 1
        found += [part + row * width for part in np.split(places, restarts)]
    return [places for places in found if places.size]
