"""What the rows of captured routing are: the words that workers, which capture, and the engine, which stores, share.

No torch. A row is what one token chose in all MoE layers, by ordinal: logical expert ids in the router's order.
"""

# L MoE layers  K top-k

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from trimtab.plan import KVCacheConfig


@dataclass(frozen=True, slots=True)
class RoutedExpertsLayout:
    """The form of a row [L, K]."""

    layer_ids: tuple[int, ...]  # of the decoder layers, one per MoE layer
    num_experts: int  # ids are in [0, num_experts)
    top_k: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def dtype(self) -> np.dtype:
        """The narrowest that holds every id."""
        return np.dtype(np.uint8 if self.num_experts <= 2**8 else np.uint16)

    @property
    def row_bytes(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """What the engine's store takes per KV slot: the row, the generation and the weights version it belongs to."""
        return self.row_bytes + 8 + 4


class RoutedLayer(Protocol):
    """What the layout needs to know of a MoE layer."""

    @property
    def layer_id(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...


def routed_experts_layout(layers: Sequence[RoutedLayer]) -> RoutedExpertsLayout:
    """The layout of a model's MoE layers, in their order.

    Raises ValueError where there are none, and where they differ in top-k: rows filled up with ids that nobody chose
    would be read as choices.
    """
    if not layers:
        raise ValueError("enable_return_routed_experts needs a model with MoE layers; this one has none, switch it off")
    choices = sorted({layer.top_k for layer in layers})
    if len(choices) != 1:
        per_layer = ", ".join(f"{layer.layer_id}: {layer.top_k}" for layer in layers)
        raise ValueError(
            f"enable_return_routed_experts needs MoE layers with one number of experts per token; this model has "
            f"{choices} (layer: experts per token: {per_layer}); switch it off"
        )
    num_experts = max(layer.num_experts for layer in layers)
    if num_experts > 2**16:
        raise ValueError(f"enable_return_routed_experts stores expert ids below {2**16}; this model has {num_experts}")
    return RoutedExpertsLayout(tuple(layer.layer_id for layer in layers), num_experts, choices[0])


def get_routed_experts_attn_gid(kv_cache_config: KVCacheConfig) -> int:
    """The KV cache group whose slots name the rows: the first with full attention (MLA counts as such).

    A sliding window gives its blocks back while their tokens' rows are still wanted. Raises ValueError without one.
    """
    for gid, group in enumerate(kv_cache_config.groups):
        if group.window is None:
            return gid
    windows = [group.window for group in kv_cache_config.groups]
    raise ValueError(
        f"enable_return_routed_experts needs a layer with full attention, whose KV blocks live as long as their "
        f"request; this model's layers all have sliding windows ({windows}); switch it off"
    )
