"""The story of one MoE layer: capture logical ids, look up slots, record load, compute."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.experts.data.capture import ExpertUsage
from trimtab.experts.data.dispatch.base import RankPlace
from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.load_recorder import SlotLoadRecorder
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
    """Keeps what it is given: stands in for capture."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[list[int]]]] = []

    def record(self, ordinal: int, ids: Tensor) -> None:
        self.seen.append((ordinal, ids.tolist()))


def tokens(num_tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(num_tokens, 4, generator=generator).argsort(dim=1)[:, :2]
    return torch.randn(num_tokens, 32, generator=generator), ids, torch.rand(num_tokens, 2, generator=generator)


def test_rule_02_experts_are_selected_once_and_compute_receives_slot_ids() -> None:
    """Capture sees the router's logical ids, the kernel slots, and nobody router logits."""
    placement = Placement(Topology(4, 1), [[3, 2, 1, 0, 3]])
    layer = make_layer(placement)
    capture, dispatched = Recorder(), Recorder()
    layer.capture = capture
    recorder = SlotLoadRecorder(placement, RankPlace())
    recorder.attach([layer])
    recorder.begin_step(True)
    run_experts = layer.dispatcher.run_experts

    def run(kernel: ExpertKernel, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        dispatched.record(0, slot_ids)
        return run_experts(kernel, hidden, slot_ids, gate_weights)

    layer.dispatcher.run_experts = run  # type: ignore[method-assign]
    layer.forward(torch.zeros(3, 32), torch.tensor([[0, 3], [3, -1], [-1, -1]]), torch.ones(3, 2))
    assert capture.seen == [(0, [[0, 3], [3, -1], [-1, -1]])]
    assert dispatched.seen == [(0, [[3, 4], [0, -1], [-1, -1]])], "expert 3 lives in slots 0 and 4"
    assert recorder.counts.tolist() == [[1, 0, 0, 1, 1]]


def test_outputs_do_not_depend_on_where_experts_live() -> None:
    """Bitwise: the sum over k is in k order, whatever the slots."""
    plain = make_layer(Placement.identity(Topology(4), 1)).forward(*tokens())
    for slots in ([3, 1, 0, 2], [2, 3, 1, 0]):
        assert torch.equal(make_layer(Placement(Topology(4), [slots])).forward(*tokens()), plain)
    replicated = make_layer(Placement(Topology(4, 4), [[0, 0, 1, 1, 2, 2, 3, 3]]))
    assert torch.equal(replicated.forward(*tokens()), plain)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_rule_13_a_layer_without_recorder_gives_the_same_bits(slots: list[int]) -> None:
    placement = Placement(Topology(4), [slots])
    bare, observed = make_layer(placement), make_layer(placement)
    observed.capture = Recorder()
    recorder = SlotLoadRecorder(placement, RankPlace())
    recorder.attach([observed])
    recorder.begin_step(True)
    assert torch.equal(bare.forward(*tokens()), observed.forward(*tokens()))
    assert recorder.counts.sum() == 12, "the other one counted"
    assert bare.look_up == bare.routing_table.look_up


def test_rule_13_off_means_absent_no_recorder_is_imported() -> None:
    check = (
        "import sys, trimtab.experts.data.moe_layer, trimtab.models.loading, trimtab.runner.model_runner\n"
        "found = [m for m in ('load_recorder', 'map_and_record') if f'trimtab.experts.data.{m}' in sys.modules]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def test_a_refresh_makes_the_layer_follow_its_row_of_the_placement() -> None:
    layer = make_layer(Placement(Topology(3), [[0, 1, 2], [2, 0, 1]]), 1)
    layer.refresh(Placement(Topology(3), [[0, 1, 2], [1, 2, 0]]))
    assert layer.look_up(torch.tensor([[0, 1], [2, -1]])).tolist() == [[2, 0], [1, -1]]


def test_b109_a_token_has_its_bits_alone_padded_among_others_and_in_any_step() -> None:
    """B109: whatever replica its position and step lead to, with load recorded."""
    placement = Placement(Topology(4, 5), [[3, 0, 1, 0, 2, 1, 0, 0, 3]])
    layer = make_layer(placement)
    recorder = SlotLoadRecorder(placement, RankPlace())
    recorder.attach([layer])
    hidden, chosen, gates = tokens(8)
    hidden, chosen, gates = hidden[:1].repeat(8, 1), chosen[:1].repeat(8, 1), gates[:1].repeat(8, 1)
    others = tokens(8)
    alone = layer.forward(hidden[:1], chosen[:1], gates[:1])
    slots_used = set()
    for step in range(3):
        recorder.begin_step(True)
        slots_used |= set(map(tuple, layer.look_up(chosen).tolist()))
        assert torch.equal(layer.forward(hidden, chosen, gates), alone.expand(8, -1))
        for position in range(8):
            for is_padded in (False, True):
                batch = [tensor.clone() for tensor in others]
                batch[1][:] = -1 if is_padded else batch[1]
                batch[0][position], batch[1][position], batch[2][position] = hidden[0], chosen[0], gates[0]
                assert torch.equal(layer.forward(*batch)[position], alone[0]), (step, position, is_padded)
    assert len(slots_used) > 1, "replicas took turns"


def test_rule_11_outputs_have_the_same_bits_at_every_step_between_commits() -> None:
    """Three layers in a row, committed one per step: old and new ones are mixed, and load is right throughout (B17)."""
    topology = Topology(4, 2)
    generator = np.random.default_rng(8)
    spread = np.array([0, 1, 2, 3, 0, 1])
    old = Placement(topology, [generator.permutation(spread) for _ in range(3)])
    new = Placement(topology, [generator.permutation(np.array([0, 1, 2, 3, 3, 3])) for _ in range(3)])
    layers = [make_layer(old, ordinal) for ordinal in range(3)]
    recorder = SlotLoadRecorder(old, RankPlace())
    recorder.attach(layers)
    hidden, chosen, gates = tokens(9)

    def forward() -> Tensor:
        recorder.begin_step(True)
        out = hidden
        for layer in layers:
            out = out + layer.forward(out, chosen, gates)
        return out

    expected = forward()
    load = [chosen.flatten().bincount(minlength=4).tolist()] * 3
    assert recorder.fold(old).tolist() == load
    placement, num_moved = old, 0
    for ordinal in range(3):
        kernel = layers[ordinal].kernel
        moves = np.flatnonzero(new.slot_to_expert[ordinal] != old.slot_to_expert[ordinal]).tolist()
        sources = [old.slots_of_expert(ordinal, int(new.slot_to_expert[ordinal, slot]))[0] for slot in moves]
        staged = dict(zip(moves, [kernel.read_slot(source) for source in sources], strict=True))
        looked_up = layers[ordinal].look_up(chosen).tolist()
        recorder.fold(placement)
        for slot, tensors in staged.items():
            kernel.load_slot(slot, tensors)
        placement = placement.with_layer(ordinal, new)
        layers[ordinal].refresh(placement)
        num_moved += len(staged)
        assert layers[ordinal].look_up(chosen).tolist() != looked_up
        recorder.fold(placement)
        assert torch.equal(forward(), expected)
        assert recorder.fold(placement).tolist() == load
    assert num_moved > 3 and placement == new
    # The control: a look-up that was not refreshed finds other experts.
    layers[0].routing_table.refresh(old, 0)
    assert not torch.equal(forward(), expected)


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
