"""Experts for the scripted model's tokens, and an independent record of which rows each request must be returned.

Rows are drawn anew whenever a position is computed, so that one that is computed again differs, and so do the rows of
requests that share a prompt. They are kept beside the fake KV memory: what a request attends to is what it is returned.
"""

from __future__ import annotations

import numpy as np

from trimtab.experts.routed_experts import RoutedExpertsLayout
from trimtab.plan import RoutedRows


class ScriptedRoutes:
    """One rank's. `expected[request_id]` holds a row per position, as each became known to the request first."""

    def __init__(self, layout: RoutedExpertsLayout, seed: int = 0) -> None:
        self.layout = layout
        self.expected: dict[str, list[np.ndarray]] = {}
        self.num_recomputed = 0  # positions whose row a request had already
        self.num_shared = 0  # positions whose row another request computed
        self._rng = np.random.default_rng(seed)
        self._memory: dict[int, np.ndarray] = {}  # KV slot -> row
        self._rows: list[np.ndarray] = []  # of the step so far
        self._slots: list[int] = []

    def compute(self, request_id: str, start: int, slots: list[int]) -> None:
        """`slots[p]` is where position p of the request lives; those from `start` on are computed now."""
        shape = (self.layout.num_layers, self.layout.top_k)
        for slot in slots[start:]:
            row = self._rng.integers(0, self.layout.num_experts, shape).astype(self.layout.dtype)
            self._memory[slot] = row
            self._rows.append(row)
            self._slots.append(slot)
        known = self.expected.setdefault(request_id, [])
        self.num_recomputed += max(min(len(known), len(slots)) - start, 0)
        self.num_shared += max(start - len(known), 0)
        known += [self._memory[slot] for slot in slots[len(known) :]]

    def take(self) -> RoutedRows | None:
        """The step's rows, in the order of its tokens; None for an idle rank."""
        rows, slots = self._rows, self._slots
        self._rows, self._slots = [], []
        return RoutedRows(np.stack(rows), np.array(slots, np.int64)) if rows else None
