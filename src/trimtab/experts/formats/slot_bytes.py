"""One expert's stored tensors as one row of bytes, for kernels whose own storage is not such a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trimtab.experts.formats.base import ExpertFormat, ExpertShape, check_shapes

# A cache line: every tensor of a row can be read as its own type.
_ALIGNMENT = 64


class SlotBytes:
    """Where each tensor that `expert_format` names lies in a slot's `nbytes`; `layout` says the same in words."""

    def __init__(self, expert_format: ExpertFormat, shape: ExpertShape) -> None:
        self.specs = expert_format.specs(shape)
        self._starts: dict[str, int] = {}
        self.nbytes = 0
        for name, spec in self.specs.items():
            self._starts[name] = self.nbytes
            self.nbytes += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        tensors = (f"{name} {str(spec.dtype)[6:]}{list(spec.shape)}" for name, spec in self.specs.items())
        self.layout = f"{expert_format.name}: {', '.join(tensors)}"

    def write(self, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """Every byte of out uint8 [nbytes]. Raises ValueError for a tensor that is missing, unexpected or misshapen."""
        check_shapes({name: spec.shape for name, spec in self.specs.items()}, stored)
        for name, view in self.read(out).items():
            if stored[name].dtype != view.dtype:
                raise ValueError(f"expert tensor {name} ({stored[name].dtype}) must be {view.dtype}; encode it first")
            view.copy_(stored[name])
            start = self._starts[name] + view.nbytes
            out[start : start + -start % _ALIGNMENT] = 0  # padding travels and is summed like the rest

    def read(self, data: Tensor) -> dict[str, Tensor]:
        """Views into data uint8 [nbytes]."""
        assert data.dtype == torch.uint8 and data.shape == (self.nbytes,), f"{data.dtype} {tuple(data.shape)}"
        return {
            name: data[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
            for (name, spec), start in zip(self.specs.items(), self._starts.values(), strict=True)
        }
