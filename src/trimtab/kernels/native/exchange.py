"""Tokens between ranks through shared memory, and the last sum of a MoE layer: the native core's side of dispatch."""

# T tokens  K top-k  N pairs  H hidden size
from __future__ import annotations

import ctypes
import functools
import logging
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.kernels.native.library import SCALARS, native_kernels

logger = logging.getLogger(__name__)

# A wait comes back to Python this often, so that signal handlers run and deadlines are seen.
_SLICE_NS = 50_000_000
# Polls before the first yield: about 50 us with a core for every rank, next to none without.
_SPINS = 1500
_CROWDED_SPINS = 20


class Phase(IntEnum):
    """What a rank waits for; values as in csrc/exchange.cpp."""

    SENT = 0
    ANSWERED = 1


class Senders(IntEnum):
    """Whose pairs; values as in csrc/exchange.cpp."""

    ALL = 0
    OWN = 1
    OTHERS = 2


class _Status(IntEnum):
    """Values as in csrc/exchange.cpp."""

    OK = 0
    PENDING = 1
    ABORTED = 2
    TOO_MANY = 3
    NOT_A_SEGMENT = 4
    SLOT_OUT_OF_RANGE = 5


class _ExchangeStruct(ctypes.Structure):
    """TrimtabExchange of csrc/exchange.cpp."""

    _fields_ = (
        ("segment", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("sequence", ctypes.c_uint64),
        ("spins", ctypes.c_int64),
        ("is_crowded", ctypes.c_int32),
    )


# What rows may be, by their number in a segment.
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "trimtab_combine": (None, [_POINTER] * 4 + [_INT, _LONG, _LONG, _LONG, _INT]),
    "trimtab_exchange_bytes": (_LONG, [_LONG] * 4),
    "trimtab_exchange_format": (None, [_POINTER] + [_LONG] * 4),
    "trimtab_exchange_check": (_INT, [_POINTER, _LONG]),
    "trimtab_exchange_abort": (None, [_POINTER, _LONG]),
    "trimtab_exchange_aborted_by": (_LONG, [_POINTER]),
    "trimtab_exchange_inbox": (_POINTER, [_POINTER, _LONG]),
    "trimtab_exchange_send": (_INT, [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG]),
    "trimtab_exchange_answer": (None, [_POINTER]),
    "trimtab_exchange_wait": (_INT, [_POINTER, _INT, _LONG, _POINTER]),
    "trimtab_exchange_arrivals": (_LONG, [_POINTER, _INT] + [_LONG] * 5 + [_POINTER] * 4),
    "trimtab_gather_rows": (None, [_POINTER, _LONG, _LONG, _POINTER]),
    "trimtab_scatter_rows": (None, [_POINTER, _LONG, _LONG, _POINTER]),
}


class _Functions:
    """The core's functions of this module; a second handle on the library that `library.py` has loaded."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
            setattr(self, name.removeprefix("trimtab_"), function)

    def __getattr__(self, name: str) -> Any:  # the functions set in __init__, for type checkers
        raise AttributeError(name)


@functools.cache
def exchange_refusal() -> str | None:
    """Why this process has no native exchange, or None when it has one."""
    core = native_kernels().core
    if core is None:
        return "; ".join(f"{choice.name}: {choice.reason}" for choice in native_kernels().choices)
    try:
        _functions()
    except AttributeError as error:
        logger.warning("native core without an exchange: %s", error)
        return f"{core.path} was built from other sources; run python -m trimtab.kernels.native.build"
    return None


@functools.cache
def _functions() -> _Functions:
    core = native_kernels().core
    assert core is not None, "ask exchange_refusal() first"
    return _Functions(str(core.path))


def combine(outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
    """outputs [T, K, H] fp32, slot_ids [T, K] (negative: no contribution), gate_weights [T, K] -> out [T, H].

    Bitwise what the fused native kernel makes of the same outputs. `out` is fp32 or bf16.
    """
    num_tokens, top_k, hidden_size = outputs.shape
    assert outputs.dtype == torch.float32 and outputs.is_contiguous()
    assert out.shape == (num_tokens, hidden_size) and out.is_contiguous(), f"out is {tuple(out.shape)}"
    assert slot_ids.shape == gate_weights.shape == (num_tokens, top_k) and slot_ids.dtype == torch.int64
    slot_ids = slot_ids.contiguous()
    gate_weights = gate_weights.to(torch.float32).contiguous()
    _functions().combine(
        outputs.data_ptr(), slot_ids.data_ptr(), gate_weights.data_ptr(), out.data_ptr(), SCALARS[out.dtype],
        num_tokens, top_k, hidden_size, torch.get_num_threads(),
    )  # fmt: skip


class ExchangeSizes(NamedTuple):
    """What a segment must hold: the most tokens one rank sends at once, and their largest top-k and row."""

    num_ranks: int
    max_tokens: int
    max_top_k: int
    max_hidden_size: int

    def segment_bytes(self) -> int:
        return int(_functions().exchange_bytes(*self))


def format_segment(memory: memoryview, sizes: ExchangeSizes) -> None:
    """Makes zeroed memory a segment. Called once, before any rank attaches."""
    assert len(memory) >= sizes.segment_bytes(), "memory is smaller than sizes.segment_bytes()"
    _functions().exchange_format(_address(memory), *sizes)


def abort_segment(memory: memoryview, rank: int | None = None) -> None:
    """Makes every present and later wait on the segment fail. May be called by anyone who maps it."""
    _functions().exchange_abort(_address(memory), -1 if rank is None else rank + 1)


def aborted_by(memory: memoryview) -> str | None:
    """Who aborted the segment, in words; None while all is well."""
    code = int(_functions().exchange_aborted_by(_address(memory)))
    return None if code == 0 else "the controller" if code < 0 else f"rank {code - 1}"


class ExchangeAbortedError(RuntimeError):
    """The segment's abort word is set: another rank, or the controller, gave up."""


class Arrivals(NamedTuple):
    """Pairs that chose this rank's slots, in the order (rank, token, k).

    Addresses are of rows in the senders' outboxes and of fp32 rows in the inboxes of those who wait for them.
    """

    dtype: torch.dtype  # of the rows: what their senders have, this rank may hold no token itself
    slot_ids: Tensor  # [N] int64, counted from this rank's first slot
    row_addresses: Tensor  # [N] int64
    output_addresses: Tensor  # [N] int64


class NativeExchange:
    """One rank's end of a segment. For each layer: `send`, wait SENT, `arrivals`, `answer`, wait ANSWERED, `inbox`.
    Where no other rank reads this one's inbox, `arrivals` of the OWN tokens may come at any time before that.

    Called on: one thread. Other ranks are other processes, or other threads with their own end of the same memory.
    Every call holds no GIL. `memory` must outlive this object.
    """

    def __init__(self, memory: memoryview, sizes: ExchangeSizes, rank: int, is_crowded: bool) -> None:
        self._functions = _functions()
        if self._functions.exchange_check(_address(memory), len(memory)) != _Status.OK:
            raise RuntimeError(f"shared memory of {len(memory)} bytes is not a segment of this version of trimtab")
        self.memory = memory
        self.sizes = sizes
        self.rank = rank
        self._struct = _ExchangeStruct(
            _address(memory), rank, 0, _CROWDED_SPINS if is_crowded else _SPINS, int(is_crowded)
        )
        self._self = ctypes.addressof(self._struct)
        self._missing = ctypes.c_int64()
        self._scalar = ctypes.c_int64()
        most_pairs = sizes.num_ranks * sizes.max_tokens * sizes.max_top_k
        # Pages are touched only where pairs are.
        self._slot_ids, self._rows, self._outputs = (torch.empty(most_pairs, dtype=torch.int64) for _ in range(3))
        self._addresses = [tensor.data_ptr() for tensor in (self._slot_ids, self._rows, self._outputs)]
        floats = sizes.max_tokens * sizes.max_top_k * sizes.max_hidden_size
        self._inboxes = [self._inbox_tensor(rank, floats) for rank in range(sizes.num_ranks)]

    def _inbox_tensor(self, rank: int, floats: int) -> Tensor:
        start = self._functions.exchange_inbox(_address(self.memory), rank) - _address(self.memory)
        return torch.frombuffer(self.memory, dtype=torch.float32, count=floats, offset=start)

    def send(self, rows: Tensor, slot_ids: Tensor, num_slots: int) -> None:
        """rows [T, H], slot_ids [T, K] int64 of the `num_slots` of all ranks; -1 goes nowhere.

        Raises RuntimeError for an id that no rank owns: nobody would ever answer it.
        """
        assert slot_ids.dtype == torch.int64 and len(rows) == len(slot_ids)
        rows, slot_ids = rows.contiguous(), slot_ids.contiguous()
        num_tokens, top_k = slot_ids.shape
        row_bytes = rows.shape[1] * rows.itemsize
        status = self._functions.exchange_send(
            self._self,
            rows.data_ptr(),
            row_bytes,
            _ROW_DTYPES.index(rows.dtype),
            slot_ids.data_ptr(),
            num_slots,
            num_tokens,
            top_k,
        )
        if status == _Status.SLOT_OUT_OF_RANGE:
            raise RuntimeError(f"a slot id is below -1 or not below num_slots ({num_slots})")
        assert status == _Status.OK, (
            f"{num_tokens} tokens, top-{top_k}, {row_bytes} bytes per row do not fit {self.sizes}"
        )

    def wait(self, phase: Phase) -> int | None:
        """Waits a slice of time for all ranks to reach `phase`. None: they have; else a rank that has not, call again.

        Raises ExchangeAbortedError once the abort word is set.
        """
        status = self._functions.exchange_wait(self._self, phase, _SLICE_NS, ctypes.addressof(self._missing))
        if status == _Status.ABORTED:
            raise ExchangeAbortedError(f"the exchange between ranks was aborted by {aborted_by(self.memory)}")
        return None if status == _Status.OK else int(self._missing.value)

    def arrivals(self, senders: Senders, first_slot: int, slots: range, top_k: int, hidden_size: int) -> Arrivals:
        """The pairs that chose `slots`, counted from this rank's `first_slot`: valid until the next call. All ranks
        send rows of `hidden_size` and `top_k` slot ids each."""
        count = self._functions.exchange_arrivals(
            self._self, senders, first_slot, slots.start, slots.stop, top_k, hidden_size,
            ctypes.addressof(self._scalar), *self._addresses,
        )  # fmt: skip
        if count < 0:
            raise RuntimeError("ranks sent hidden states of different dtypes")
        dtype = _ROW_DTYPES[self._scalar.value]
        return Arrivals(dtype, self._slot_ids[:count], self._rows[:count], self._outputs[:count])

    def gather(self, arrivals: Arrivals, hidden_size: int) -> Tensor:
        """[N, H]: the rows of the arrivals, one after the other."""
        rows = torch.empty(len(arrivals.slot_ids), hidden_size, dtype=arrivals.dtype)
        self._functions.gather_rows(
            arrivals.row_addresses.data_ptr(), len(rows), hidden_size * rows.itemsize, rows.data_ptr()
        )
        return rows

    def scatter(self, outputs: Tensor, arrivals: Arrivals) -> None:
        """outputs [N, H] fp32 go to the inboxes that wait for them."""
        assert outputs.dtype == torch.float32 and outputs.is_contiguous() and len(outputs) == len(arrivals.slot_ids)
        self._functions.scatter_rows(
            outputs.data_ptr(), len(outputs), outputs.shape[1] * 4, arrivals.output_addresses.data_ptr()
        )

    def answer(self) -> None:
        """Everything that this rank had to write to inboxes is written."""
        self._functions.exchange_answer(self._self)

    def inbox(self, rank: int, num_tokens: int, top_k: int, hidden_size: int) -> Tensor:
        """[T, K, H] fp32, the segment's own memory: valid from ANSWERED to the next `send`."""
        return self._inboxes[rank][: num_tokens * top_k * hidden_size].view(num_tokens, top_k, hidden_size)

    def abort(self) -> None:
        abort_segment(self.memory, self.rank)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
