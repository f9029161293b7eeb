"""One rank holds every slot: nothing travels."""

from __future__ import annotations

from torch import Tensor

from trimtab.experts.data.dispatch.base import CollectiveLog, DispatchTimes, NoCollectiveLog, RankPlace
from trimtab.experts.data.kernels.base import ExpertKernel


class LocalDispatcher:
    """The kernel's own sum over k is already the token's whole sum: one fused call."""

    name = "local"

    def __init__(self) -> None:
        self.place = RankPlace()
        self.times = DispatchTimes()
        self.log: CollectiveLog = NoCollectiveLog()

    def run_experts(self, kernel: ExpertKernel, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        return kernel(hidden, slot_ids, gate_weights)

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None
