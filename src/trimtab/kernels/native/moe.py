"""A fused MoE layer over plain packed slots: torch tensors in and out of the native core."""

# T tokens  K top-k  H hidden  I intermediate
from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from trimtab.kernels.checksum import checksum, copy_with_checksum
from trimtab.kernels.native.library import (
    SCALARS,
    Format,
    Level,
    MoeLayerStruct,
    NativeCore,
    NativeKernels,
    check_status,
)

# Values as in csrc/types.hpp.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swiglu_clamped": 5}
WEIGHT_DTYPES = {Format.FP32: torch.float32, Format.BF16: torch.bfloat16, Format.INT8: torch.int8}
# int32 sums of 255 * 127 products stay exact up to this many.
MAX_INT8_DEPTH = 65536


class MoeShape(NamedTuple):
    """One expert of a layer; `activation` is a key of ACTIVATIONS, alpha and limit are swiglu_clamped's."""

    hidden_size: int
    intermediate_size: int
    has_gate: bool = True
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


class MoeWeights(NamedTuple):
    """One expert, row-major: gate_up [2I, H] (gate rows, then up rows; [I, H] without gate), down [H, I].

    Weights are of the format's dtype; biases and scales (int8 only, one per output feature) are fp32.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None


class NativeMoe:
    """Slots of one layer and the kernel that reads them.

    Every slot is `slot_bytes` contiguous bytes that hold the whole expert, the same bytes for every instruction set.
    `slots` [num_slots, slot_bytes] is that memory; the kernel finds a slot through `slot_table`, whose entries may be
    redirected between calls: `redirect` to bytes that lie elsewhere, `copy_home`, `end_redirection`.
    """

    def __init__(self, kernels: NativeKernels, shape: MoeShape, num_slots: int, weight_format: Format) -> None:
        _check_shape(shape, weight_format)
        assert kernels.core is not None and kernels.supports(weight_format), "ask supports() before building a layer"
        self._core: NativeCore = kernels.core
        self.shape = shape
        self.num_slots = num_slots
        self.weight_format = weight_format
        self._geometry = (int(weight_format), shape.hidden_size, shape.intermediate_size, int(shape.has_gate))
        self.slot_bytes = slot_nbytes(kernels, shape, weight_format)
        self.slots = torch.empty(num_slots, self.slot_bytes, dtype=torch.uint8)
        self._core.advise_huge_pages(self.slots.data_ptr(), self.slots.nbytes)
        self.slot_table = torch.zeros(num_slots, dtype=torch.int64)  # address of each loaded slot, 0 while empty
        self._addresses = self.slot_table.numpy()  # the same memory: a single write to it takes torch some 10 us
        self._redirected: dict[int, torch.Tensor] = {}  # what such slots are read from; holds that memory
        self._layer = self._layer_struct(kernels.levels[weight_format])
        self._layer_address = ctypes.addressof(self._layer)

    def _layer_struct(self, level: Level) -> MoeLayerStruct:
        return MoeLayerStruct(
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            num_slots=self.num_slots,
            slot_table=self.slot_table.data_ptr(),
            level=level,
            format=self.weight_format,
            has_gate=self.shape.has_gate,
            activation=ACTIVATIONS[self.shape.activation],
            alpha=self.shape.alpha,
            limit=self.shape.limit,
        )

    def pack(self, slot: int, weights: MoeWeights) -> None:
        """Writes one expert into a slot and makes it readable."""
        assert slot not in self._redirected, f"slot {slot} is read elsewhere: end its redirection before it is written"
        for tensor, (name, expected) in zip(weights, self._expected_shapes().items(), strict=True):
            is_needed = name in ("gate_up", "down") or (name.endswith("scale") and self.weight_format is Format.INT8)
            assert tensor is not None or not is_needed, f"{name} is missing"
            if tensor is not None:
                assert tuple(tensor.shape) == expected, f"{name} is {tuple(tensor.shape)}, expected {expected}"
        dtype = WEIGHT_DTYPES[self.weight_format]
        assert weights.gate_up.dtype == weights.down.dtype == dtype, f"weights must be {dtype}"
        held = [contiguous_as(t, dtype if i < 2 else torch.float32) for i, t in enumerate(weights)]
        gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale = [address_of(t) for t in held]
        target = self.slots[slot].data_ptr()
        self._core.pack_slot(*self._geometry, gate_up, gate_up_bias, gate_up_scale, down, down_bias, down_scale, target)
        self.slot_table[slot] = target

    def unpack(self, slot: int) -> MoeWeights:
        """The expert of a slot as it was packed; biases that were None come back as zeros."""
        assert int(self.slot_table[slot]) != 0, f"slot {slot} holds no weights"
        shapes = self._expected_shapes()
        dtype = WEIGHT_DTYPES[self.weight_format]
        tensors = [
            torch.empty(shape, dtype=dtype if name in ("gate_up", "down") else torch.float32)
            if not name.endswith("scale") or self.weight_format is Format.INT8
            else None
            for name, shape in shapes.items()
        ]
        gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale = [address_of(t) for t in tensors]
        source = int(self.slot_table[slot])
        self._core.unpack_slot(
            *self._geometry, gate_up, gate_up_bias, gate_up_scale, down, down_bias, down_scale, source
        )
        return MoeWeights(*tensors)  # type: ignore[arg-type]

    def copy_out(self, slot: int, out: torch.Tensor) -> int:
        """The bytes that the kernel reads, to out uint8 [slot_bytes] -> their checksum. Called on: any thread."""
        assert int(self.slot_table[slot]) != 0, f"slot {slot} holds no weights"
        found = self._redirected.get(slot)
        return copy_with_checksum(self.slots[slot] if found is None else found, out)

    def redirect(self, slot: int, data: torch.Tensor) -> None:
        """From the next call on the slot is read from data uint8 [slot_bytes] of `copy_out`, where it lies.

        `data` has passed `check_slot_bytes`, and must stay as it is until `end_redirection`.
        """
        assert slot not in self._redirected, f"slot {slot} is read elsewhere already"
        self._redirected[slot] = data
        self._addresses[slot] = data.data_ptr()

    def check_slot_bytes(self, data: torch.Tensor) -> None:
        is_bytes = data.is_contiguous() and data.dtype == torch.uint8
        assert is_bytes and data.shape == (self.slot_bytes,), f"{data.dtype} {tuple(data.shape)} are not a slot's bytes"

    def copy_home(self, slot: int) -> int:
        """Copies what a redirected slot is read from to where it belongs -> the checksum of what lies there then.

        Called on: any thread, also beside a call: that place is not read meanwhile.
        """
        source, target = self._redirected[slot], self.slots[slot]
        self._core.copy_past_caches(source.data_ptr(), target.data_ptr(), target.numel())
        return checksum(target)

    def end_redirection(self, slot: int) -> None:
        """The slot is read where it belongs; `copy_home` has ended."""
        self._addresses[slot] = self.slots.data_ptr() + slot * self.slot_bytes
        del self._redirected[slot]

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inter = self.shape.hidden_size, self.shape.intermediate_size
        rows = 2 * inter if self.shape.has_gate else inter
        return {
            "gate_up": (rows, hidden),
            "down": (hidden, inter),
            "gate_up_bias": (rows,),
            "down_bias": (hidden,),
            "gate_up_scale": (rows,),
            "down_scale": (hidden,),
        }

    def __call__(self, hidden: torch.Tensor, slot_ids: torch.Tensor, gate_weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] fp32 or bf16, slot_ids [T, K] int64 (-1 adds nothing), gate_weights [T, K] -> [T, H].

        The K partial outputs are weighted and summed in fp32 in the order of k, and rounded once. A row is bitwise the
        same whatever other rows are present. Holds no GIL while it computes.
        """
        out = torch.empty_like(hidden)
        self._run(hidden, slot_ids, gate_weights, out)
        return out

    def experts(self, rows: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
        """rows [N, H] fp32 or bf16, slot_ids [N] int64 -> [N, H] fp32: each row's expert without a gate weight."""
        out = torch.empty(rows.shape, dtype=torch.float32)
        # A product with one, added to zero, is the expert's output itself.
        self._run(rows, slot_ids[:, None], torch.ones(len(rows), 1, dtype=torch.float32), out)
        return out

    def experts_in_place(
        self, dtype: torch.dtype, row_addresses: torch.Tensor, slot_ids: torch.Tensor, output_addresses: torch.Tensor
    ) -> None:
        """As `experts`, with rows of `dtype` read, and fp32 rows written, at addresses [N] int64."""
        assert slot_ids.is_contiguous() and row_addresses.is_contiguous() and output_addresses.is_contiguous()
        check_status(
            self._core.experts_in_place(
                self._layer_address,
                row_addresses.data_ptr(),
                SCALARS[dtype],
                output_addresses.data_ptr(),
                slot_ids.data_ptr(),
                len(slot_ids),
                torch.get_num_threads(),
            )
        )

    def _run(self, hidden: torch.Tensor, slot_ids: torch.Tensor, gate_weights: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens, top_k = slot_ids.shape
        assert hidden.shape == (num_tokens, self.shape.hidden_size), f"hidden is {tuple(hidden.shape)}"
        assert gate_weights.shape == slot_ids.shape and slot_ids.dtype == torch.int64
        hidden = hidden.contiguous()
        slot_ids = slot_ids.contiguous()
        gate_weights = gate_weights.to(torch.float32).contiguous()
        check_status(
            self._core.moe(
                self._layer_address,
                hidden.data_ptr(),
                SCALARS[hidden.dtype],
                out.data_ptr(),
                SCALARS[out.dtype],
                slot_ids.data_ptr(),
                gate_weights.data_ptr(),
                num_tokens,
                top_k,
                torch.get_num_threads(),
            )
        )


def slot_nbytes(kernels: NativeKernels, shape: MoeShape, weight_format: Format) -> int:
    """What a slot takes, before any layer is built."""
    assert kernels.core is not None, "ask supports() first"
    return int(
        kernels.core.slot_bytes(int(weight_format), shape.hidden_size, shape.intermediate_size, int(shape.has_gate))
    )


def _check_shape(shape: MoeShape, weight_format: Format) -> None:
    if shape.activation not in ACTIVATIONS:
        raise ValueError(f"activation {shape.activation!r} has no native kernel; one of {', '.join(ACTIVATIONS)}")
    if shape.activation == "swiglu_clamped" and not shape.has_gate:
        raise ValueError("activation 'swiglu_clamped' needs a gate; use experts with has_gate=True")
    if weight_format is Format.INT8 and max(shape.hidden_size, shape.intermediate_size) > MAX_INT8_DEPTH:
        raise ValueError(f"int8 experts wider than {MAX_INT8_DEPTH} would overflow int32 sums: {shape}; use bf16")


def contiguous_as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """What C reads row by row; the caller keeps it alive until the call returns."""
    return None if tensor is None else tensor.to(dtype).contiguous()


def address_of(tensor: torch.Tensor | None) -> int | None:
    """The pointer that C takes, null for None."""
    return None if tensor is None else tensor.data_ptr()
