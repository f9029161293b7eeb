"""The contract of a dispatcher: tokens reach the ranks that hold their slots, and their sums come back."""

# T tokens  K top-k  H hidden size

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Dispatcher(Protocol):
    """`dispatch` sends rows with their slot ids and gate weights; `combine` brings each token's sum home."""

    def dispatch(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def combine(self, partial: Tensor) -> Tensor: ...
