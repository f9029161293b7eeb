"""A checkpoint whose router prefers given experts, whatever it reads: the same skew in every rank's process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

WEIGHTS, SKEWED = "weights.safetensors", "skewed-routers.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def write_skewed_checkpoint(
    source: Path, target: Path, hot_experts: Sequence[int], *, factor: float = 4.0, router: str = ".mlp.gate.weight"
) -> Path:
    """`source` (one safetensors file) again at `target` (made), the routers' rows of `hot_experts` times `factor`.

    A router without bias gives those experts logits `factor` times as wide, so that of many experts the largest ones,
    the chosen ones, are nearly all among them. The other weights are linked, not copied. Raises ValueError where no
    tensor's name ends in `router`.
    """
    target.mkdir(parents=True, exist_ok=True)
    stored = source / "model.safetensors"
    for file in source.iterdir():
        if file.is_file() and file != stored:
            shutil.copy(file, target / file.name)
    link = target / WEIGHTS
    link.unlink(missing_ok=True)
    link.symlink_to(stored.resolve())
    with safe_open(stored, "pt") as tensors:
        names = list(tensors.keys())
        routers = {name: tensors.get_tensor(name) for name in names if name.endswith(router)}
    if not routers:
        raise ValueError(f"router ({router!r}) must be the end of a tensor's name in {stored}; give another")
    for weight in routers.values():
        weight[list(hot_experts)] *= factor
    save_file(routers, target / SKEWED, metadata={"format": "pt"})
    weight_map = {name: SKEWED if name in routers else WEIGHTS for name in names}
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target
