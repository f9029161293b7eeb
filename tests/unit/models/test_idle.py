"""An idle rank takes part in every MoE layer, in order, and in nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.experts.data.dispatch.local import LocalDispatcher
from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.data.moe_layer import MoELayer
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.formats.base import ExpertShape, make_activation
from trimtab.experts.placement import Placement, Topology
from trimtab.models.language_model import LanguageModel


class Watched(LocalDispatcher):
    """Notes the layers' calls by the number of experts a token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, ...]] = []

    def run_experts(self, kernel: Any, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        self.calls.append((*hidden.shape, *slot_ids.shape, *gate_weights.shape))
        return super().run_experts(kernel, hidden, slot_ids, gate_weights)


class Refusing:
    def record(self, ordinal: int, ids: Tensor) -> None:
        raise AssertionError("an idle rank has nothing to capture")


def refuse(ids: Tensor) -> Tensor:
    raise AssertionError("an idle rank has no load")


def test_an_idle_step_calls_each_layer_once_in_order_with_no_rows_and_no_network() -> None:
    shape = ExpertShape(32, 32, True, False, make_activation("silu"))
    dispatcher, layers = Watched(), []
    for ordinal, top_k in enumerate((1, 3, 2)):
        layer = MoELayer(
            ordinal, ordinal, 4, top_k, shape, make_expert_kernel(shape, 4, torch.float32),
            RoutingTable(Placement.identity(Topology(4), 3), ordinal), dispatcher, Refusing(),
        )  # fmt: skip
        layer.look_up = refuse
        layers.append(layer)
    model = LanguageModel(None, None, layers)  # type: ignore[arg-type]
    model.forward_idle()
    assert dispatcher.calls == [(0, 32, 0, top_k, 0, top_k) for top_k in (1, 3, 2)]
