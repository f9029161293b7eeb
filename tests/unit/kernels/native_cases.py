"""Experts, layers and the plain-torch mathematics that the native kernels' tests compare with."""

# T tokens  K top-k  H hidden  I intermediate
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from trimtab.kernels.native.build import CORE_PATH
from trimtab.kernels.native.library import Format, Level, NativeCore, NativeKernels, choose_kernels
from trimtab.kernels.native.moe import WEIGHT_DTYPES, MoeShape, MoeWeights, NativeMoe

# scripts/sanitize_native.sh points this at a build with sanitizers.
CORE_VARIABLE = "TRIMTAB_TEST_CORE"
POINTWISE = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
SHAPES = [MoeShape(40, 24, has_gate, kind) for kind in POINTWISE for has_gate in (True, False)]
SHAPES.append(MoeShape(40, 24, True, "swiglu_clamped", 1.702, 1.5))


def load_kernels() -> NativeKernels:
    """The AVX2 kernels of the built core; skips the module where there are none."""
    path = Path(os.environ.get(CORE_VARIABLE, CORE_PATH))
    if not path.exists():
        pytest.skip("the native core is not built", allow_module_level=True)
    core = NativeCore(path)
    if not core.cpu_supports(Level.AVX2, Format.FP32):
        pytest.skip("this CPU has no AVX2", allow_module_level=True)
    return choose_kernels(core, Level.AVX2)


def random_weights(shape: MoeShape, weight_format: Format, generator: torch.Generator) -> MoeWeights:
    hidden, inter = shape.hidden_size, shape.intermediate_size
    rows = 2 * inter if shape.has_gate else inter
    bias = [torch.randn(n, generator=generator).to(torch.bfloat16).float() for n in (rows, hidden)]
    if weight_format is Format.INT8:
        scales = [torch.rand(n, generator=generator) * 0.02 + 1e-4 for n in (rows, hidden)]
        weights = [
            torch.randint(-127, 128, size, generator=generator).to(torch.int8)
            for size in ((rows, hidden), (hidden, inter))
        ]
        return MoeWeights(weights[0], weights[1], *bias, *scales)
    dtype = WEIGHT_DTYPES[weight_format]
    gate_up = torch.randn(rows, hidden, generator=generator) / hidden**0.5
    down = torch.randn(hidden, inter, generator=generator) / inter**0.5
    return MoeWeights(gate_up.to(dtype), down.to(dtype), *bias)


@dataclass
class Layer:
    """A packed layer and the experts in it."""

    native: NativeMoe
    experts: list[MoeWeights]


def make_layer(
    kernels: NativeKernels, shape: MoeShape, weight_format: Format, num_slots: int, generator: torch.Generator
) -> Layer:
    native = NativeMoe(kernels, shape, num_slots, weight_format)
    experts = [random_weights(shape, weight_format, generator) for _ in range(num_slots)]
    for slot, expert in enumerate(experts):
        native.pack(slot, expert)
    return Layer(native, experts)


def rotated_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] fp32, each whole 32 of n through the Hadamard transform, rounded as the kernel does, sum by sum; what
    is left of n is taken four times."""
    x = x.float().clone()
    x[..., x.shape[-1] // 32 * 32 :] *= 4
    for first in range(0, x.shape[-1] - 31, 32):
        for distance in (16, 8, 4, 2, 1):
            at = torch.tensor([first + i for i in range(32) if not i & distance])
            x[..., at], x[..., at + distance] = x[..., at] + x[..., at + distance], x[..., at] - x[..., at + distance]
    return x


def quantised_rows(x: torch.Tensor) -> torch.Tensor:
    """What an int8 kernel sees of x [..., n]: per-row symmetric int8, back in float64."""
    largest = x.float().abs().amax(-1, keepdim=True)
    # A tensor on top: torch computes number / tensor as a reciprocal times the number, which rounds twice.
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)
    return (x.float() * inverse).round().double() * (largest / 127.0).double()


def reference_moe(
    layer: Layer, hidden: torch.Tensor, slot_ids: torch.Tensor, gate_weights: torch.Tensor, inner_error: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, error) in float64: how far a correct kernel may be, before its result is rounded to hidden's dtype.

    fp32 sums of n terms err by about sqrt(n) * 2^-24 of the sum of their absolute values (n <= 4096 here: 4e-6), twice
    because the pre-activations cancel too, with a margin of three. In int8 rows are rotated and quantised, and an
    inner value just between two steps may be rounded either way: two such values per row.
    """
    shape = layer.native.shape
    is_int8 = layer.native.weight_format is Format.INT8
    seen = quantised_rows(rotated_rows(hidden)) if is_int8 else hidden.double()
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    error = torch.zeros_like(out)
    for slot, expert in enumerate(layer.experts):
        tokens, k = (slot_ids == slot).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up, down = _dequantised(expert)
        pre = seen[tokens] @ gate_up.T
        if expert.gate_up_bias is not None:
            pre += expert.gate_up_bias.double()
        inner = reference_activation(shape, pre)
        inner = rotated_rows(inner) if is_int8 else inner
        step = inner.abs().amax(-1, keepdim=True) / 127 if is_int8 else torch.zeros(len(tokens), 1)
        inner = quantised_rows(inner) if is_int8 else inner
        weights = gate_weights[tokens, k].double()[:, None]
        bias = expert.down_bias.double() if expert.down_bias is not None else torch.zeros(shape.hidden_size)
        out.index_add_(0, tokens, weights * (inner @ down.T + bias))
        magnitude = inner.abs() @ down.abs().T + bias.abs()
        magnitude += magnitude.mean(-1, keepdim=True)
        flips = 2 * step * down.abs().amax(-1)
        error.index_add_(0, tokens, weights.abs() * ((2.4e-5 + inner_error) * magnitude + flips))
    return out, error


def _dequantised(expert: MoeWeights) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = expert.gate_up.double(), expert.down.double()
    if expert.gate_up_scale is not None and expert.down_scale is not None:
        gate_up = gate_up * expert.gate_up_scale.double()[:, None]
        down = down * expert.down_scale.double()[:, None]
    return gate_up, down


def reference_activation(shape: MoeShape, pre: torch.Tensor) -> torch.Tensor:
    if not shape.has_gate:
        return POINTWISE[shape.activation](pre)
    gate, up = pre.chunk(2, dim=-1)
    if shape.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
        return gate * torch.sigmoid(shape.alpha * gate) * (up + 1)
    return POINTWISE[shape.activation](gate) * up


def assert_close_to_reference(
    layer: Layer, hidden: torch.Tensor, slot_ids: torch.Tensor, gate_weights: torch.Tensor, *, inner_error: float = 0.0
) -> None:
    """The layer's output against the reference; `inner_error` is the relative rounding of inner values, if any."""
    got = layer.native(hidden, slot_ids, gate_weights)
    assert got.dtype == hidden.dtype and got.shape == hidden.shape
    want, error = reference_moe(layer, hidden, slot_ids, gate_weights, inner_error)
    rounding = 2.0**-8 if hidden.dtype == torch.bfloat16 else 2.0**-23
    tolerance = error + rounding * want.abs() + 1e-7
    worst = ((got.double() - want).abs() / tolerance).max().item() if got.numel() else 0.0
    assert worst <= 1.0, f"off by {worst:.2f} of the tolerance"


def routed(
    num_tokens: int, top_k: int, num_slots: int, generator: torch.Generator, *, padding: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    slot_ids = torch.randint(0, num_slots, (num_tokens, top_k), generator=generator)
    slot_ids[torch.rand(num_tokens, top_k, generator=generator) < padding] = -1
    return slot_ids, torch.rand(num_tokens, top_k, generator=generator)
