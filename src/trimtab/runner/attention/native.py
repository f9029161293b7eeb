"""Paged attention by the native core: one fused call per layer over transposed pages, for any mix of rows."""

# T query tokens  Hq query heads  Dk key size  Dv value size

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.kernels.native.attention import NativeAttention, native_attention, paged_view
from trimtab.runner.attention.base import AttentionMetadata
from trimtab.runner.attention.kv_cache import LayerCache, PageShape


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    metadata: AttentionMetadata
    block_table: torch.Tensor  # int32, rows contiguous
    window: int | None


class TransposedPages:
    """Keys transposed within a page, so that the kernel reads a coordinate of many tokens as one vector."""

    def __init__(self, kernel: NativeAttention) -> None:
        self._kernel = kernel

    def view(self, buffer: torch.Tensor, page: PageShape) -> LayerCache:
        sizes = (page.key_size, page.value_size)
        return LayerCache(*paged_view(buffer, page.num_blocks, page.stride, page.block_size, page.num_kv_heads, sizes))

    def write(self, layer: LayerCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        dtype = layer.keys.dtype
        self._kernel.write(layer.keys, layer.values, key.to(dtype), value.to(dtype), slot_mapping)


class NativeBackend:
    """Float32 and bfloat16 on the CPU; sums in float32. A query's result is bitwise the same in any batch."""

    name = "native"

    def __init__(self, kernel: NativeAttention) -> None:
        self._kernel = kernel
        self.pages = TransposedPages(kernel)

    def prepare(self, metadata: AttentionMetadata, window: int | None, block_size: int) -> _Batch:
        return _Batch(metadata, metadata.block_table.contiguous(), window)

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        prepared: _Batch,
        *,
        scaling: float,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        return self._kernel.attend(
            query.to(cache.keys.dtype),
            cache.keys,
            cache.values,
            block_table=prepared.block_table,
            query_start=prepared.metadata.query_start,
            seq_lens=prepared.metadata.seq_lens,
            window=prepared.window,
            scaling=scaling,
            sinks=sinks,
            softcap=softcap,
        ).to(query.dtype)


def native_backend(dtype: torch.dtype, block_size: int) -> NativeBackend | str:
    """The backend for pages of this dtype and block size, or why there is none."""
    kernel = native_attention(dtype, block_size)
    return kernel if isinstance(kernel, str) else NativeBackend(kernel)
