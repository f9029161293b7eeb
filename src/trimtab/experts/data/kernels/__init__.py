"""Expert kernels: one contract (`base`), the mathematics (`reference`), and those that serve."""

from __future__ import annotations

import logging

import torch

from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.kernels.native import NativeExpertKernel, native_refusal
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.formats.base import ExpertShape

logger = logging.getLogger(__name__)

__all__ = ["ExpertKernel", "make_expert_kernel"]


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
    if torch.device(device).type != "cpu":
        raise ValueError(f"device ({device}) must be 'cpu' for expert kernels; no kernel for other devices yet")
    refusal = native_refusal(shape, quantization or dtype)
    if refusal is None:
        return NativeExpertKernel(shape, num_slots, quantization or dtype)
    if quantization is not None:
        raise ValueError(f"quantization ({quantization!r}) needs a native kernel, and there is none: {refusal}")
    logger.debug("experts use the portable kernel: %s", refusal)
    return PortableExpertKernel(shape, num_slots, dtype)
