"""The packed linear kernel equals plain torch; int8 to the last bit."""

from __future__ import annotations

import pytest
import torch
from native_cases import load_kernels, quantised_rows

from trimtab.kernels.native.library import Format
from trimtab.kernels.native.linear import NativeLinear

KERNELS = load_kernels()
SIZES = pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (63, 5), (64, 64), (65, 130), (200, 700)])


@SIZES
@pytest.mark.parametrize("weight_format", [Format.FP32, Format.BF16])
def test_linear_equals_the_reference(weight_format, out_features, in_features):
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if weight_format is Format.FP32 else torch.bfloat16
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator)
    layer = NativeLinear(KERNELS, weight_format, weight, bias)
    for num_rows in (0, 1, 2, 5, 6, 7, 100):
        x = torch.randn(num_rows, in_features, generator=generator)
        want = x.double() @ weight.double().T + bias.double()
        magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        assert ((layer(x).double() - want).abs() <= 1e-5 * magnitude).all()
        rounded = layer(x.bfloat16())
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, layer(x.bfloat16().float()).bfloat16())


@SIZES
def test_int8_linear_equals_exact_integer_arithmetic(out_features, in_features):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8)
    weight[0] = 127  # the ends of the range: what a saturating instruction gets wrong
    scale = torch.rand(out_features, generator=generator)
    layer = NativeLinear(KERNELS, Format.INT8, weight, scale=scale)
    for num_rows in (1, 2, 3, 4, 5, 50):
        x = torch.randn(num_rows, in_features, generator=generator)
        x[0] = 3.0
        row_scale = x.abs().amax(-1, keepdim=True) / 127.0
        integers = (quantised_rows(x) / row_scale.double()).round() @ weight.double().T
        want = integers.float() * (row_scale * scale)
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("weight_format", list(Format))
def test_linear_rows_do_not_depend_on_the_batch(weight_format):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (130, 777), generator=generator)
    scale = torch.rand(130, generator=generator) if weight_format is Format.INT8 else None
    weight = weight.to(
        {Format.FP32: torch.float32, Format.BF16: torch.bfloat16, Format.INT8: torch.int8}[weight_format]
    )
    layer = NativeLinear(KERNELS, weight_format, weight, scale=scale)
    x = torch.randn(110, 777, generator=generator)
    alone = torch.cat([layer(row[None]) for row in x])
    for size in (2, 3, 4, 5, 7, 11, 110):
        assert torch.equal(layer(x[:size]), alone[:size])


@pytest.mark.parametrize("weight_format", list(Format))
def test_linear_unpacks_every_bit(weight_format):
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-127, 128, (70, 33), generator=generator)
    weight = weight.to(
        {Format.FP32: torch.float32, Format.BF16: torch.bfloat16, Format.INT8: torch.int8}[weight_format]
    )
    scale = torch.rand(70, generator=generator) if weight_format is Format.INT8 else None
    bias = torch.randn(70, generator=generator)
    unpacked = NativeLinear(KERNELS, weight_format, weight, bias, scale).unpack()
    assert torch.equal(unpacked[0], weight) and torch.equal(unpacked[1], bias)
    assert scale is None or torch.equal(unpacked[2], scale)


def test_leading_dimensions_are_kept():
    layer = NativeLinear(KERNELS, Format.FP32, torch.eye(7))
    x = torch.randn(2, 3, 7)
    assert torch.equal(layer(x), x)


def test_int8_rows_too_small_to_scale_count_as_zeros():
    layer = NativeLinear(KERNELS, Format.INT8, torch.ones(3, 4, dtype=torch.int8), scale=torch.ones(3))
    assert torch.equal(layer(torch.tensor([[1e-38, 0.0, 1e-39, 0.0], [0.0] * 4])), torch.zeros(2, 3))
