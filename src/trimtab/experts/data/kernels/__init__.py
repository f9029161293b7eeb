"""Expert kernels: one contract (`base`), the mathematics (`reference`), and the ones that serve."""

from __future__ import annotations

import torch

from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.kernels.reference import ReferenceExpertKernel
from trimtab.experts.formats.base import ExpertShape

__all__ = ["ExpertKernel", "make_expert_kernel"]


def make_expert_kernel(
    shape: ExpertShape, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> ExpertKernel:
    """Chooses the kernel for experts of this shape and storage type."""
    return ReferenceExpertKernel(shape, num_slots, dtype)
