"""int8 experts: half a step of error at most, both tensors of a weight or none, and a kernel that reads them."""

from __future__ import annotations

import pytest
import torch

from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.data.kernels.native import native_refusal
from trimtab.experts.data.kernels.reference import ReferenceExpertKernel
from trimtab.experts.formats.base import Activation, ExpertShape, ExpertTensors, expert_nbytes, make_activation
from trimtab.experts.formats.int8 import Int8Format, dequantize_rows, quantize_rows
from trimtab.experts.formats.registry import find_format

SHAPE = ExpertShape(40, 24, True, True, make_activation("silu"))


def random_expert(seed: int, shape: ExpertShape = SHAPE) -> ExpertTensors:
    generator = torch.Generator().manual_seed(seed)
    rows, hidden, inner = shape.gate_up_size, shape.hidden_size, shape.intermediate_size
    sizes = [(rows, hidden), (hidden, inner), (rows,), (hidden,)]
    return ExpertTensors(*(torch.randn(size, generator=generator) / 6 for size in sizes))


def test_a_quantized_value_is_within_half_a_step_and_the_largest_is_exact_to_rounding() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.4], [0.0, 0.0, 0.0], [1e-3, 5e-4, -1e-3], [1e-40, 0.0, 0.0]])
    quantized, scale = quantize_rows(weight)
    assert quantized.tolist() == [[64, -127, 25], [0, 0, 0], [127, 64, -127], [0, 0, 0]]
    assert ((dequantize_rows(quantized, scale) - weight).abs() <= scale[:, None] * 0.5001 + 1e-36).all()


def test_encode_and_decode_keep_what_int8_can_hold() -> None:
    chosen = find_format("int8")
    stored = chosen.encode(SHAPE, random_expert(1))
    assert list(stored) == list(chosen.specs(SHAPE))
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in chosen.specs(SHAPE).items()
    }
    assert expert_nbytes(chosen, SHAPE) == sum(tensor.nbytes for tensor in stored.values())
    decoded = chosen.decode(SHAPE, stored)
    assert torch.equal(decoded.gate_up, dequantize_rows(stored["gate_up"], stored["gate_up_scale"]))
    again = chosen.encode(SHAPE, decoded)
    assert all(torch.equal(again[name], stored[name]) for name in ("gate_up", "down", "gate_up_bias", "down_bias"))


def test_values_without_their_scales_are_refused() -> None:
    stored = Int8Format().encode(SHAPE, random_expert(2))
    del stored["down_scale"]
    with pytest.raises(ValueError, match=r"down_scale \(shape None\) must have shape \(40,\)"):
        Int8Format().decode(SHAPE, stored)


def test_weights_that_are_not_finite_are_refused() -> None:
    expert = random_expert(3)
    expert.down[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        Int8Format().encode(SHAPE, expert)


def test_an_int8_kernel_equals_the_reference_on_what_its_slots_hold() -> None:
    if native_refusal(SHAPE, "int8"):
        pytest.skip("no native int8 kernel here")
    kernel = make_expert_kernel(SHAPE, 3, torch.bfloat16, quantization="int8")
    reference = ReferenceExpertKernel(SHAPE, 3, torch.float32)
    for slot in range(3):
        expert = random_expert(slot)
        kernel.load_slot(slot, expert)
        held = kernel.read_slot(slot)
        expected = Int8Format().decode(SHAPE, Int8Format().encode(SHAPE, expert)).tensors()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held.tensors().items())
        reference.load_slot(slot, held)
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(50, 40, generator=generator)
    slot_ids, gates = torch.randint(0, 3, (50, 2), generator=generator), torch.rand(50, 2, generator=generator)
    expected_out = reference(hidden, slot_ids, gates)
    # Activations are quantized too: 1/254 of a row's largest, twice.
    error = (kernel(hidden, slot_ids, gates) - expected_out).norm() / expected_out.norm()
    assert error < 1.5e-2


def test_int8_without_a_native_kernel_is_refused_with_the_reason() -> None:
    shape = ExpertShape(40, 24, True, True, Activation("custom", lambda pre: pre[:, :24]))
    with pytest.raises(ValueError, match=r"quantization \('int8'\) needs a native kernel.*activation kind 'custom'"):
        make_expert_kernel(shape, 3, torch.bfloat16, quantization="int8")
