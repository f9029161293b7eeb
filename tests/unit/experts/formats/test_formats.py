"""What makes up one expert is declared by its format, and an undeclared format is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trimtab.experts.formats.base import Activation, ExpertShape, ExpertTensors, expert_nbytes, make_activation
from trimtab.experts.formats.dense import DenseFormat
from trimtab.experts.formats.registry import find_format, register_format

PLAIN = ExpertShape(6, 4, True, False, make_activation("silu"))
BIASED = ExpertShape(6, 4, False, True, make_activation("relu", has_gate=False))


def complete(shape: ExpertShape) -> ExpertTensors:
    biases = (torch.randn(shape.gate_up_size), torch.randn(shape.hidden_size)) if shape.has_bias else ()
    rows, hidden, inner = shape.gate_up_size, shape.hidden_size, shape.intermediate_size
    return ExpertTensors(torch.randn(rows, hidden), torch.randn(hidden, inner), *biases)


def test_a_dense_format_names_the_tensors_of_one_expert_in_a_fixed_order() -> None:
    specs = find_format(torch.bfloat16).specs(BIASED)
    assert [(name, spec.shape) for name, spec in specs.items()] == [
        ("gate_up", (4, 6)),
        ("down", (6, 4)),
        ("gate_up_bias", (4,)),
        ("down_bias", (6,)),
    ]
    assert list(find_format("float32").specs(PLAIN)) == ["gate_up", "down"]
    assert find_format("float32").specs(PLAIN)["gate_up"].shape == (8, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [PLAIN, BIASED])
def test_encoding_and_decoding_give_the_expert_back(dtype: torch.dtype, shape: ExpertShape) -> None:
    chosen = find_format(dtype)
    source = complete(shape)
    stored = chosen.encode(shape, source)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in chosen.specs(shape).items()
    }
    assert expert_nbytes(chosen, shape) == sum(tensor.nbytes for tensor in stored.values())
    assert expert_nbytes(chosen, shape) == shape.num_parameters * dtype.itemsize
    decoded = chosen.decode(shape, stored).tensors()
    assert all(torch.equal(decoded[name], tensor.to(dtype)) for name, tensor in source.tensors().items())


def test_half_an_expert_is_refused_by_the_missing_tensors_name() -> None:
    chosen = find_format("float32")
    stored = chosen.encode(BIASED, complete(BIASED))
    del stored["gate_up_bias"]
    with pytest.raises(ValueError, match=r"gate_up_bias \(shape None\) must have shape \(4,\)"):
        chosen.decode(BIASED, stored)
    with pytest.raises(ValueError, match=r"down_bias \(shape \(6,\)\) must have shape None"):
        chosen.encode(PLAIN, ExpertTensors(torch.zeros(8, 6), torch.zeros(6, 4), None, torch.zeros(6)))


def test_unknown_formats_are_refused_and_names_are_unique() -> None:
    with pytest.raises(ValueError, match=r"expert format \('mxfp4'\) must be one of bfloat16, float16, float32"):
        find_format("mxfp4")
    register_format(DenseFormat("float32", torch.float32))
    with pytest.raises(ValueError, match=r"expert format name \('float32'\) is taken"):
        register_format(DenseFormat("float32", torch.bfloat16))


def test_activations_are_their_formulas() -> None:
    pre = torch.tensor([[-9.0, 0.5, 9.0, 2.0, -8.0, 8.0]])
    gate, up = pre[:, :3], pre[:, 3:]
    formulas = {
        "silu": gate * torch.sigmoid(gate) * up,
        "gelu": 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up,
        "gelu_tanh": F.gelu(gate, approximate="tanh") * up,
        "relu": gate.clamp(min=0) * up,
        "relu2": gate.clamp(min=0) ** 2 * up,
    }
    for kind, expected in formulas.items():
        torch.testing.assert_close(make_activation(kind).function(pre), expected)
        without_gate = make_activation(kind, has_gate=False).function(pre)
        assert without_gate.shape == pre.shape


def test_the_clamped_swiglu_limits_the_gate_above_and_the_other_half_on_both_sides() -> None:
    pre = torch.tensor([[-9.0, 0.5, 9.0, 2.0, -8.0, 8.0]])
    gate, up = torch.tensor([[-9.0, 0.5, 7.0]]), torch.tensor([[2.0, -7.0, 7.0]])
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(make_activation("swiglu_clamped").function(pre), expected)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"activation kind \('tanh'\)"):
        make_activation("tanh")
    with pytest.raises(ValueError, match=r"activation kind \('tanh'\)"):
        Activation("tanh", torch.tanh)
    with pytest.raises(ValueError, match=r"needs experts with a gate"):
        make_activation("swiglu_clamped", has_gate=False)
