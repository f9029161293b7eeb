"""The one place that decides how a linear layer is stored and multiplied.

Storages, by what `choose_storage` finds:

- native: plain packed values read by the compiled core, wherever it has a kernel for the type: faster than oneDNN at
  every shape measured up to 64 rows and equal beyond, because a call costs 2 us instead of 30 to 50;
- prepacked: oneDNN's blocked layout in the type it multiplies in (fp32 everywhere; bf16 where instructions exist);
- widened: a 16-bit weight on a CPU without 16-bit multiplication. Kept in 16 bits and in oneDNN's fp32 order, widened
  tile by tile into a reused packed tile and multiplied there: fp32 speed at half of fp32's memory (B124);
- in place: a canonical tensor somebody else reads too (tied embeddings), never copied; also machines without oneDNN.

Row invariance: the native core promises it. oneDNN's inner product over one layout gives a row the same bits in any
batch and position (bitwise tests in tests/unit/kernels); with a plain weight only from two rows on, so one row is
padded to two there. Not promised: between different thread counts or CPUs, and nowhere without oneDNN and native core,
where F.linear is padded to 16 rows, which is as many as two threads need.
"""

# R rows  N out features  K in features

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.kernels.features import cpu_features, has_bf16_instructions, is_x86
from trimtab.kernels.native.library import Format, native_kernels
from trimtab.kernels.native.linear import NativeLinear

logger = logging.getLogger(__name__)

# The layout oneDNN picks for this many rows is the fastest one measured at every row count, one row included; packed
# for one row it is slower from four rows on and not row-invariant.
ROWS_HINT = 64
# Elements of one widened tile. A oneDNN call costs 30-50 us whatever its size, so tiles that fit L2 lose to this.
TILE_ELEMENTS = 1 << 20
# Packed layouts block output rows by 64: tiles of that granularity waste nothing.
TILE_ROWS_MULTIPLE = 64

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Storage(Protocol):
    """One layer [N, K] as it is kept. `multiply` takes rows [R, K] in one of `input_dtypes`, returns [R, N] in it.

    `load` puts other values of the same shape and type in their place; the storage stays the same object.
    """

    compute_dtype: torch.dtype
    input_dtypes: tuple[torch.dtype, ...]
    nbytes: int

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor: ...

    def load(self, weight: Tensor, bias: Tensor | None) -> None: ...

    def unpack(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """How weights of one dtype are kept here, and why."""

    name: str
    compute_dtype: torch.dtype
    reason: str


def choose_storage(dtype: torch.dtype, *, shared: bool = False) -> StorageChoice:
    """The rule. A rule, not a timing at start-up: timings on a busy machine chose differently from run to run."""
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"weight dtype ({dtype}) must be one of {SUPPORTED_DTYPES}; convert the weight first")
    native_bf16 = (
        dtype == torch.bfloat16
        and has_bf16_instructions(cpu_features())
        and _has_onednn()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    compute = dtype if native_bf16 else torch.float32
    if not shared and native_format(dtype) is not None:
        return StorageChoice("native", torch.float32, "the compiled core has a kernel for this type")
    if shared:
        return StorageChoice("in place", compute, "the tensor has another reader")
    if not _has_onednn():
        return StorageChoice("in place", compute, "no oneDNN for this machine")
    if compute == dtype:
        return StorageChoice("prepacked", compute, "the CPU multiplies this type")
    return StorageChoice("widened", compute, f"no {_short(dtype)} instructions: 16-bit storage, fp32 multiplication")


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> PackedLinear:
    """Packs weight [N, K] and bias [N]. The caller drops its tensor; the packed layer is then the only copy.

    `shared` keeps reading `weight` in place because something else (an embedding) needs it too.
    Raises ValueError for a weight that is not a matrix, a bias that does not fit it, or a dtype that has no storage.
    """
    if weight.ndim != 2:
        raise ValueError(f"linear weight (shape {tuple(weight.shape)}) must be [out_features, in_features]; reshape it")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear bias (shape {tuple(bias.shape)}) must be [{weight.shape[0]}]; check the checkpoint")
    choice = choose_storage(weight.dtype, shared=shared)
    _log_once(_short(weight.dtype), choice)
    weight = weight.detach()
    if choice.name == "native":
        storage: Storage = NativeStorage(weight, bias)
    elif choice.name == "prepacked":
        storage = PrepackedStorage(weight)
    elif choice.name == "widened":
        storage = WidenedStorage(weight)
    else:
        storage = InPlaceStorage(weight, choice.compute_dtype)
    return PackedLinear(weight.shape[0], weight.shape[1], weight.dtype, storage, bias)


class PackedLinear(nn.Module):
    """Takes the place of an nn.Linear: forward(x [..., K]) -> [..., N] in x's dtype."""

    def __init__(
        self, out_features: int, in_features: int, dtype: torch.dtype, storage: Storage, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        self.storage = storage
        self._bias = None if bias is None else bias.detach().to(storage.compute_dtype, copy=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if x.dtype not in self.storage.input_dtypes:
            rows = rows.to(self.storage.compute_dtype)
        return self.multiply(rows).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """rows [R, K] in `compute_dtype` -> [R, N] in it: no conversions, for callers that fuse them."""
        if rows.shape[0] == 0:
            return rows.new_empty(0, self.out_features)
        return self.storage.multiply(rows.contiguous(), self._bias)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.storage.compute_dtype

    @property
    def nbytes(self) -> int:
        """Bytes the weight and bias occupy, padding of the layout included."""
        return self.storage.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def load_weight(self, weight: Tensor) -> None:
        """Other values [N, K] in place of the weight's. Called on: the runner's thread, between forwards."""
        assert weight.shape == (self.out_features, self.in_features) and weight.dtype == self.dtype, (
            f"weight {weight.dtype} {tuple(weight.shape)} is not this layer's"
        )
        self.storage.load(weight.detach(), self._bias)

    def load_bias(self, bias: Tensor) -> None:
        """Other values [N] in place of the bias's; where the packed weight holds it, that is packed anew."""
        assert self._bias is not None and bias.shape == self._bias.shape, "this layer has no such bias"
        self._bias.copy_(bias)
        if isinstance(self.storage, NativeStorage):
            self.storage.load(self.storage.unpack(), self._bias)

    def unpack(self) -> Tensor:
        """The weight as a fresh [N, K] in its own dtype, bit for bit what was packed. Called on: any thread."""
        return self.storage.unpack()

    def unpack_bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.to(self.dtype, copy=True)

    def extra_repr(self) -> str:
        kind = type(self.storage).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}, {kind}"


class NativeStorage:
    """Plain packed values of the native core; fp32 and bf16 rows go in and out as they are."""

    compute_dtype = torch.float32
    input_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight_format = native_format(weight.dtype)
        assert weight_format is not None, f"no native kernel for {weight.dtype}"
        self._linear = NativeLinear(native_kernels(), weight_format, weight, bias)
        self.nbytes = self._linear.packed.nbytes

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(rows)  # its packed bytes hold the bias

    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        self._linear.pack(weight, bias)

    def unpack(self) -> Tensor:
        return self._linear.unpack()[0]


def native_format(dtype: torch.dtype) -> Format | None:
    """The native core's format for weights of this type, where it may be used here."""
    weight_format = {torch.float32: Format.FP32, torch.bfloat16: Format.BF16}.get(dtype)
    return weight_format if weight_format is not None and native_kernels().supports(weight_format) else None


class PrepackedStorage:
    """The weight in oneDNN's blocked layout, multiplied in its own type."""

    def __init__(self, weight: Tensor) -> None:
        self.compute_dtype = weight.dtype
        self.input_dtypes: tuple[torch.dtype, ...] = (weight.dtype,)
        self.load(weight, None)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return _inner_product(rows, self._packed, bias)

    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _pack(weight)
        self.nbytes = int(torch.ops.mkldnn._nbytes(self._packed))

    def unpack(self) -> Tensor:
        return self._packed.to_dense()


class WidenedStorage:
    """The weight in 16 bits, tile after tile in the order of oneDNN's packed fp32 tile of the same shape."""

    compute_dtype = torch.float32
    input_dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def __init__(self, weight: Tensor) -> None:
        self._shape = tuple(weight.shape)
        self._spans = tile_spans(*weight.shape)
        self.load(weight, None)

    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        # The layouts of today's thread count, which may not be that of the values before.
        self._layouts = [_layout_of(end - start, weight.shape[1]) for start, end in self._spans]
        tiles = [_packed_values(weight[start:end]) for start, end in self._spans]
        # One allocation per weight: contiguous and self-contained.
        self._values = torch.cat(tiles)
        self._tiles = self._values.split([tile.numel() for tile in tiles])
        self.nbytes = self._values.nbytes

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if len(self._spans) == 1:
            return _inner_product(rows, self._widen(0), bias)
        out = rows.new_empty(rows.shape[0], self._shape[0])
        for index, (start, end) in enumerate(self._spans):
            part = None if bias is None else bias[start:end]
            out[:, start:end] = _inner_product(rows, self._widen(index), part)
        return out

    def _widen(self, index: int) -> Tensor:
        tile = _workspaces.packed(self._layouts[index])
        tile.values.copy_(self._tiles[index])
        return tile.packed

    def unpack(self) -> Tensor:
        tiles = [self._widen(index).to_dense().to(self._values.dtype) for index in range(len(self._spans))]
        return torch.cat(tiles)


class InPlaceStorage:
    """A plain [N, K] tensor read where it is; 16-bit ones are widened tile by tile where the CPU needs it."""

    def __init__(self, weight: Tensor, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        self.input_dtypes: tuple[torch.dtype, ...] = (compute_dtype,)
        self._weight = weight
        self._spans = tile_spans(*weight.shape) if compute_dtype != weight.dtype else ((0, weight.shape[0]),)
        self.nbytes = weight.nbytes

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = rows.shape[0]
        # Below these counts the multiplication takes another path, with other bits.
        least = 2 if _has_onednn() else 16
        rows = F.pad(rows, (0, 0, 0, max(0, least - num_rows)))
        if len(self._spans) == 1 and self._weight.dtype == self.compute_dtype:
            return _plain_product(rows, self._weight, bias)[:num_rows]
        out = rows.new_empty(num_rows, self._weight.shape[0])
        for start, end in self._spans:
            tile = _workspaces.plain(end - start, self._weight.shape[1])
            tile.copy_(self._weight[start:end])
            part = None if bias is None else bias[start:end]
            out[:, start:end] = _plain_product(rows, tile, part)[:num_rows]
        return out

    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight.copy_(weight)  # its other readers see it too

    def unpack(self) -> Tensor:
        return self._weight.clone()


def tile_spans(num_rows: int, num_columns: int) -> tuple[tuple[int, int], ...]:
    """Cuts a weight's rows into near-equal tiles of at most TILE_ELEMENTS (but never under TILE_ROWS_MULTIPLE rows)."""
    num_tiles = max(1, -(-num_rows * num_columns // TILE_ELEMENTS))
    step = -(-num_rows // num_tiles)
    step = max(TILE_ROWS_MULTIPLE, -(-step // TILE_ROWS_MULTIPLE) * TILE_ROWS_MULTIPLE)
    return tuple((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


@dataclass(frozen=True, slots=True)
class Layout:
    """Names one packed fp32 layout. oneDNN may choose by thread count: bytes packed under one count must be read in
    the layout of that count, whatever the count is by then."""

    num_rows: int
    num_columns: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class PackedTile:
    """A packed fp32 tile whose memory can be written: `values` is the raw content of `packed`, padding included."""

    packed: Tensor
    values: Tensor


class _Workspaces(threading.local):
    """Tiles by layout, one set per thread: two engines, or a mover that unpacks, never share one."""

    def __init__(self) -> None:
        self._tiles: dict[Layout, PackedTile] = {}
        self._plain = torch.empty(0, dtype=torch.float32)

    def packed(self, layout: Layout) -> PackedTile:
        tile = self._tiles.get(layout)
        if tile is None:
            with torch.inference_mode(False):  # what is made in inference mode can be written in no other
                packed = _prototypes[layout].clone()
                tile = self._tiles[layout] = PackedTile(packed, _raw_fp32(packed))
        return tile

    def plain(self, num_rows: int, num_columns: int) -> Tensor:
        if self._plain.numel() < num_rows * num_columns:
            with torch.inference_mode(False):
                self._plain = torch.empty(num_rows * num_columns, dtype=torch.float32)
        return self._plain[: num_rows * num_columns].view(num_rows, num_columns)


_workspaces = _Workspaces()
_prototypes: dict[Layout, Tensor] = {}


def _layout_of(num_rows: int, num_columns: int) -> Layout:
    layout = Layout(num_rows, num_columns, torch.get_num_threads())
    if layout not in _prototypes:
        _prototypes[layout] = _pack(torch.zeros(num_rows, num_columns, dtype=torch.float32))
    return layout


def _packed_values(weight: Tensor) -> Tensor:
    """A 16-bit weight's values in the order of its packed fp32 layout."""
    packed = _pack(weight.float())
    return _raw_fp32(packed).to(weight.dtype)


def _has_onednn() -> bool:
    return is_x86() and torch.backends.mkldnn.is_available()


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)


def _inner_product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")


def _plain_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _inner_product(rows, weight, bias) if _has_onednn() else F.linear(rows, weight, bias)


def _raw_fp32(packed: Tensor) -> Tensor:
    """The memory of a packed fp32 tensor as a flat tensor; valid while `packed` lives."""
    num_bytes = int(torch.ops.mkldnn._nbytes(packed))
    memory = (ctypes.c_char * num_bytes).from_address(int(torch.ops.mkldnn.data_ptr(packed)))
    return torch.frombuffer(memory, dtype=torch.float32)


def describe_linear() -> list[tuple[str, str, str]]:
    """(what, choice, reason) for each dtype a linear layer may have."""
    choices = [(dtype, choose_storage(dtype)) for dtype in SUPPORTED_DTYPES]
    return [
        (f"linear {_short(dtype)}", f"{choice.name}, multiplied in {_short(choice.compute_dtype)}", choice.reason)
        for dtype, choice in choices
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_logged: set[tuple[str, str]] = set()


def _log_once(dtype: str, choice: StorageChoice) -> None:
    if (dtype, choice.name) not in _logged:
        _logged.add((dtype, choice.name))
        logger.info(
            "linear layers in %s: %s, multiplied in %s (%s)",
            dtype,
            choice.name,
            _short(choice.compute_dtype),
            choice.reason,
        )
