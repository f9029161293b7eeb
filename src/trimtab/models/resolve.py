"""From the name a person types to a model folder. Only local folders and the built-in demo model: no network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

DEMO = "demo"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str | Path, progress: Callable[..., None] | None = None) -> Path:
    """The folder of `name`; "demo" is built and cached on first use. Raises ValueError with the remedy."""
    if name == DEMO:  # a folder of that name is reached as ./demo
        from trimtab.models.demo import ensure_demo

        return ensure_demo(progress=progress)
    return _local_folder(name, "model", f"or {DEMO!r}")


def resolve_weights(name: str | Path) -> Path:
    """The folder of new weights for a model that is served. Raises ValueError with the remedy."""
    return _local_folder(name, "path", "of the model that is served")


def weights_nbytes(folder: Path) -> int:
    """Bytes of the files that hold its weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _local_folder(name: str | Path, what: str, expected: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"{what} ({name}) is a file; name the folder that holds it and its config.json")
    if _HUB_ID.fullmatch(str(name)):
        raise ValueError(
            f"{what} ({name}) is not a local folder. It looks like a Hugging Face id, but only local folders are read: "
            f"run `hf download {name} --local-dir {path.name}` and pass {path.name}"
        )
    raise ValueError(f"{what} ({name}) does not exist; pass a folder with config.json and safetensors, {expected}")
