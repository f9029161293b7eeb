"""int8 experts: rotated, then half a step of error at most; both tensors of a weight or none; a kernel reads them."""

from __future__ import annotations

import pytest
import torch

from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.data.kernels.native import native_refusal
from trimtab.experts.data.kernels.reference import ReferenceExpertKernel
from trimtab.experts.formats.base import Activation, ExpertShape, ExpertTensors, expert_nbytes, make_activation
from trimtab.experts.formats.int8 import Int8Format, dequantize_rows, quantize_rows, rotate
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


@pytest.mark.parametrize("depth", [1, 31, 32, 75, 4000])
def test_whole_pieces_are_rotated_by_the_hadamard_matrix_and_back_by_rotating_again(depth: int) -> None:
    weight = torch.randn(70, depth, generator=torch.Generator().manual_seed(depth)).bfloat16()
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)], dtype=torch.float64)
    rotated, again = rotate(weight), rotate(rotate(weight))
    whole = depth // 32 * 32
    for first in range(0, whole, 32):
        piece = weight[:, first : first + 32].double()
        torch.testing.assert_close(rotated[:, first : first + 32].double(), piece @ matrix, atol=2e-5, rtol=0)
        torch.testing.assert_close(again[:, first : first + 32].double() / 32, piece, atol=1e-5, rtol=0)
    assert torch.equal(rotated[:, whole:], 4 * weight[:, whole:].float())
    row = torch.randn(depth, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factor = torch.cat([torch.full((whole,), 32.0), torch.full((depth - whole,), 16.0)]).double()
    product = (rotated.double() / factor) @ rotate(row[None]).double()[0]
    torch.testing.assert_close(product, weight.double() @ row, atol=1e-4, rtol=0)


def test_one_large_feature_leaves_the_others_their_steps() -> None:
    """What the rotation is for: without it the small values would be 4 steps at most, a quarter of them nothing."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(64, 64, generator=generator)
    weight[:, 5] *= 40
    expert = ExpertTensors(weight, torch.randn(64, 32, generator=generator))
    shape = ExpertShape(64, 32, True, False, make_activation("silu"))
    stored = Int8Format().decode(shape, Int8Format().encode(shape, expert)).gate_up
    plain = dequantize_rows(*quantize_rows(weight))
    others = [column for column in range(64) if column != 5]
    errors = [(held - weight)[:, others].norm() / weight[:, others].norm() for held in (stored, plain)]
    assert errors[0] < errors[1] / 3


def test_encode_and_decode_keep_what_int8_can_hold() -> None:
    chosen = find_format("int8")
    source = random_expert(1)
    stored = chosen.encode(SHAPE, source)
    assert list(stored) == list(chosen.specs(SHAPE))
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in chosen.specs(SHAPE).items()
    }
    assert expert_nbytes(chosen, SHAPE) == sum(tensor.nbytes for tensor in stored.values())
    decoded = chosen.decode(SHAPE, stored)
    assert torch.equal(decoded.gate_up, rotate(dequantize_rows(stored["gate_up"], stored["gate_up_scale"])))
    # Half a step of each of the 32 stored values that make up a value, were they all at their worst: 40 = 32 + 8 inputs
    # of gate_up. Those of down, 24, are no whole piece, and stored as a quarter.
    for name, factor in (("gate_up", 16.0), ("down", 2.01)):
        error = (getattr(decoded, name) - getattr(source, name)).abs()
        assert (error <= factor * stored[f"{name}_scale"][:, None]).all() and error.max() > 0
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
