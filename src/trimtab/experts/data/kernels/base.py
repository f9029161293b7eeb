"""The contract of an expert kernel: slots hold experts, a call computes the weighted sum of each token's experts."""

# T tokens  K top-k  N token-expert pairs  H hidden size

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from trimtab.experts.formats.base import ExpertTensors
from trimtab.experts.ports import SlotStorage


class ExpertKernel(SlotStorage, Protocol):
    """The experts of one MoE layer on one rank, one slot each.

    1. `load_slot` fills a slot (at loading, and again when a commit installs another expert there); the kernel keeps
       its own storage of the expert and no reference to the tensors it was given.
    2. `__call__` computes with what the slots hold now.
    3. `experts` and `combine` are `__call__` in two halves, for tokens whose experts live on several ranks: together
       they give bitwise the same result, wherever each row was computed.
    4. `read_slot` gives a slot's expert back in canonical layout.
    5. As `SlotStorage` it gives and takes slots in the form that it computes from: what moves is what it reads.

    Called on: the runner's thread, one call at a time, but for what `SlotStorage` says.
    """

    name: str
    format_name: str  # of the slots, as `find_format` knows it

    def load_slot(self, slot: int, tensors: ExpertTensors) -> None: ...

    def read_slot(self, slot: int) -> ExpertTensors: ...

    def __call__(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        """hidden [T, H], slot_ids [T, K] int64, gate_weights [T, K] -> [T, H] in hidden's dtype.

        An id of -1 contributes nothing. Gate weights multiply the experts' outputs and the K products are summed in
        fp32 in k order, then rounded once. The result is the caller's: a later call does not change it.
        """
        ...

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        """rows [N, H], slot_ids [N] int64, none negative -> [N, H] fp32: each row's expert, without a gate weight."""
        ...

    def combine(self, outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
        """outputs [T, K, H] fp32 of `experts`, slot_ids [T, K], gate_weights [T, K] -> written to out [T, H].

        Of slot ids only the sign is read: where negative, `outputs` may hold anything.
        """
        ...


class InPlaceExperts(Protocol):
    """A kernel that reads rows and writes outputs where they lie, so that ranks need not copy what they share."""

    in_place_dtypes: frozenset[torch.dtype]

    def experts_in_place(
        self, dtype: torch.dtype, row_addresses: Tensor, slot_ids: Tensor, output_addresses: Tensor
    ) -> None:
        """As `ExpertKernel.experts`, of rows in `dtype`; addresses [N] int64, each of H values (outputs: fp32)."""
        ...


def in_place_experts(kernel: ExpertKernel, dtype: torch.dtype) -> InPlaceExperts | None:
    """The kernel as one that reads rows of `dtype` where they lie, or None where it does not."""
    # Not isinstance with a runtime protocol: that takes longer than a whole exchange.
    return cast(InPlaceExperts, kernel) if dtype in getattr(kernel, "in_place_dtypes", ()) else None
