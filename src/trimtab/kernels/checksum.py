"""A 64-bit checksum of bytes: the same value from the native core and, without it, from numpy."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimtab.kernels.native.library import Format, Level, native_kernels

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.uint64]

# As in csrc/checksum.cpp.
_STEP = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_PIECE_WORDS = 1 << 16  # numpy's temporaries stay in cache


def checksum(data: Tensor) -> int:
    """Of data uint8 [N], contiguous. Holds no GIL in the native core. Called on: any thread."""
    return _run(data, None)


def copy_with_checksum(source: Tensor, target: Tensor) -> int:
    """Copies source uint8 [N] to target uint8 [N], both contiguous, and gives the checksum of what was copied."""
    assert source.shape == target.shape, f"{tuple(source.shape)} bytes do not fit {tuple(target.shape)}"
    return _run(source, target)


def _run(source: Tensor, target: Tensor | None) -> int:
    for tensor in (source,) if target is None else (source, target):
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), "a checksum is of bytes"
    native = _native_function()
    if native is not None:
        return int(native(source.data_ptr(), None if target is None else target.data_ptr(), source.numel()))
    if target is not None:
        target.copy_(source)
    return checksum_by_numpy(source.numpy())


@functools.cache
def _native_function() -> Callable[..., int] | None:
    core = native_kernels().core
    if core is None or not core.cpu_supports(Level.AVX2, Format.FP32):
        return None
    try:
        function = ctypes.CDLL(str(core.path)).trimtab_checksum
    except AttributeError:
        logger.warning("%s has no checksum: it was built from other sources; numpy computes it", core.path)
        return None
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return function


def checksum_by_numpy(data: npt.NDArray[np.uint8]) -> int:
    """data uint8 [N] -> what the native core computes."""
    num_words = -(-len(data) // 8)
    sums = [np.uint64(0)]
    for first in range(0, num_words, _PIECE_WORDS):
        piece = data[first * 8 : (first + _PIECE_WORDS) * 8]
        padded = np.zeros(-(-len(piece) // 8) * 8, dtype=np.uint8)
        padded[: len(piece)] = piece
        keys = np.arange(first + 1, first + 1 + len(padded) // 8, dtype=np.uint64) * np.uint64(_STEP)
        sums.append(_mixed(padded.view("<u8"), keys).sum(dtype=np.uint64))
    total = np.array(sums).sum(dtype=np.uint64, keepdims=True)
    return int(_mixed(total, np.array([len(data)], dtype=np.uint64))[0])


def _mixed(words: Words, keys: Words) -> Words:
    words = (words ^ keys) * _FIRST
    words = (words ^ (words >> np.uint64(32))) * _SECOND
    return words ^ (words >> np.uint64(29))
