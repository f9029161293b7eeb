"""The paged key/value cache: one byte buffer per layer position, shared by the layers of all KV cache groups."""

# N blocks  S block size (tokens)  Hkv key/value heads  Dk key size  Dv value size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from trimtab.plan import KVCacheConfig, KVCacheGroupSpec

if TYPE_CHECKING:
    from trimtab.models.spec import AttentionSpec


def layer_bytes_per_token(spec: AttentionSpec, dtype: torch.dtype) -> int:
    return spec.num_kv_heads * (spec.key_size + spec.value_size) * dtype.itemsize


def group_layers(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> tuple[KVCacheGroupSpec, ...]:
    """KV cache groups of a model: full attention first, then one group per distinct window, widest first."""
    windows = sorted({spec.window for spec in specs}, key=lambda window: (window is not None, -(window or 0)))
    groups = []
    for window in windows:
        members = [spec for spec in specs if spec.window == window]
        groups.append(
            KVCacheGroupSpec(
                layer_ids=tuple(spec.layer_id for spec in members),
                window=window,
                bytes_per_token=sum(layer_bytes_per_token(spec, dtype) for spec in members),
            )
        )
    return tuple(groups)


def kv_cache_bytes_per_token(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> int:
    """What a block costs per token: the sum over layer positions of the dearest group's layer there."""
    return sum(_buffer_bytes_per_token(specs, group_layers(specs, dtype), dtype))


def _buffer_bytes_per_token(
    specs: Sequence[AttentionSpec], groups: Sequence[KVCacheGroupSpec], dtype: torch.dtype
) -> list[int]:
    by_id = {spec.layer_id: spec for spec in specs}
    num_buffers = max((len(group.layer_ids) for group in groups), default=0)
    return [
        max(layer_bytes_per_token(by_id[group.layer_ids[j]], dtype) for group in groups if j < len(group.layer_ids))
        for j in range(num_buffers)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's view of its buffer. A block's keys come first, then its values; blocks of a layer smaller than its
    buffer leave a gap, because the other groups' layers own other blocks of the same buffer."""

    keys: torch.Tensor  # [N, S, Hkv, Dk], strided over the buffer
    values: torch.Tensor  # [N, S, Hkv, Dv]


class PageShape(NamedTuple):
    """How one layer's pages lie in its buffer: page i starts at element i * stride."""

    num_blocks: int
    stride: int
    block_size: int
    num_kv_heads: int
    key_size: int
    value_size: int


class PageLayout(Protocol):
    """The order of a page's elements. Views look the same in every layout; `write` knows the fast way in."""

    def view(self, buffer: torch.Tensor, page: PageShape) -> LayerCache: ...

    def write(self, layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None: ...


class TokenMajorPages:
    """Token after token, as torch's kernels like it."""

    def view(self, buffer: torch.Tensor, page: PageShape) -> LayerCache:
        def part(size: int, offset: int) -> torch.Tensor:
            shape = (page.num_blocks, page.block_size, page.num_kv_heads, size)
            return buffer.as_strided(shape, (page.stride, page.num_kv_heads * size, size, 1), offset)

        return LayerCache(
            keys=part(page.key_size, 0),
            values=part(page.value_size, page.block_size * page.num_kv_heads * page.key_size),
        )

    def write(self, layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        block_size = layer.keys.shape[1]
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        offsets = slot_mapping - blocks * block_size
        layer.keys[blocks, offsets] = key.to(layer.keys.dtype)
        layer.values[blocks, offsets] = value.to(layer.values.dtype)


class PagedKVCache:
    """Keys and values of every layer, in blocks. The memory is what `KVCacheConfig` says, to the byte (`num_bytes`).

    Nothing is initialised: pages become resident when a block is first written, and readers never look at a position
    that was not written. `dtype` is the model's.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pages: PageLayout | None = None,
    ) -> None:
        self.config = config
        self._pages = pages or TokenMajorPages()
        self.block_size = config.block_size
        per_token = _buffer_bytes_per_token(specs, config.groups, dtype)
        block_values = [config.block_size * size // dtype.itemsize for size in per_token]
        self._buffers = [torch.empty(config.num_blocks * size, dtype=dtype, device=device) for size in block_values]
        by_id = {spec.layer_id: spec for spec in specs}
        self._layers: dict[int, LayerCache] = {}
        for group in config.groups:
            for buffer, stride, layer_id in zip(self._buffers, block_values, group.layer_ids, strict=False):
                self._layers[layer_id] = self._view(buffer, stride, by_id[layer_id])
        assert set(self._layers) == set(by_id), "every attention layer belongs to exactly one KV cache group"

    def _view(self, buffer: torch.Tensor, stride: int, spec: AttentionSpec) -> LayerCache:
        sizes = (spec.num_kv_heads, spec.key_size, spec.value_size)
        return self._pages.view(buffer, PageShape(self.config.num_blocks, stride, self.block_size, *sizes))

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def layer(self, layer_id: int) -> LayerCache:
        return self._layers[layer_id]

    def write(self, layer_id: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores key [T, Hkv, Dk] and value [T, Hkv, Dv] at slots [T] (block * block_size + offset)."""
        self._pages.write(self._layers[layer_id], key, value, slot_mapping)
