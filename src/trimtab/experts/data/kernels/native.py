"""The expert kernel of the native core: plain packed slots, one fused call per layer.

A slot is contiguous, self-contained bytes that the kernel reads as they lie: what a balancer moves. Row-invariant for
every shape. Stores fp32, bf16 and int8; activations of any of the known kinds.
"""

# T tokens  K top-k  P slots  H hidden size

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.experts.formats.base import ExpertShape, ExpertTensors
from trimtab.experts.formats.registry import find_format
from trimtab.experts.ports import Loan, PreparedSlot
from trimtab.kernels.native import exchange
from trimtab.kernels.native.library import SCALARS, Format, native_kernels
from trimtab.kernels.native.moe import ACTIVATIONS, MoeShape, MoeWeights, NativeMoe, slot_nbytes

SLOT_VERSION = 1  # changes with the layout in csrc/layout.hpp
_FORMATS = {"float32": Format.FP32, "bfloat16": Format.BF16, "int8": Format.INT8}


def native_refusal(shape: ExpertShape, storage: str | torch.dtype) -> str | None:
    """Why the native kernel cannot hold experts of this shape in this format, or None when it can."""
    name = find_format(storage).name
    if name not in _FORMATS:
        return f"no native kernel stores {name}"
    if shape.activation.kind not in ACTIVATIONS:
        return f"no native kernel knows activation kind {shape.activation.kind!r}"
    kernels = native_kernels()
    if not kernels.supports(_FORMATS[name]):
        return "; ".join(f"{choice.name}: {choice.reason}" for choice in kernels.choices)
    return exchange.exchange_refusal()


class NativeExpertKernel:
    """`storage` names the format of the slots ("int8") or is the dtype that they keep."""

    name = "native"
    in_place_dtypes = frozenset(SCALARS)

    def __init__(self, shape: ExpertShape, num_slots: int, storage: str | torch.dtype) -> None:
        assert (refusal := native_refusal(shape, storage)) is None, refusal
        self.shape = shape
        self.num_slots = num_slots
        self._format = find_format(storage)
        self.format_name = self._format.name
        self._layer = NativeMoe(native_kernels(), _native_shape(shape), num_slots, _FORMATS[self.format_name])
        self.slot_nbytes = self._layer.slot_bytes
        self.layout = (
            f"native slots, version {SLOT_VERSION}: {self.format_name}, hidden {shape.hidden_size}, intermediate "
            f"{shape.intermediate_size}, {'with' if shape.has_gate else 'without'} gate"
        )

    def load_slot(self, slot: int, tensors: ExpertTensors) -> None:
        stored = self._format.encode(self.shape, tensors)
        self._layer.pack(slot, MoeWeights(**stored))

    def read_slot(self, slot: int) -> ExpertTensors:
        unpacked = self._layer.unpack(slot)._asdict()
        specs = self._format.specs(self.shape)
        # The core keeps every bias in fp32, exactly, and zeros where the expert has none.
        return self._format.decode(self.shape, {name: unpacked[name].to(spec.dtype) for name, spec in specs.items()})

    def export_slot(self, slot: int, out: Tensor) -> int:
        return self._layer.copy_out(slot, out)

    def prepare(self, data: Tensor) -> PreparedSlot:
        self._layer.check_slot_bytes(data)
        return data  # as it lies: the kernel reads it there first, and then where it was copied to, in its slot

    def install(self, slot: int, prepared: PreparedSlot) -> Loan:
        assert isinstance(prepared, Tensor), "not prepared by this kernel"
        self._layer.redirect(slot, prepared)
        return _Redirection(self._layer, slot)

    def __call__(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        if hidden.dtype in SCALARS:
            return self._layer(hidden, slot_ids, gate_weights)
        return self._layer(hidden.float(), slot_ids, gate_weights).to(hidden.dtype)

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        if rows.dtype not in SCALARS:
            rows = rows.float()
        return self._layer.experts(rows, slot_ids)

    def experts_in_place(
        self, dtype: torch.dtype, row_addresses: Tensor, slot_ids: Tensor, output_addresses: Tensor
    ) -> None:
        self._layer.experts_in_place(dtype, row_addresses, slot_ids, output_addresses)

    def combine(self, outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
        if out.dtype in SCALARS:
            exchange.combine(outputs, slot_ids, gate_weights, out)
            return
        total = torch.empty(out.shape, dtype=torch.float32)
        exchange.combine(outputs, slot_ids, gate_weights, total)
        out.copy_(total)


class _Redirection:
    """The loan of a slot that the kernel reads elsewhere."""

    def __init__(self, layer: NativeMoe, slot: int) -> None:
        self._layer = layer
        self._slot = slot

    def copy_home(self) -> int:
        return self._layer.copy_home(self._slot)

    def give_back(self) -> None:
        self._layer.end_redirection(self._slot)


def native_slot_nbytes(shape: ExpertShape, storage: str | torch.dtype) -> int:
    """What one slot takes, before any kernel is built; only where `native_refusal` is None."""
    return slot_nbytes(native_kernels(), _native_shape(shape), _FORMATS[find_format(storage).name])


def _native_shape(shape: ExpertShape) -> MoeShape:
    activation = shape.activation
    return MoeShape(
        shape.hidden_size,
        shape.intermediate_size,
        shape.has_gate,
        activation.kind,
        activation.alpha,
        activation.limit,
    )
