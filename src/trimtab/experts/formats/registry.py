"""The formats an expert may be stored in. What is not registered is refused."""

from __future__ import annotations

import torch

from trimtab.experts.formats.base import ExpertFormat
from trimtab.experts.formats.dense import DenseFormat
from trimtab.experts.formats.int8 import Int8Format

_FORMATS: dict[str, ExpertFormat] = {}


def register_format(expert_format: ExpertFormat) -> None:
    """Admits a format under its name; one that passes tests/contracts/test_expert_format.py."""
    taken = _FORMATS.setdefault(expert_format.name, expert_format)
    if taken != expert_format:
        raise ValueError(f"expert format name ({expert_format.name!r}) is taken by {taken}; choose another")


def find_format(name: str | torch.dtype) -> ExpertFormat:
    """The format of this name, or the dense one of this dtype."""
    key = str(name).removeprefix("torch.")
    if key not in _FORMATS:
        raise ValueError(f"expert format ({key!r}) must be one of {', '.join(sorted(_FORMATS))}; no other is supported")
    return _FORMATS[key]


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    register_format(DenseFormat(str(_dtype).removeprefix("torch."), _dtype))
register_format(Int8Format())
