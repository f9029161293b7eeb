"""The mathematics of paged attention: one row, one head, one dense fp32 softmax at a time. The oracle of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.runner.attention.base import AttentionMetadata
from trimtab.runner.attention.kv_cache import LayerCache, TokenMajorPages


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    metadata: AttentionMetadata
    window: int | None
    block_size: int


class ReferenceAttention:
    """Plain torch, slow, obviously right. Reads the cache one position at a time."""

    name = "reference"
    pages = TokenMajorPages()

    def prepare(self, metadata: AttentionMetadata, window: int | None, block_size: int) -> _Batch:
        return _Batch(metadata, window, block_size)

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
        num_heads, num_kv_heads, value_size = query.shape[1], cache.values.shape[2], cache.values.shape[3]
        group_size = num_heads // num_kv_heads
        out = query.new_empty(query.shape[0], num_heads, value_size)
        starts = prepared.metadata.query_start.tolist()
        for row, seq_len in enumerate(prepared.metadata.seq_lens.tolist()):
            table = prepared.metadata.block_table[row].tolist()
            first_position = seq_len - (starts[row + 1] - starts[row])
            for i, token in enumerate(range(starts[row], starts[row + 1])):
                position = first_position + i
                first_visible = 0 if prepared.window is None else max(0, position - prepared.window + 1)
                visible = range(first_visible, position + 1)
                slots = [divmod(p, prepared.block_size) for p in visible]
                keys = torch.stack([cache.keys[table[block], offset] for block, offset in slots]).float()
                values = torch.stack([cache.values[table[block], offset] for block, offset in slots]).float()
                for head in range(num_heads):
                    scores = keys[:, head // group_size] @ query[token, head].float() * scaling
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head].float().reshape(1)])
                    weights = torch.softmax(scores, dim=0)[: len(visible)]
                    out[token, head] = (weights @ values[:, head // group_size]).to(out.dtype)
        return out
