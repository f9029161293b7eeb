"""Which experts may be moved while they serve: default deny, one list. No torch here."""

from __future__ import annotations

from typing import NamedTuple


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
