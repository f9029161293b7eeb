"""What travels between the controller and its worker processes, as msgpack: data of known types, and no code.

Decoding checks every field's type, so a damaged message raises and cannot become anything but these records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from trimtab.engine.executor.detach import detach_zero_copy_from_model_runner_output
from trimtab.plan import StepOutput, StepPlan

_NDARRAY = 1  # msgpack extension code


class Step(msgspec.Struct, tag=True):
    """Controller to worker: run this plan."""

    plan: StepPlan


class Stop(msgspec.Struct, tag=True):
    """Controller to worker: end after the steps sent so far."""


class Loading(msgspec.Struct, tag=True):
    """Worker to controller: how far its start-up is."""

    rank: int
    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True):
    """Worker to controller: plans may come. `facts`: what it measured of itself (bytes, counts)."""

    rank: int
    facts: dict[str, int]


class Output(msgspec.Struct, tag=True):
    """Worker to controller: what a step gave on this rank."""

    rank: int
    output: StepOutput


class Heartbeat(msgspec.Struct, tag=True):
    """Worker to controller: the process runs, whatever its step is doing."""

    rank: int


class Failed(msgspec.Struct, tag=True):
    """Worker to controller: its last words."""

    rank: int
    reason: str
    is_mistake: bool  # a person's (ValueError), not a fault of ours or of the machine
    is_consequence: bool  # of another rank's fault


Command = Step | Stop
Report = Loading | Ready | Output | Heartbeat | Failed


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert not value.dtype.hasobject, "arrays of objects have no bytes to send"
        # dtype.str says the byte order too
        return msgspec.msgpack.Ext(_NDARRAY, _encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot cross a process boundary")


def _decode_view(code: int, data: memoryview) -> Any:
    """An array without a copy: read-only, over the message's own bytes."""
    if code != _NDARRAY:
        raise ValueError(f"msgpack extension {code} is not one of ours")
    dtype, shape, content = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    return np.frombuffer(content, dtype=np.dtype(dtype)).reshape(shape)


def _decode_extension(code: int, data: memoryview) -> Any:
    return _decode_view(code, data).copy()


def _decode_other(expected: type, value: Any) -> Any:
    if not isinstance(value, expected):
        raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
    return value


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
_decode_command = msgspec.msgpack.Decoder(Command, dec_hook=_decode_other, ext_hook=_decode_extension).decode
_decode_report = msgspec.msgpack.Decoder(Report, dec_hook=_decode_other, ext_hook=_decode_view).decode


def encode(message: Command | Report) -> bytes:
    return _encode(message)


def decode_command(data: bytes) -> Command:
    """Raises `msgspec.DecodeError` for anything that is no command."""
    return _decode_command(data)


def decode_report(data: bytes) -> Report:
    """Raises `msgspec.DecodeError` for anything that is no report. Its arrays are its own."""
    return detach_zero_copy_from_model_runner_output(_decode_report(data))


class WorkerStart(msgspec.Struct):
    """What a worker process reads first, from its stdin. `setup` is for the code that builds its runner."""

    rank: int
    folder: str  # of the sockets
    heartbeat_s: float  # between two
    setup: bytes


def encode_start(start: WorkerStart) -> bytes:
    return _encode(start)


def decode_start(data: bytes) -> WorkerStart:
    return msgspec.msgpack.decode(data, type=WorkerStart)


def encode_setup(setup: Mapping[str, Any]) -> bytes:
    """Plain values and arrays by name."""
    return _encode(setup)


def decode_setup(data: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=_decode_extension)
