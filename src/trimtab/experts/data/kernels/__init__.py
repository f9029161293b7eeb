"""Expert kernels: one contract (`base`), the mathematics (`reference`), and those that serve."""

from __future__ import annotations

import logging

import torch

from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.kernels.movable import slot_storage
from trimtab.experts.data.kernels.native import NativeExpertKernel, native_refusal, native_slot_nbytes
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.formats.base import ExpertShape
from trimtab.experts.formats.movable import StoredBy
from trimtab.experts.formats.registry import find_format
from trimtab.experts.formats.slot_bytes import SlotBytes

logger = logging.getLogger(__name__)

__all__ = ["ExpertKernel", "make_expert_kernel", "plan_slots", "slot_storage"]


def make_expert_kernel(
    shape: ExpertShape,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
) -> ExpertKernel:
    """Chooses the kernel for experts of this shape, stored in `dtype` or in the format that `quantization` names.

    Raises ValueError when none can.
    """
    _check_device(device)
    return _choose(shape, dtype, quantization)(shape, num_slots, quantization or dtype)


def plan_slots(
    shape: ExpertShape, dtype: torch.dtype, device: torch.device | str = "cpu", quantization: str | None = None
) -> tuple[StoredBy, int]:
    """(format and kernel, bytes of a slot as it travels) of what `make_expert_kernel` would build; nothing is built."""
    _check_device(device)
    kernel = _choose(shape, dtype, quantization)
    stored = find_format(quantization or dtype)
    is_native = kernel is NativeExpertKernel
    nbytes = native_slot_nbytes(shape, stored.name) if is_native else SlotBytes(stored, shape).nbytes
    return StoredBy(stored.name, kernel.name), nbytes


def _choose(
    shape: ExpertShape, dtype: torch.dtype, quantization: str | None
) -> type[NativeExpertKernel] | type[PortableExpertKernel]:
    refusal = native_refusal(shape, quantization or dtype)
    if refusal is None:
        return NativeExpertKernel
    if quantization is not None:
        raise ValueError(f"quantization ({quantization!r}) needs a native kernel, and there is none: {refusal}")
    logger.debug("experts use the portable kernel: %s", refusal)
    return PortableExpertKernel


def _check_device(device: torch.device | str) -> None:
    if torch.device(device).type != "cpu":
        raise ValueError(f"device ({device}) must be 'cpu' for expert kernels; no kernel for other devices yet")
