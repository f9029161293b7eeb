"""Loads the native core and chooses, per weight format, kernels that this CPU runs and that pass their self-test."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

# Before the core: both link OpenMP, and the core must join torch's threads instead of starting its own.
import torch

from trimtab.kernels.features import cpu_features
from trimtab.kernels.native.build import CORE_PATH

logger = logging.getLogger(__name__)

LEVEL_VARIABLE = "TRIMTAB_NATIVE"
_VERSION = 3
_MESSAGE_BYTES = 512


class Format(IntEnum):
    """How weights are stored; values as in csrc/layout.hpp."""

    FP32 = 0
    BF16 = 1
    INT8 = 2


class Level(IntEnum):
    """Instruction sets, slowest first; values as in csrc/core.hpp."""

    AVX2 = 1
    AVX512 = 2


class Status(IntEnum):
    """What a call found in its data; values as in csrc/core.hpp."""

    OK = 0
    SLOT_OUT_OF_RANGE = 1
    SLOT_WITHOUT_WEIGHTS = 2
    OUT_OF_MEMORY = 3
    NO_KERNEL = 4


_STATUS_WORDS = {
    Status.SLOT_OUT_OF_RANGE: "a slot id is below -1 or not below num_slots",
    Status.SLOT_WITHOUT_WEIGHTS: "a token was sent to a slot that holds no weights",
    Status.OUT_OF_MEMORY: "no memory for the workspace",
    Status.NO_KERNEL: "the core has no kernel for this level and format",
}

# Features of trimtab.kernels.features that a kernel needs: what the user hides there is hidden here too.
_LEVEL_FEATURES = {Level.AVX2: {"avx2"}, Level.AVX512: {"avx512f"}}
_FORMAT_FEATURES = {Format.FP32: set[str](), Format.BF16: {"avx512_bf16"}, Format.INT8: {"avx512_vnni"}}

SCALARS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}


class MoeLayerStruct(ctypes.Structure):
    """TrimtabMoeLayer of csrc/api.cpp."""

    _fields_ = (
        ("hidden_size", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("slot_table", ctypes.c_void_p),
        ("level", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("has_gate", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "trimtab_version": (_INT, []),
    "trimtab_cpu_supports": (_INT, [_INT, _INT]),
    "trimtab_kernel_name": (ctypes.c_char_p, [_INT, _INT]),
    "trimtab_self_test": (_INT, [_INT, _INT, ctypes.c_char_p, _LONG]),
    "trimtab_slot_bytes": (_LONG, [_INT, _LONG, _LONG, _INT]),
    "trimtab_pack_slot": (None, [_INT, _LONG, _LONG, _INT, *[_POINTER] * 7]),
    "trimtab_unpack_slot": (None, [_INT, _LONG, _LONG, _INT, *[_POINTER] * 7]),
    "trimtab_linear_bytes": (_LONG, [_INT, _LONG, _LONG]),
    "trimtab_pack_linear": (None, [_INT, _LONG, _LONG, *[_POINTER] * 4]),
    "trimtab_unpack_linear": (None, [_INT, _LONG, _LONG, *[_POINTER] * 4]),
    "trimtab_moe": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _LONG, _LONG, _INT]),
    "trimtab_experts_in_place": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _LONG, _INT]),
    "trimtab_linear": (_INT, [_INT, _INT, _LONG, _LONG, _POINTER, _POINTER, _INT, _POINTER, _INT, _LONG, _INT]),
    "trimtab_attention_block_size_allowed": (_INT, [_LONG]),
    "trimtab_attention": (_INT, [_INT, _POINTER]),
    "trimtab_rms_norm": (None, [_INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_float, _INT]),
    "trimtab_look_up": (_INT, [_POINTER, _POINTER, *[_LONG] * 4, _POINTER]),
    "trimtab_copy_past_caches": (None, [_POINTER, _POINTER, _LONG]),
    "trimtab_write_pages": (None, [_POINTER]),
    "trimtab_advise_huge_pages": (None, [_POINTER, _LONG]),
}


class NativeCore:
    """The loaded library: one Python method per C function, pointers and integers only.

    ctypes releases the GIL for the length of each call. Raises OSError when `path` cannot be loaded or is of another
    version than this package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise OSError(f"{path} has no {name}: it was built from other sources; {_REBUILD}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name.removeprefix("trimtab_"), function)
        if (version := self.version()) != _VERSION:
            raise OSError(f"{path} has version {version}, this package needs {_VERSION}; {_REBUILD}")

    def __getattr__(self, name: str) -> Any:  # the functions set in __init__, for type checkers
        raise AttributeError(name)

    def self_test_error(self, level: Level, weight_format: Format) -> str | None:
        """What the kernel computed wrongly, or None."""
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = self.self_test(level, weight_format, message, _MESSAGE_BYTES)
        return message.value.decode() if failed else None


_REBUILD = "run python -m trimtab.kernels.native.build"


def check_status(status: int) -> None:
    """Raises RuntimeError for every status but OK: the message says what the data held."""
    if status != Status.OK:
        raise RuntimeError(f"native kernel: {_STATUS_WORDS[Status(status)]}")


class KernelChoice(NamedTuple):
    """One line of `trimtab inspect --kernels`."""

    name: str
    chosen: str
    reason: str


@dataclass(frozen=True)
class NativeKernels:
    """The core and, for each weight format that may use it, the chosen level."""

    core: NativeCore | None
    levels: Mapping[Format, Level]
    choices: tuple[KernelChoice, ...]

    def supports(self, weight_format: Format) -> bool:
        return weight_format in self.levels


def requested_level(value: str | None) -> Level | str | None:
    """`TRIMTAB_NATIVE` as a level, "off", or None when unset. Raises ValueError for any other word."""
    if not value:
        return None
    words: dict[str, Level | str] = {"off": "off", "avx2": Level.AVX2, "avx512": Level.AVX512}
    if value.lower() not in words:
        raise ValueError(f"{LEVEL_VARIABLE}={value!r} is not one of {', '.join(words)}; unset it to choose by CPU")
    return words[value.lower()]


def choose_kernels(
    core: NativeCore, forced: Level | None = None, features: frozenset[str] | None = None
) -> NativeKernels:
    """The fastest level per format that this CPU runs and that passes its self-test.

    `features` keeps to kernels that need no others (None: whatever the core finds). `forced` allows that level only;
    where the CPU lacks it for every format, raises ValueError. A kernel that fails
    its self-test is reported at WARNING and the next lower level is tried: wrong output is worse than slow output.
    """

    def runs(level: Level, weight_format: Format) -> bool:
        needed = _LEVEL_FEATURES[level] | (_FORMAT_FEATURES[weight_format] if level is Level.AVX512 else set())
        return bool(core.cpu_supports(level, weight_format)) and (features is None or needed <= features)

    candidates = [forced] if forced else sorted(Level, reverse=True)
    if forced and not any(runs(forced, weight_format) for weight_format in Format):
        raise ValueError(
            f"{LEVEL_VARIABLE}={forced.name.lower()}, but this CPU lacks these instructions; unset it or use off"
        )
    levels: dict[Format, Level] = {}
    choices = []
    for weight_format in Format:
        reasons = [f"{LEVEL_VARIABLE} forces {forced.name.lower()}"] if forced else []
        for level in candidates:
            name = core.kernel_name(level, weight_format).decode()
            if not runs(level, weight_format):
                reasons.append(f"this CPU cannot run {name}")
                continue
            if (error := core.self_test_error(level, weight_format)) is not None:
                reasons.append(f"{name} failed its self-test")
                logger.warning("native kernel %s failed its self-test and is not used: %s", name, error)
                continue
            levels[weight_format] = level
            reasons.append("self-test passed")
            break
        chosen = core.kernel_name(levels[weight_format], weight_format).decode() if weight_format in levels else "none"
        choices.append(KernelChoice(f"native {weight_format.name.lower()}", chosen, "; ".join(reasons)))
    return NativeKernels(core, levels, tuple(choices))


def _none(reason: str) -> NativeKernels:
    return NativeKernels(None, {}, (KernelChoice("native", "none", reason),))


@functools.cache
def native_kernels() -> NativeKernels:
    """The process's native kernels, chosen once and logged in one line; without any, all users fall back to torch."""
    forced = requested_level(os.environ.get(LEVEL_VARIABLE))
    if isinstance(forced, str):
        kernels = _none(f"{LEVEL_VARIABLE}={forced}")
    elif not CORE_PATH.exists():
        if forced:
            raise ValueError(f"{LEVEL_VARIABLE}={forced.name.lower()}, but the native core is not built; {_REBUILD}")
        kernels = _none(f"not built; {_REBUILD}")
    else:
        try:
            core = NativeCore(CORE_PATH)
        except OSError as error:
            logger.warning("native core not loaded: %s", error)
            kernels = _none(str(error))
        else:
            kernels = choose_kernels(core, forced, cpu_features())
    logger.info("native kernels: %s", "; ".join(f"{c.name} -> {c.chosen} ({c.reason})" for c in kernels.choices))
    return kernels
