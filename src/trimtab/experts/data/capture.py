"""Where the chosen experts of a step are seen: before they become slots, in logical ids."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Capture(Protocol):
    """Sees each layer's expert ids [T, K] once per forward, in the order of the batch's tokens; -1 is padding."""

    def record(self, ordinal: int, expert_ids: Tensor) -> None: ...


class NoCapture:
    """Capture that is off."""

    def record(self, ordinal: int, expert_ids: Tensor) -> None:
        return None


class NoCapturer:
    """A runner's capture that is off; `trimtab.experts.data.capturer` has the one that is on."""

    def get_routed_experts(self, slot_mappings: Mapping[int, Tensor], num_tokens: int) -> None:
        return None


class HasCapture(Protocol):
    """A layer whose capture can be exchanged."""

    capture: Capture


class ExpertUsage:
    """Counts tokens per [layer, expert] on the host while attached: for pictures and tests."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self._lock = threading.Lock()

    def add(self, ordinal: int, expert_ids: Tensor) -> None:
        ids = expert_ids.reshape(-1)
        counts = torch.bincount(ids[ids >= 0], minlength=self.counts.shape[1])
        with self._lock:  # ranks can be threads that share this object
            self.counts[ordinal] += counts

    def reset(self) -> None:
        self.counts.zero_()

    def attach(self, layers: Sequence[HasCapture]) -> None:
        """Counts these layers from now on; what captured them before goes on seeing everything."""
        for layer in layers:
            layer.capture = _CountingCapture(self, layer.capture)

    def detach(self, layers: Sequence[HasCapture]) -> None:
        """Puts back what `attach` found."""
        for layer in layers:
            assert isinstance(layer.capture, _CountingCapture), "detach without attach"
            layer.capture = layer.capture.inner


class _CountingCapture:
    def __init__(self, usage: ExpertUsage, inner: Capture) -> None:
        self.usage = usage
        self.inner = inner

    def record(self, ordinal: int, expert_ids: Tensor) -> None:
        self.usage.add(ordinal, expert_ids)
        self.inner.record(ordinal, expert_ids)
