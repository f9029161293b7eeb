"""Experts stored in int8: rotated, symmetric, one scale per output feature; biases stay fp32.

A weight [N, K] is stored in another basis of its inputs: each whole piece of 32 inputs is taken through the Hadamard
transform (rotated), and kernels take their rows through it too, so that products stay what they were. It makes of one
large value 32 middling ones. Rounded to 8 bits per row, the few large features that language models have would else
leave the others hardly any steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.formats.base import ExpertShape, ExpertTensors, TensorSpec, check_shapes

# -128 is not used: a symmetric range needs no zero point.
INT8_MAX = 127
PIECE = 32
_ENLARGED = 4
_PIECES_AT_ONCE = 2048  # what is rotated stays in the cache


def rotate(weight: Tensor) -> Tensor:
    """weight [N, K] -> fp32 [N, K]: the transform of each whole piece of K, without its factor.

    That makes values about sqrt(32) times as large, so what is left of K is taken four times. Additions in the kernels'
    order and powers of two only: the same bits on every machine. Rotating twice multiplies whole pieces by 32, and what
    is left by 16.
    """
    num_rows, depth = weight.shape
    whole = depth // PIECE * PIECE
    pieces = weight[:, :whole].reshape(-1, PIECE)
    rotated = torch.empty(pieces.shape, dtype=torch.float32, device=weight.device)
    for source, target in zip(pieces.split(_PIECES_AT_ONCE), rotated.split(_PIECES_AT_ONCE), strict=True):
        target.copy_(_transform(source.T.float().contiguous()).T)
    return torch.cat([rotated.view(num_rows, whole), weight[:, whole:].float() * _ENLARGED], dim=1)


def _transform(columns: Tensor) -> Tensor:
    """columns [PIECE, P] fp32 -> [PIECE, P]: down the columns, so that each addition is one of long vectors."""
    distance = PIECE // 2
    while distance:
        first, second = columns.unflatten(0, (-1, 2, distance)).unbind(1)
        columns = torch.stack((first + second, first - second), dim=1).flatten(0, 2)
        distance //= 2
    return columns


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (int8 [N, K], fp32 scale [N]) with weight ~ int8 * scale, within half a scale.

    Raises ValueError when a value is not finite: its row would become a plausible lie.
    """
    largest = weight.float().abs().amax(dim=1)
    if not largest.isfinite().all():
        raise ValueError("weights with values that are not finite cannot be stored in int8; check the checkpoint")
    scale = largest / INT8_MAX
    # Rows so small that their scale has no finite inverse become zeros.
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, scale.reciprocal(), 0.0)
    quantized = (weight.float() * inverse[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
    return quantized.to(torch.int8), scale


def dequantize_rows(quantized: Tensor, scale: Tensor) -> Tensor:
    """The fp32 values that (int8, scale) stand for."""
    return quantized.float() * scale[:, None]


@dataclass(frozen=True, slots=True)
class Int8Format:
    """Each weight is two tensors, values (rotated) and scales; they travel together or the expert is refused."""

    name: str = "int8"

    def specs(self, shape: ExpertShape) -> dict[str, TensorSpec]:
        rows, hidden, inner = shape.gate_up_size, shape.hidden_size, shape.intermediate_size
        specs = {
            "gate_up": TensorSpec((rows, hidden), torch.int8),
            "gate_up_scale": TensorSpec((rows,), torch.float32),
            "down": TensorSpec((hidden, inner), torch.int8),
            "down_scale": TensorSpec((hidden,), torch.float32),
        }
        if shape.has_bias:
            specs["gate_up_bias"] = TensorSpec((rows,), torch.float32)
            specs["down_bias"] = TensorSpec((hidden,), torch.float32)
        return specs

    def encode(self, shape: ExpertShape, tensors: ExpertTensors) -> dict[str, Tensor]:
        """Raises ValueError naming the tensor that is missing, unexpected, of the wrong shape or not finite."""
        given = tensors.tensors()
        specs = {name: spec for name, spec in self.specs(shape).items() if not name.endswith("_scale")}
        check_shapes({name: spec.shape for name, spec in specs.items()}, given)
        stored = {}
        for name, tensor in given.items():
            if name.endswith("_bias"):
                stored[name] = tensor.float()
            else:
                stored[name], stored[f"{name}_scale"] = quantize_rows(_rotated_weight(tensor))
        return {name: stored[name] for name in self.specs(shape)}

    def decode(self, shape: ExpertShape, stored: Mapping[str, Tensor]) -> ExpertTensors:
        """The expert as fp32; what quantization lost stays lost."""
        check_shapes({name: spec.shape for name, spec in self.specs(shape).items()}, stored)
        return ExpertTensors(
            rotate(dequantize_rows(stored["gate_up"], stored["gate_up_scale"])),
            rotate(dequantize_rows(stored["down"], stored["down_scale"])),
            stored.get("gate_up_bias"),
            stored.get("down_bias"),
        )


def _rotated_weight(weight: Tensor) -> Tensor:
    """What is stored: the inverse of `rotate`, for kernels do to their rows what `rotate` does."""
    rotated = rotate(weight)
    whole = weight.shape[1] // PIECE * PIECE
    rotated[:, :whole] /= PIECE
    rotated[:, whole:] /= _ENLARGED**2
    return rotated
