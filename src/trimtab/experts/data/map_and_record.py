"""Map and record: expert ids become slot ids and are counted, in one registered operation of a forward.

One operation and not several: between its look-up and its count nothing can come, a traced or compiled network holds it
whole, and on the CPU it is one native pass over a few integers. It asks nothing of its data: whether a step is counted
is read from a tensor, so a graph made once serves counted and uncounted steps.

A forward that nothing traces makes the same native pass through a `NativeLookUp`: between a call of the operation and
its implementation stands a dispatcher whose code a decode step finds cold in every layer (measured: docs/log.md).
"""

# T tokens  K top-k  E experts  P slots

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trimtab.kernels.native.library import NativeCore, native_kernels

_library = torch.library.Library("trimtab", "DEF")
_library.define(
    "map_and_record(Tensor expert_ids, Tensor slots, Tensor first_position, Tensor(a!) counts, Tensor counted, "
    "SymInt start, SymInt stop) -> Tensor"
)


def map_and_record_reference(
    expert_ids: Tensor, slots: Tensor, first_position: Tensor, counts: Tensor, counted: Tensor, start: int, stop: int
) -> Tensor:
    """expert_ids [T, K] -> slot ids [T, K], all int64; -1 stays -1 and is no load.

    Token t takes column (t + first_position) mod period of slots [E, period]; first_position [1]. For each pair of the
    tokens [start, stop), `counted` [1] (1 or 0) is added to its slot's entry of counts [P].
    """
    positions = (torch.arange(expert_ids.shape[0], device=expert_ids.device) + first_position) % slots.shape[1]
    dropped = expert_ids < 0
    # -1 as an index is the last expert: the drop test must win over whatever is found there (B20).
    slot_ids = slots[expert_ids.clamp(min=0), positions[:, None]].masked_fill(dropped, -1)
    owned = slot_ids[start:stop].reshape(-1)
    counts.scatter_add_(0, owned.clamp(min=0), (owned >= 0) * counted)
    return slot_ids


class _LookUpStruct(ctypes.Structure):
    """TrimtabLookUp of csrc/routing.cpp."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("period", ctypes.c_int64),
        ("first_position", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("counted", ctypes.c_void_p),
    )


class NativeLookUp:
    """The operation on a CPU, with the tensors that stay from step to step given once: their memory is kept as it is.

    expert_ids [T, K] -> slot ids [T, K], the tokens [start, stop) counted. Raises IndexError for an id that is no
    expert's.
    """

    __slots__ = ("_address", "_num_experts", "_run", "_struct", "_tensors")

    def __init__(
        self, core: NativeCore, slots: Tensor, first_position: Tensor, counts: Tensor, counted: Tensor
    ) -> None:
        self._tensors = (slots, first_position, counts, counted)  # the struct knows their addresses alone
        assert all(tensor.is_contiguous() and tensor.dtype == torch.int64 for tensor in self._tensors)
        self._num_experts = slots.shape[0]
        self._struct = _LookUpStruct(
            slots.data_ptr(), *slots.shape, first_position.data_ptr(), counts.data_ptr(), counted.data_ptr()
        )
        self._address = ctypes.addressof(self._struct)
        self._run = core.look_up

    def __call__(self, expert_ids: Tensor, start: int, stop: int) -> Tensor:
        num_tokens, top_k = expert_ids.shape
        assert 0 <= start <= stop <= num_tokens, f"tokens [{start}, {stop}) of {num_tokens} cannot be owned"
        expert_ids = expert_ids.contiguous()
        slot_ids = torch.empty_like(expert_ids)
        if self._run(self._address, expert_ids.data_ptr(), num_tokens, top_k, start, stop, slot_ids.data_ptr()):
            raise IndexError(f"an expert id is not below num_experts ({self._num_experts})")
        return slot_ids


def _map_and_record_cpu(
    expert_ids: Tensor, slots: Tensor, first_position: Tensor, counts: Tensor, counted: Tensor, start: int, stop: int
) -> Tensor:
    core = native_kernels().core
    if core is None:
        return map_and_record_reference(expert_ids, slots, first_position, counts, counted, start, stop)
    return NativeLookUp(core, slots, first_position, counts, counted)(expert_ids, start, stop)


def _map_and_record_fake(
    expert_ids: Tensor, slots: Tensor, first_position: Tensor, counts: Tensor, counted: Tensor, start: int, stop: int
) -> Tensor:
    return expert_ids.new_empty(expert_ids.shape)


_library.impl("map_and_record", map_and_record_reference, "CompositeExplicitAutograd")
_library.impl("map_and_record", _map_and_record_cpu, "CPU")
torch.library.register_fake("trimtab::map_and_record", _map_and_record_fake, lib=_library)

# The overload itself: finding it by name costs more than the look-up.
map_and_record = torch.ops.trimtab.map_and_record.default
