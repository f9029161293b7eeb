"""Experts stored value by value in one floating-point type: fp32, bf16 or fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.formats.base import ExpertShape, ExpertTensors, TensorSpec, check_shapes


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """The canonical tensors themselves, in `dtype`."""

    name: str
    dtype: torch.dtype

    def specs(self, shape: ExpertShape) -> dict[str, TensorSpec]:
        sizes: dict[str, tuple[int, ...]] = {
            "gate_up": (shape.gate_up_size, shape.hidden_size),
            "down": (shape.hidden_size, shape.intermediate_size),
        }
        if shape.has_bias:
            sizes |= {"gate_up_bias": (shape.gate_up_size,), "down_bias": (shape.hidden_size,)}
        return {name: TensorSpec(size, self.dtype) for name, size in sizes.items()}

    def encode(self, shape: ExpertShape, tensors: ExpertTensors) -> dict[str, Tensor]:
        """Raises ValueError naming the tensor that is missing, unexpected or of the wrong shape."""
        given = tensors.tensors()
        self._check(shape, given)
        return {name: tensor.to(self.dtype) for name, tensor in given.items()}

    def decode(self, shape: ExpertShape, stored: Mapping[str, Tensor]) -> ExpertTensors:
        self._check(shape, stored)
        return ExpertTensors(**stored)

    def _check(self, shape: ExpertShape, tensors: Mapping[str, Tensor]) -> None:
        check_shapes({name: spec.shape for name, spec in self.specs(shape).items()}, tensors)
