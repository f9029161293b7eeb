"""Expert kernels: one contract (`base`), the mathematics (`reference`), and the one that serves (`portable`)."""

from __future__ import annotations

import torch

from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.formats.base import ExpertShape

__all__ = ["ExpertKernel", "make_expert_kernel"]


def make_expert_kernel(
    shape: ExpertShape, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> ExpertKernel:
    """Chooses the kernel for experts of this shape, stored in `dtype`. Raises ValueError when none can."""
    if torch.device(device).type != "cpu":
        raise ValueError(f"device ({device}) must be 'cpu' for expert kernels; no kernel for other devices yet")
    return PortableExpertKernel(shape, num_slots, dtype)
