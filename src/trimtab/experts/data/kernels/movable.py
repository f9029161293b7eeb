"""The door through which movement sees a kernel's slots: default deny."""

from __future__ import annotations

from collections.abc import Collection

from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.formats.movable import MOVABLE
from trimtab.experts.ports import SlotStorage


def slot_storage(kernel: ExpertKernel, admitted: Collection[tuple[str, str]] = MOVABLE) -> SlotStorage:
    """The kernel as movement sees it. Raises ValueError where its format, in this kernel, was never proven to move."""
    if (kernel.format_name, kernel.name) not in admitted:
        formats = sorted(name for name, other in admitted if other == kernel.name)
        raise ValueError(
            f"experts stored as {kernel.format_name!r} by the {kernel.name} kernel cannot be moved while they serve "
            f"(only {', '.join(formats) or 'no format of this kernel'}); leave enable_eplb out"
        )
    return kernel
