"""The contract of an expert kernel: slots hold experts, a call computes the weighted sum of each token's experts."""

# T tokens  K top-k  H hidden size

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trimtab.experts.formats.base import ExpertTensors


class ExpertKernel(Protocol):
    """The experts of one MoE layer on one rank, one slot each.

    1. `load_slot` fills a slot (at loading, and again when a commit installs another expert there); the kernel keeps
       its own storage of the expert and no reference to the tensors it was given.
    2. `__call__` computes with what the slots hold now.
    3. `read_slot` gives a slot's expert back in canonical layout.

    Called on: the runner's thread, one call at a time.
    """

    name: str
    num_slots: int
    slot_bytes: int  # of one expert's values; a layout may add some padding

    def load_slot(self, slot: int, tensors: ExpertTensors) -> None: ...

    def read_slot(self, slot: int) -> ExpertTensors: ...

    def __call__(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        """hidden [T, H], slot_ids [T, K] int64, gate_weights [T, K] -> [T, H] in hidden's dtype.

        An id of -1 contributes nothing. Gate weights multiply the experts' outputs and the K products are summed in
        fp32 in k order, then rounded once. The result is the caller's: a later call does not change it.
        """
        ...
