"""The expert kernel that needs nothing but torch: packed linears in one slot table, a loop over the active slots.

Row-invariant where the packed linears are (see `trimtab.kernels.linear`). torch's vectorised functions and their scalar
tails differ in the last bit, and so do its functions for contiguous tensors and for strided ones: activations of known
kinds see at least two rows, each a multiple of 32 wide. A custom function sees the plain rows, and is as invariant as
it makes itself.
"""

# T tokens  K top-k  P slots  H hidden size  I intermediate size  R rows (token-expert pairs) of one slot

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trimtab.experts.formats.base import ExpertShape, ExpertTensors
from trimtab.experts.formats.registry import find_format
from trimtab.experts.formats.slot_bytes import SlotBytes
from trimtab.experts.ports import PreparedSlot
from trimtab.kernels.checksum import checksum
from trimtab.kernels.linear import PackedLinear, pack_linear

# torch splits elementwise work between threads from this many elements on, wherever that falls inside a row.
_UNSPLIT_ELEMENTS = 32767
# Widest register that torch computes elementwise functions in, times its unrolling: rows of whole ones have no tail.
_WIDTH_MULTIPLE = 32
# Bounds the table of partial outputs [T * K, H]; longer batches go through in pieces, each row the same bits.
_PARTIAL_ELEMENTS = 1 << 26


@dataclass(slots=True)
class PackedExpert:
    """One slot's expert."""

    gate_up: PackedLinear
    down: PackedLinear


class PortableExpertKernel:
    """Sorts token-expert pairs by slot, multiplies slot by slot, then sums each token's K parts in k order."""

    name = "portable"

    def __init__(self, shape: ExpertShape, num_slots: int, storage: str | torch.dtype) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self._format = find_format(storage)
        self.format_name = self._format.name
        self._row = SlotBytes(self._format, shape)
        self.slot_nbytes = self._row.nbytes
        self.layout = f"tensors of {self._row.layout}"
        self._num_parts = 2 if shape.has_gate else 1
        self._padded_width = -(-shape.intermediate_size // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        # The only holder of slot objects: a commit that replaces an entry frees the old expert.
        self._slots: list[PackedExpert | None] = [None] * num_slots
        self._partial = torch.empty(0, dtype=torch.float32)

    def load_slot(self, slot: int, tensors: ExpertTensors) -> None:
        self._slots[slot] = _packed(self._format.encode(self.shape, tensors))

    def read_slot(self, slot: int) -> ExpertTensors:
        expert = self._expert(slot)
        return ExpertTensors(
            expert.gate_up.unpack(), expert.down.unpack(), expert.gate_up.unpack_bias(), expert.down.unpack_bias()
        )

    def export_slot(self, slot: int, out: Tensor) -> int:
        self._row.write(self._format.encode(self.shape, self.read_slot(slot)), out)
        return checksum(out)

    def prepare(self, data: Tensor) -> PreparedSlot:
        # Cloned: some storages keep the tensor that they are given.
        return _packed({name: tensor.clone() for name, tensor in self._row.read(data).items()})

    def install(self, slot: int, prepared: PreparedSlot) -> None:
        assert isinstance(prepared, PackedExpert), "not prepared by this kernel"
        self._slots[slot] = prepared

    def __call__(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        num_tokens, top_k = slot_ids.shape
        piece = max(1, _PARTIAL_ELEMENTS // (top_k * self.shape.hidden_size))
        if num_tokens <= piece:
            return self._sum_of_experts(hidden, slot_ids, gate_weights)
        pieces = zip(hidden.split(piece), slot_ids.split(piece), gate_weights.split(piece), strict=True)
        return torch.cat([self._sum_of_experts(*tensors) for tensors in pieces])

    def _sum_of_experts(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        num_tokens, top_k = slot_ids.shape
        outputs = self._partials(num_tokens * top_k)
        self._run_pairs(hidden, slot_ids.reshape(-1), top_k, outputs)
        out = torch.empty_like(hidden)
        self._sum_in_place(outputs.view(num_tokens, top_k, self.shape.hidden_size), slot_ids, gate_weights, out)
        return out

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        outputs = torch.empty(len(slot_ids), self.shape.hidden_size, dtype=torch.float32)
        self._run_pairs(rows, slot_ids, 1, outputs)
        return outputs

    def combine(self, outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
        self._sum_in_place(outputs.clone(), slot_ids, gate_weights, out)

    def _run_pairs(self, hidden: Tensor, slot_ids: Tensor, top_k: int, outputs: Tensor) -> None:
        """hidden [T, H], slot_ids [T * K] -> outputs [T * K, H] fp32; rows of dropped pairs are left as they are."""
        order = slot_ids.argsort(stable=True)
        tokens = order // top_k
        # Index 0 counts the dropped pairs; after the sort they come first.
        ends = torch.bincount(slot_ids + 1, minlength=self.num_slots + 1).cumsum(0).tolist()
        for slot, (start, end) in enumerate(pairwise(ends)):
            if start < end:
                rows = hidden.index_select(0, tokens[start:end])
                outputs.index_copy_(0, order[start:end], self._run_expert(self._expert(slot), rows))

    def _sum_in_place(self, outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
        """outputs [T, K, H], overwritten -> out [T, H]."""
        weights = gate_weights.to(torch.float32)
        dropped = slot_ids < 0
        if dropped.any():
            # What lies in a dropped pair's row is an earlier call's, possibly inf: a zero weight alone is not enough.
            outputs.masked_fill_(dropped[:, :, None], 0.0)
            weights = weights.masked_fill(dropped, 0.0)
        outputs.mul_(weights[:, :, None])
        total = outputs[:, 0].clone()
        for k in range(1, outputs.shape[1]):
            total += outputs[:, k]
        out.copy_(total)

    def _run_expert(self, expert: PackedExpert, rows: Tensor) -> Tensor:
        """rows [R, H] -> [R, H] fp32."""
        pre = expert.gate_up.multiply(rows.to(expert.gate_up.compute_dtype)).to(torch.float32)
        block = max(1, _UNSPLIT_ELEMENTS // (self._num_parts * self._padded_width))
        if len(pre) <= block:
            inner = self._activated(pre)
        else:
            inner = torch.cat([self._activated(part) for part in pre.split(block)])
        return expert.down.multiply(inner.to(expert.down.compute_dtype)).to(torch.float32)

    def _activated(self, pre: Tensor) -> Tensor:
        """pre [R, 2I] (gate, then up) or [R, I] -> [R, I], a row's bits the same for every R and at every position."""
        activation, width, num_rows = self.shape.activation, self.shape.intermediate_size, len(pre)
        if activation.kind == "custom" or (width == self._padded_width and num_rows > 1):
            return activation.function(pre)
        padded = pre.new_zeros(max(2, num_rows), self._num_parts, self._padded_width)
        padded[:num_rows, :, :width] = pre.view(num_rows, self._num_parts, width)
        return activation.function(padded.flatten(1))[:num_rows, :width]

    def _expert(self, slot: int) -> PackedExpert:
        expert = self._slots[slot]
        assert expert is not None, f"slot {slot} was never loaded"
        return expert

    def _partials(self, num_pairs: int) -> Tensor:
        """The reused workspace [num_pairs, H]: a fresh tensor of this size would cost its page faults every call."""
        size = num_pairs * self.shape.hidden_size
        if self._partial.numel() < size:
            self._partial = torch.empty(size, dtype=torch.float32)
        return self._partial[:size].view(num_pairs, self.shape.hidden_size)


def _packed(stored: Mapping[str, Tensor]) -> PackedExpert:
    return PackedExpert(
        pack_linear(stored["gate_up"], stored.get("gate_up_bias")),
        pack_linear(stored["down"], stored.get("down_bias")),
    )
