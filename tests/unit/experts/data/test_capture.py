"""Capture in a worker: rows of one step, bound to every routed layer, cloned before the next step overwrites them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.experts.data.capture import ExpertUsage, NoCapture, NoCapturer
from trimtab.experts.data.capturer import (
    RoutedExpertsCapturer,
    RoutedExpertsRecord,
    bind_routed_experts_capturer,
    get_routed_experts_attn_gid,
)
from trimtab.experts.routed_experts import RoutedExpertsLayout, routed_experts_layout
from trimtab.plan import StepOutput
from trimtab.testing.scheduling import make_kv_cache

LAYOUT = RoutedExpertsLayout((1, 4), 8, 2)
KV_CACHE = make_kv_cache(windows=(8, None))


@dataclass
class Kernel:
    routes_inside: bool = False


class Layer:
    """A routed layer as the binding sees it."""

    def __init__(self, ordinal: int, layer_id: int, **changed: Any) -> None:
        self.ordinal, self.layer_id, self.num_experts, self.top_k = ordinal, layer_id, 8, 2
        self.capture: Any = NoCapture()
        self.kernel = Kernel()
        self.__dict__.update(changed)


@dataclass
class Model:
    moe_layers: list[Any]


def make_model() -> Model:
    return Model([Layer(0, 1), Layer(1, 4)])


def make_capturer(layout: RoutedExpertsLayout = LAYOUT) -> RoutedExpertsCapturer:
    return RoutedExpertsCapturer(6, layout, KV_CACHE)


def ids(*rows: tuple[int, int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


SLOTS = {0: torch.tensor([90, 91, 92]), 1: torch.tensor([7, 8, 12])}


def run_step(model: Model, expert_ids: Tensor) -> None:
    for layer in model.moe_layers:
        layer.capture.record(layer.ordinal, (expert_ids + layer.ordinal) % 8)


def output_of(record: RoutedExpertsRecord, rows: int = 1) -> StepOutput:
    output = StepOutput(0)
    record.to("cpu").report(np.arange(rows), output)
    return output


def test_every_layer_is_bound_and_writes_its_own_column() -> None:
    model, capturer = make_model(), make_capturer()
    bind_routed_experts_capturer(model, capturer)
    assert capturer.layer_ids == (1, 4) and capturer.buffer.dtype == torch.int32
    assert tuple(capturer.buffer.shape) == (6, 2, 2)
    run_step(model, ids((5, 0), (1, 7), (3, 2)))
    routed = output_of(capturer.get_routed_experts(SLOTS, 3)).routed_experts
    assert routed is not None and routed.experts.dtype == np.uint8
    assert routed.experts.tolist() == [[[5, 0], [6, 1]], [[1, 7], [2, 0]], [[3, 2], [4, 3]]]
    assert routed.slot_mapping.tolist() == [7, 8, 12], "of the group with full attention, not the first one"


def test_shorter_steps_leave_nothing_of_longer_ones_in_their_rows() -> None:
    model, capturer = make_model(), make_capturer()
    bind_routed_experts_capturer(model, capturer)
    for count in (3, 1, 2):
        run_step(model, ids((5, 0), (1, 7), (3, 2))[:count])
        slots = {gid: slots[:count] for gid, slots in SLOTS.items()}
        routed = output_of(capturer.get_routed_experts(slots, count)).routed_experts
        assert routed is not None and routed.experts.shape == (count, 2, 2) and len(routed.slot_mapping) == count


def test_a_record_stays_as_it_is_while_the_next_step_overwrites_the_buffers() -> None:
    """The host copy may be in flight; negative control: a record without clones shows the next step's rows."""

    class Sharing(RoutedExpertsCapturer):
        def get_routed_experts(self, slot_mappings: Any, num_tokens: int) -> RoutedExpertsRecord:
            record = super().get_routed_experts(slot_mappings, num_tokens)
            return replace(record, experts=self.buffer[:num_tokens], slot_mapping=slot_mappings[self.gid])

    def rows_taken_late(capturer: RoutedExpertsCapturer) -> tuple[Any, Any]:
        model, slots = make_model(), {1: torch.tensor([3, 4])}
        bind_routed_experts_capturer(model, capturer)
        run_step(model, ids((0, 1), (2, 3)))
        record = capturer.get_routed_experts(slots, 2)
        slots[1].fill_(0)
        run_step(model, ids((7, 7), (7, 7)))  # before the copy to the host is made
        routed = output_of(record).routed_experts
        assert routed is not None
        return routed.experts[:, 0].tolist(), routed.slot_mapping.tolist()

    assert rows_taken_late(make_capturer()) == ([[0, 1], [2, 3]], [3, 4])
    assert rows_taken_late(Sharing(6, LAYOUT, KV_CACHE)) == ([[7, 7], [7, 7]], [0, 0])


@pytest.mark.parametrize("fault", ["missing", "short", "twice", "after a whole step"])
def test_a_layer_that_did_not_write_the_steps_rows_fails_its_requests(fault: str) -> None:
    """B61: rows of an earlier step, or of nobody, never pass for this one's; the next step is whole again."""
    model, capturer = make_model(), make_capturer()
    bind_routed_experts_capturer(model, capturer)
    chosen = ids((5, 0), (1, 7), (3, 2))
    if fault == "after a whole step":
        run_step(model, chosen)
        assert output_of(capturer.get_routed_experts(SLOTS, 3)).routed_experts is not None
    first, second = model.moe_layers
    first.capture.record(0, chosen)
    if fault == "short":
        second.capture.record(1, chosen[:2])
    if fault == "twice":
        second.capture.record(1, chosen)
        second.capture.record(1, chosen)
    output = output_of(capturer.get_routed_experts(SLOTS, 3), rows=2)
    assert output.routed_experts is None
    assert output.failures.keys() == {0, 1}
    assert "layers [4] did not write each of the step's 3 rows once" in output.failures[0]
    run_step(model, chosen)
    assert output_of(capturer.get_routed_experts(SLOTS, 3)).routed_experts is not None


@pytest.mark.parametrize(("num_experts", "bad"), [(8, 8), (8, -1), (256, -1), (256, 256), (300, 300)])
def test_ids_that_name_no_expert_fail_before_they_are_narrowed(num_experts: int, bad: int) -> None:
    """B76: -1 would become 255, which is a real expert's id among 256."""
    model, capturer = make_model(), make_capturer(RoutedExpertsLayout((1, 4), num_experts, 2))
    bind_routed_experts_capturer(model, capturer)
    for layer in model.moe_layers:
        layer.capture.record(layer.ordinal, ids((0, num_experts - 1)))
    good = output_of(capturer.get_routed_experts({1: torch.tensor([7])}, 1)).routed_experts
    assert good is not None and good.experts[0, 0].tolist() == [0, num_experts - 1]
    assert good.experts.itemsize == (1 if num_experts <= 256 else 2)
    for layer in model.moe_layers:
        layer.capture.record(layer.ordinal, ids((0, bad)))
    output = output_of(capturer.get_routed_experts({1: torch.tensor([7])}, 1))
    assert output.routed_experts is None and f"{bad}" in output.failures[0]


@pytest.mark.parametrize(
    ("layers", "error", "match"),
    [
        ([], ValueError, r"no layer is bound for MoE layers \[0, 1\]"),
        ([Layer(0, 1)], ValueError, r"no layer is bound for MoE layers \[1\]"),
        ([Layer(0, 1), Layer(2, 4)], IndexError, r"layer 4 \(Layer\) is MoE layer 2, not in \[0, 1\]"),
        ([Layer(-1, 1), Layer(1, 4)], IndexError, "is MoE layer -1"),
        ([Layer(0, 1), Layer(1, 4, kernel=Kernel(routes_inside=True))], ValueError, "Kernel, chooses experts itself"),
        ([Layer(0, 1), object()], ValueError, r"layer \? \(object\) shows nobody which experts"),
    ],
)
def test_a_layer_that_cannot_be_captured_is_refused_and_nothing_is_bound(
    layers: list[Any], error: type[Exception], match: str
) -> None:
    """B61: a kernel that routes inside bypasses the hook."""
    with pytest.raises(error, match=match):
        bind_routed_experts_capturer(Model(layers), make_capturer())
    assert not any(isinstance(getattr(layer, "capture", None), RoutedExpertsCapturer) for layer in layers)


@pytest.mark.parametrize("ordinal", [2, -1])
def test_a_layer_outside_the_layout_raises_and_writes_nowhere(ordinal: int) -> None:
    with pytest.raises(IndexError):
        make_capturer().record(ordinal, ids((1, 2)))


def test_two_models_of_one_process_do_not_mix() -> None:
    """B62, B64: a draft model with equal layer ids, or another engine; nothing is process-wide."""
    model, other = make_model(), make_model()
    capturer, others = make_capturer(), make_capturer()
    bind_routed_experts_capturer(model, capturer)
    run_step(other, ids((6, 6), (6, 6), (6, 6)))  # a draft model is never bound: it shows nobody
    bind_routed_experts_capturer(other, others)
    run_step(model, ids((1, 2), (1, 2), (1, 2)))
    run_step(other, ids((3, 4)))
    mine = output_of(capturer.get_routed_experts(SLOTS, 3)).routed_experts
    theirs = output_of(others.get_routed_experts({1: torch.tensor([0])}, 1)).routed_experts
    assert mine is not None and mine.experts[:, 0].tolist() == [[1, 2]] * 3
    assert theirs is not None and theirs.experts[:, 0].tolist() == [[3, 4]]


def test_expert_usage_sees_the_same_ids_beside_the_capturer() -> None:
    model, capturer = make_model(), make_capturer()
    bind_routed_experts_capturer(model, capturer)
    usage = ExpertUsage(2, 8)
    usage.attach(model.moe_layers)
    run_step(model, ids((5, 0), (1, 7), (3, 2)))
    usage.detach(model.moe_layers)
    assert output_of(capturer.get_routed_experts(SLOTS, 3)).routed_experts is not None
    assert usage.counts.sum().item() == 12
    assert all(layer.capture is capturer for layer in model.moe_layers)


def test_the_layout_is_that_of_all_layers_and_refuses_what_has_no_common_form() -> None:
    layout = routed_experts_layout([Layer(0, 1), Layer(1, 4, num_experts=300)])
    assert layout == RoutedExpertsLayout((1, 4), 300, 2) and layout.row_bytes == 8
    with pytest.raises(ValueError, match=r"\[2, 4\] \(layer: experts per token: 1: 2, 4: 4\)"):
        routed_experts_layout([Layer(0, 1), Layer(1, 4, top_k=4)])
    with pytest.raises(ValueError, match="this one has none"):
        routed_experts_layout([])
    with pytest.raises(ValueError, match="below 65536; this model has 65537"):
        routed_experts_layout([Layer(0, 1, num_experts=65537)])


def test_worker_and_engine_share_the_choice_of_the_kv_group() -> None:
    """B63."""
    assert make_capturer().gid == get_routed_experts_attn_gid(KV_CACHE) == 1
    with pytest.raises(ValueError, match="needs a layer with full attention"):
        RoutedExpertsCapturer(6, LAYOUT, make_kv_cache(windows=(8,)))


def test_off_means_absent() -> None:
    """Neither worker nor engine imports the rooms of a capture that nobody asked for."""
    assert NoCapturer().get_routed_experts({}, 0) is None
    names = ("trimtab.experts.data.capturer", "trimtab.engine.routed_experts")
    code = f"import sys, trimtab.llm, trimtab.ranks; print([name for name in sys.modules if name in {names}])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
