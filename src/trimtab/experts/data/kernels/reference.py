"""The mathematics of an expert layer in plain torch: what every kernel must equal."""

# T tokens  K top-k  H hidden size

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.experts.formats.base import ExpertShape, ExpertTensors
from trimtab.experts.formats.registry import find_format
from trimtab.experts.formats.slot_bytes import SlotBytes
from trimtab.experts.ports import PreparedSlot
from trimtab.kernels.checksum import checksum


class ReferenceExpertKernel:
    """Computes each slot's rows in fp32 from what `storage` (a dtype, or a format's name) keeps of the weights.

    Slow and obvious; not for serving. Any registered format will do.
    """

    name = "reference"

    def __init__(self, shape: ExpertShape, num_slots: int, storage: str | torch.dtype) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self._format = find_format(storage)
        self.format_name = self._format.name
        self._row = SlotBytes(self._format, shape)
        self.slot_nbytes = self._row.nbytes
        self.layout = f"tensors of {self._row.layout}"
        self._slots: list[dict[str, Tensor] | None] = [None] * num_slots

    def load_slot(self, slot: int, tensors: ExpertTensors) -> None:
        stored = self._format.encode(self.shape, tensors)
        self._slots[slot] = {name: tensor.clone() for name, tensor in stored.items()}

    def read_slot(self, slot: int) -> ExpertTensors:
        return self._format.decode(self.shape, self._stored(slot))

    def export_slot(self, slot: int, out: Tensor) -> int:
        self._row.write(self._stored(slot), out)
        return checksum(out)

    def prepare(self, data: Tensor) -> PreparedSlot:
        return {name: tensor.clone() for name, tensor in self._row.read(data).items()}

    def install(self, slot: int, prepared: PreparedSlot) -> None:
        assert isinstance(prepared, dict), "not prepared by this kernel"
        self._slots[slot] = prepared

    def _stored(self, slot: int) -> dict[str, Tensor]:
        stored = self._slots[slot]
        assert stored is not None, f"slot {slot} was never loaded"
        return stored

    def __call__(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        tokens, k = (slot_ids >= 0).nonzero(as_tuple=True)
        outputs = torch.zeros(*slot_ids.shape, hidden.shape[1], dtype=torch.float32)
        outputs[tokens, k] = self.experts(hidden[tokens], slot_ids[tokens, k])
        out = torch.empty_like(hidden)
        self.combine(outputs, slot_ids, gate_weights, out)
        return out

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        out = torch.empty(rows.shape, dtype=torch.float32)
        for slot in slot_ids.unique().tolist():
            chosen = slot_ids == slot
            expert = self.read_slot(slot)
            pre = _linear(rows[chosen], expert.gate_up, expert.gate_up_bias)
            out[chosen] = _linear(self.shape.activation.function(pre), expert.down, expert.down_bias)
        return out

    def combine(self, outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
        total = torch.zeros(out.shape, dtype=torch.float32)
        for k in range(slot_ids.shape[1]):
            chosen = slot_ids[:, k] >= 0
            total[chosen] += gate_weights[chosen, k, None].float() * outputs[chosen, k]
        out.copy_(total)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
