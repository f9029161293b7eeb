"""The story of one MoE layer: capture logical ids, look up slots, record load, compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trimtab.experts.data.capture import ExpertUsage
from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.data.moe_layer import MoELayer
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.formats.base import ExpertShape, ExpertTensors, make_activation
from trimtab.experts.placement import Placement, Topology

SHAPE = ExpertShape(32, 32, True, False, make_activation("silu"))


def expert(number: int) -> ExpertTensors:
    generator = torch.Generator().manual_seed(number)
    return ExpertTensors(torch.randn(64, 32, generator=generator) / 6, torch.randn(32, 32, generator=generator) / 6)


def make_layer(placement: Placement, layer: int = 0) -> MoELayer:
    topology = placement.topology
    kernel = make_expert_kernel(SHAPE, topology.num_slots, torch.float32)
    for slot, number in enumerate(placement.slot_to_expert[layer]):
        kernel.load_slot(slot, expert(int(number)))
    return MoELayer(layer, layer + 3, topology.num_experts, 2, SHAPE, kernel, RoutingTable(placement, layer))


class Recorder:
    """Keeps what it is given: stands in for capture and for the load recorder."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[list[int]]]] = []

    def record(self, ordinal: int, ids: Tensor) -> None:
        self.seen.append((ordinal, ids.tolist()))


def tokens(num_tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(num_tokens, 4, generator=generator).argsort(dim=1)[:, :2]
    return torch.randn(num_tokens, 32, generator=generator), ids, torch.rand(num_tokens, 2, generator=generator)


def test_capture_sees_experts_and_the_load_recorder_sees_slots() -> None:
    layer = make_layer(Placement(Topology(4, 1), [[3, 2, 1, 0, 3]]))
    capture, load = Recorder(), Recorder()
    layer.capture, layer.load_recorder = capture, load
    layer.forward(torch.zeros(3, 32), torch.tensor([[0, 3], [3, -1], [-1, -1]]), torch.ones(3, 2))
    assert capture.seen == [(0, [[0, 3], [3, -1], [-1, -1]])]
    assert load.seen == [(0, [[3, 0], [4, -1], [-1, -1]])]


def test_outputs_do_not_depend_on_where_experts_live() -> None:
    """Bitwise: the sum over k is in k order, whatever the slots."""
    plain = make_layer(Placement.identity(Topology(4), 1)).forward(*tokens())
    for slots in ([3, 1, 0, 2], [2, 3, 1, 0]):
        assert torch.equal(make_layer(Placement(Topology(4), [slots])).forward(*tokens()), plain)
    replicated = make_layer(Placement(Topology(4, 4), [[0, 0, 1, 1, 2, 2, 3, 3]]))
    assert torch.equal(replicated.forward(*tokens()), plain)


def test_a_layer_without_recorders_gives_the_same_bits() -> None:
    """Rule 13: off means absent."""
    bare, observed = (make_layer(Placement.identity(Topology(4), 1)) for _ in range(2))
    observed.capture, observed.load_recorder = Recorder(), Recorder()
    assert torch.equal(bare.forward(*tokens()), observed.forward(*tokens()))


def test_no_tokens_pass_through_the_whole_story() -> None:
    """An idle rank calls each layer with zero rows."""
    layer = make_layer(Placement(Topology(4, 1), [[3, 2, 1, 0, 3]]))
    out = layer.forward(torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert out.shape == (0, 32)


def test_usage_counts_tokens_per_layer_and_expert_while_attached() -> None:
    placement = Placement.identity(Topology(4), 2)
    layers = [make_layer(placement, layer) for layer in range(2)]
    usage = ExpertUsage(num_layers=2, num_experts=4)
    ids = torch.tensor([[0, 3], [3, 1], [-1, -1]])
    usage.attach(layers)
    for layer in layers[1:]:
        layer.forward(torch.zeros(3, 32), ids, torch.ones(3, 2))
    usage.detach(layers)
    layers[0].forward(torch.zeros(3, 32), ids, torch.ones(3, 2))
    assert usage.counts.tolist() == [[0, 0, 0, 0], [1, 1, 0, 2]], "padding tokens do not count as load"
    usage.reset()
    assert usage.counts.sum() == 0


def test_usage_hands_back_the_capture_it_replaced() -> None:
    layer = make_layer(Placement.identity(Topology(4), 1))
    capture = layer.capture = Recorder()
    usage = ExpertUsage(1, 4)
    usage.attach([layer])
    layer.forward(*tokens())
    usage.detach([layer])
    assert layer.capture is capture
    assert len(capture.seen) == 1, "what was there before still sees everything"


def test_a_device_without_kernels_and_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device \(cuda\) must be 'cpu'"):
        make_expert_kernel(SHAPE, 2, torch.float32, "cuda")
    with pytest.raises(ValueError, match=r"expert format \('float64'\) must be one of bfloat16, float16, float32"):
        make_expert_kernel(SHAPE, 2, torch.float64)
