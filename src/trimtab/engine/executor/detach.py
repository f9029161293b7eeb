"""Outputs that came through a channel between processes let go of it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_PLAIN = (bool, int, float, str, bytes, type(None), np.generic, enum.Enum)


def detach_zero_copy_from_model_runner_output(record: T) -> T:
    """The record of a step, or any part of it, in which no array is a view of the channel's memory any more.

    An array that came without a copy is read-only: each of them, in whatever field, is replaced by a copy; a view that
    an output kept would hold the channel's buffer, and the sender would wait for it some steps later. Containers keep
    their types, and those that can be changed their identity; what holds no such array stays as it is.

    Raises TypeError for a value of a kind it cannot look into.
    """
    return _detached(record)


def _detached(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _detached(item)) is not item:
                value[index] = found
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            if (found := _detached(item)) is not item:
                value[key] = found  # of a key that is there: the walk goes on
        return value
    if isinstance(value, tuple):
        items = [_detached(item) for item in value]
        if all(found is item for found, item in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, msgspec.Struct):
        return _with_fields(value, value.__struct_fields__, msgspec.structs.replace)
    if dataclasses.is_dataclass(value):
        return _with_fields(value, [field.name for field in dataclasses.fields(value)], dataclasses.replace)
    raise TypeError(f"a {type(value).__name__} in a step's output cannot be searched for arrays; give it a dataclass")


def _with_fields(record: Any, names: Any, replace: Any) -> Any:
    """The record where it can be changed or need not be, else a new one."""
    changed = {}
    for name in names:
        item = getattr(record, name)
        if (found := _detached(item)) is not item:
            changed[name] = found
    if not changed:
        return record
    try:
        for name, found in changed.items():
            setattr(record, name, found)
    except AttributeError:  # frozen
        return replace(record, **changed)
    return record
