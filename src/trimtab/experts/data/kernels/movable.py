"""Which experts may be moved while they serve: default deny, one list, and the door that reads it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.ports import SlotStorage


class StoredBy(NamedTuple):
    """A format and the kernel that reads it."""

    format: str
    kernel: str


# Each of these passes tests/contracts/test_slot_storage.py, which fails for a pair that is here and not there.
MOVABLE = frozenset(
    StoredBy(name, kernel)
    for kernel, formats in {
        "native": ("float32", "bfloat16", "int8"),
        "portable": ("float32", "bfloat16", "float16"),
        "reference": ("float32", "bfloat16", "float16", "int8"),
    }.items()
    for name in formats
)


def slot_storage(kernel: ExpertKernel, admitted: Collection[tuple[str, str]] = MOVABLE) -> SlotStorage:
    """The kernel as movement sees it. Raises ValueError where its format, in this kernel, was never proven to move."""
    if (kernel.format_name, kernel.name) not in admitted:
        formats = sorted(name for name, other in admitted if other == kernel.name)
        raise ValueError(
            f"experts stored as {kernel.format_name!r} by the {kernel.name} kernel cannot be moved while they serve "
            f"(only {', '.join(formats) or 'no format of this kernel'}); leave enable_eplb out"
        )
    return kernel
