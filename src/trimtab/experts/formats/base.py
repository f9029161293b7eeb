"""What makes up ONE expert: its shape, its activation and its tensors in canonical layout."""

# T tokens  R rows  H hidden size  I intermediate size

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATION_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped", "custom")

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class Activation:
    """What happens between an expert's two multiplications.

    `function(pre)` is always usable: pre is [R, 2I] (gate, then up) or [R, I] for experts without a gate, the result
    [R, I] in pre's dtype. `kind` lets a fused kernel recognise the formula; a kernel that does not know the kind calls
    the function. `alpha` and `limit` belong to swiglu_clamped (gpt-oss).
    """

    kind: str
    function: Callable[[Tensor], Tensor]
    alpha: float = 1.0
    limit: float = float("inf")

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATION_KINDS:
            raise ValueError(
                f"activation kind ({self.kind!r}) must be one of {ACTIVATION_KINDS}; use 'custom' with a function"
            )


def make_activation(kind: str, *, has_gate: bool = True, alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """Builds an activation of a known kind: `f(gate) * up`, or `f(up)` for experts without a gate."""
    if kind == "swiglu_clamped":
        if not has_gate:
            raise ValueError("activation kind ('swiglu_clamped') needs experts with a gate; use a pointwise kind")
        return Activation(kind, _swiglu_clamped(alpha, limit), alpha, limit)
    if kind not in _POINTWISE:
        raise ValueError(
            f"activation kind ({kind!r}) must be one of {(*_POINTWISE, 'swiglu_clamped')}; "
            "pass Activation('custom', function) for any other"
        )
    pointwise = _POINTWISE[kind]
    return Activation(kind, _gated(pointwise) if has_gate else pointwise)


def _gated(pointwise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return pointwise(gate) * up

    return gated


def _swiglu_clamped(alpha: float, limit: float) -> Callable[[Tensor], Tensor]:
    def swiglu_clamped(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return swiglu_clamped


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes and form shared by every expert of a layer."""

    hidden_size: int
    intermediate_size: int
    has_gate: bool
    has_bias: bool
    activation: Activation

    @property
    def gate_up_size(self) -> int:
        """Rows of the first weight: gate and up together, or up alone."""
        return self.intermediate_size * (2 if self.has_gate else 1)

    @property
    def num_parameters(self) -> int:
        weights = (self.gate_up_size + self.intermediate_size) * self.hidden_size
        return weights + (self.gate_up_size + self.hidden_size if self.has_bias else 0)


@dataclass(slots=True)
class ExpertTensors:
    """ONE expert in canonical layout: gate_up [2I, H] (gate rows, then up rows; [I, H] without a gate), down [H, I]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, in a fixed order."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ExpertFormat(Protocol):
    """How one expert is stored: WHICH tensors, in which order, and the way there and back.

    `specs` names them for a shape (never inferred from tensors); `encode` makes them from an expert in canonical
    layout; `decode` returns to it and raises ValueError when one is missing or unexpected.
    """

    @property
    def name(self) -> str: ...

    def specs(self, shape: ExpertShape) -> dict[str, TensorSpec]: ...

    def encode(self, shape: ExpertShape, tensors: ExpertTensors) -> dict[str, Tensor]: ...

    def decode(self, shape: ExpertShape, stored: Mapping[str, Tensor]) -> ExpertTensors: ...


def check_shapes(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError naming the first tensor that is missing, unexpected or of the wrong shape."""
    for name in sorted(expected.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != expected.get(name):
            raise ValueError(
                f"expert tensor {name} (shape {found}) must have shape {expected.get(name)}; check the checkpoint"
            )


def expert_nbytes(expert_format: ExpertFormat, shape: ExpertShape) -> int:
    """Bytes of one expert's stored tensors, without a kernel's padding."""
    return sum(spec.nbytes for spec in expert_format.specs(shape).values())
