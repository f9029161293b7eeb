"""What a model needs in memory on each rank: arithmetic on a `ModelSpec`, nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank. Every rank holds all dense weights and its own slots of each MoE layer."""

    num_ranks: int
    num_slots_per_layer: int
    dense_bytes: int
    expert_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes


def rank_memory(spec: ModelSpec, num_ranks: int = 1, num_redundant_experts: int = 0) -> RankMemory:
    """Weights of one of `num_ranks` data-parallel ranks that share the experts, redundant ones included.

    Raises `ValueError` when a layer's slots do not divide over the ranks.
    """
    if num_ranks < 1:
        raise ValueError(f"data_parallel_size ({num_ranks}) must be at least 1; 1 is a single rank")
    if num_redundant_experts < 0:
        raise ValueError(f"num_redundant_experts ({num_redundant_experts}) must be at least 0; 0 adds no replica")
    for layer in spec.moe_layers:
        missing = -(layer.num_experts + num_redundant_experts) % num_ranks
        if missing:
            raise ValueError(
                f"num_redundant_experts ({num_redundant_experts}) and the {layer.num_experts} experts of layer "
                f"{layer.layer_id} must divide over data_parallel_size ({num_ranks}); "
                f"try num_redundant_experts {num_redundant_experts + missing}"
            )
    slots = [(layer.num_experts + num_redundant_experts) // num_ranks for layer in spec.moe_layers]
    parameters = sum(n * layer.shape.num_parameters for n, layer in zip(slots, spec.moe_layers, strict=True))
    return RankMemory(
        num_ranks=num_ranks,
        num_slots_per_layer=max(slots, default=0),
        dense_bytes=spec.num_bytes - spec.num_expert_bytes,
        expert_bytes=parameters * spec.dtype.itemsize,
    )


def kv_bytes_per_token(spec: ModelSpec, *, windowed: bool | None = None) -> int:
    """KV cache bytes of one token over all attention layers, or only those with (without) a sliding window."""
    layers = [layer for layer in spec.attention_layers if windowed in (None, layer.window is not None)]
    return sum(layer.num_kv_heads * (layer.key_size + layer.value_size) for layer in layers) * spec.dtype.itemsize


def format_bytes(count: float) -> str:
    """`count` bytes in the largest unit that leaves at least 1, with three figures."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def format_count(count: float) -> str:
    """`count` with K, M or B (thousand million), three figures."""
    for limit, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"
