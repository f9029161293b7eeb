"""Where the load of a rank's slots is counted: after the look-up, in slot ids."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LoadRecorder(Protocol):
    """Counts each layer's slot ids [T, K] of the tokens this rank owns; -1 is padding and no load."""

    def record(self, ordinal: int, slot_ids: Tensor) -> None: ...


class NoLoadRecorder:
    """Recording that is off."""

    def record(self, ordinal: int, slot_ids: Tensor) -> None:
        return None
