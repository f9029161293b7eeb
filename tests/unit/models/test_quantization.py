"""Experts stored in another format than the checkpoint's: what a spec says of them, and what is refused."""

import pytest
import torch

from trimtab.kernels.native.library import Format, native_kernels
from trimtab.models.loading import load_model
from trimtab.models.spec import read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint

needs_int8 = pytest.mark.skipif(not native_kernels().supports(Format.INT8), reason="no native int8 kernel here")


@needs_int8
def test_int8_experts_take_a_byte_per_weight_and_four_per_row(tmp_path) -> None:
    path = make_tiny_checkpoint(tmp_path, dtype="bfloat16", hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    plain, stored = read_spec(path), read_spec(path, quantization="int8")
    assert plain.num_expert_bytes == 2 * 8 * 3 * 64 * 96 * 2
    assert stored.num_expert_bytes == 2 * 8 * (3 * 64 * 96 + 4 * (2 * 96 + 64))
    assert stored.num_dense_bytes == plain.num_dense_bytes


@needs_int8
def test_int8_experts_compute_what_their_rounded_weights_say(tmp_path) -> None:
    """Against the same layer over dequantized weights in float32: what remains is the activations' rounding, 1 in 127
    per value and so a few percent of the output's size at most."""
    path = make_tiny_checkpoint(tmp_path, dtype="bfloat16")
    layer = load_model(read_spec(path, quantization="int8")).moe_layers[0]
    assert layer.kernel.slot_nbytes < load_model(read_spec(path)).moe_layers[0].kernel.slot_nbytes
    torch.manual_seed(0)
    hidden = torch.randn(40, 64)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(40)])
    weights = torch.rand(40, 2)
    expected = torch.zeros(40, 64)
    for expert in range(8):
        tensors = layer.kernel.read_slot(expert)
        gate, up = (hidden @ tensors.gate_up.float().T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ tensors.down.float().T
        expected += out * (weights * (ids == expert)).sum(-1, keepdim=True)
    error = (layer.forward(hidden, ids, weights) - expected).norm() / expected.norm()
    assert 0 < error < 0.03


def test_an_unknown_quantization_is_refused_before_weights_are_read(tmp_path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"quantization \('int3'\) must be one of int8"):
        read_spec(path, quantization="int3")
