"""One MoE layer after its router has chosen: the data room's story, the same in every worker."""

# T tokens  K top-k  H hidden size

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.experts.data.capture import Capture, NoCapture
from trimtab.experts.data.dispatch.base import Dispatcher
from trimtab.experts.data.dispatch.local import LocalDispatcher
from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.formats.base import ExpertShape
from trimtab.experts.placement import Placement


class MoELayer:
    """Experts of one layer: `ordinal` counts MoE layers from 0, `layer_id` is the decoder layer it sits in."""

    def __init__(
        self,
        ordinal: int,
        layer_id: int,
        num_experts: int,
        top_k: int,
        shape: ExpertShape,
        kernel: ExpertKernel,
        routing_table: RoutingTable,
        dispatcher: Dispatcher | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.ordinal = ordinal
        self.layer_id = layer_id
        self.num_experts = num_experts
        self.top_k = top_k
        self.shape = shape
        self.kernel = kernel
        self.routing_table = routing_table
        self.dispatcher = dispatcher or LocalDispatcher()
        self.capture = capture or NoCapture()
        # Where load is recorded, the recorder puts a look-up here that counts what it maps.
        self.look_up: Callable[[Tensor], Tensor] = routing_table.look_up

    def forward(self, hidden: Tensor, expert_ids: Tensor, gate_weights: Tensor) -> Tensor:
        """hidden [T, H], expert_ids [T, K] int64, gate_weights [T, K] -> [T, H]; ids of -1 contribute nothing (B20)."""
        self.capture.record(self.ordinal, expert_ids)
        slot_ids = self.look_up(expert_ids)
        return self.dispatcher.run_experts(self.kernel, hidden, slot_ids, gate_weights)

    __call__ = forward

    def refresh(self, placement: Placement) -> None:
        """The look-up follows this layer of `placement` from the next forward on; the kernel's slots must hold it by
        then. Called on: the runner's thread, between forwards."""
        self.routing_table.refresh(placement, self.ordinal)

    def forward_idle(self) -> None:
        """This rank's part in the layer while it has no tokens of its own: others may have some for its experts."""
        hidden = torch.empty(0, self.shape.hidden_size)
        slot_ids = torch.empty(0, self.top_k, dtype=torch.int64)
        self.dispatcher.run_experts(self.kernel, hidden, slot_ids, torch.empty(0, self.top_k))
