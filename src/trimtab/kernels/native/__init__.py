"""Kernels in C++ for the layers where torch leaves the CPU idle: fused mixture of experts, and linear.

The core is optional: a source checkout or an install without a compiler has none, and users ask
`library.native_kernels().supports(format)` before they pack weights for it.
"""

# Light on purpose: `python -m trimtab.kernels.native.build` must run without torch.
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.kernels.native.library import KernelChoice


def status() -> tuple[KernelChoice, ...]:
    """Which native kernels serve, and why: the rows of `trimtab inspect --kernels`."""
    from trimtab.kernels.native.library import native_kernels

    return native_kernels().choices
