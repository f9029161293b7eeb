"""The two layouts that trainers take routed experts in, and how each travels as text.

vLLM's form: MoE layers alone, the narrow dtype, as a `.npy`. SGLang's form: one row per decoder layer, int32, as raw
bytes. Both have S - 1 - start rows. See docs/routed-experts.md for who expects which.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np

from trimtab.replay.routes import Routes

# What stands in a dense layer's rows. SGLang's buffers start as zeros, and trainers either skip those layers by the
# model's layout or drop leading layers that are all zero; another value would be taken for a choice.
DENSE_LAYER_ID = 0


def to_moe_layers(routes: Routes) -> np.ndarray:
    """[S - 1 - start, MoE layers, top-k], uint8 or uint16: vLLM's `CompletionOutput.routed_experts`."""
    return np.ascontiguousarray(_forwarded_rows(routes), dtype=routes.model.dtype)


def to_all_layers(routes: Routes) -> np.ndarray:
    """[S - 1 - start, num_hidden_layers, top-k], int32: SGLang's `routed_experts`, dense layers' rows zero."""
    model = routes.model
    rows = _forwarded_rows(routes)
    found = np.full((len(rows), model.num_hidden_layers, model.top_k), DENSE_LAYER_ID, np.int32)
    found[:, list(model.layer_ids)] = rows
    return found


def save_npy(path: str | Path, routes: Routes) -> Path:
    """Writes `to_moe_layers` as a `.npy`."""
    path = Path(path)
    with path.open("wb") as file:
        np.save(file, to_moe_layers(routes), allow_pickle=False)
    return path


def load_npy(path: str | Path) -> np.ndarray:
    """Reads what `save_npy` or vLLM wrote: integers [rows, layers, top-k]. Raises ValueError for anything else."""
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy of numbers ({error})") from error
    if not isinstance(found, np.ndarray) or found.ndim != 3 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{path} must hold integers [rows, layers, top-k]")
    return found


def to_npy_base64(routes: Routes) -> str:
    """vLLM's HTTP form: a `.npy` of `to_moe_layers`, which brings its shape and dtype, as base64."""
    buffer = io.BytesIO()
    np.save(buffer, to_moe_layers(routes), allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def to_int32_base64(routes: Routes) -> str:
    """SGLang's HTTP form: the bytes of `to_all_layers`, little-endian and without a shape, as base64."""
    return base64.b64encode(to_all_layers(routes).astype("<i4", copy=False).tobytes()).decode("ascii")


def _forwarded_rows(routes: Routes) -> np.ndarray:
    """Without the last token's row, which an engine never has: S - 1 - start rows."""
    return routes.experts[: max(routes.num_tokens - 1 - routes.start, 0)]
