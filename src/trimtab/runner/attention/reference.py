"""The mathematics of paged attention: one query and one dense fp32 softmax at a time. The oracle of the others."""

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
    """Plain torch, slow, obviously right."""

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
            first_position = seq_len - (starts[row + 1] - starts[row])
            first_visible = [
                0 if prepared.window is None else max(0, position - prepared.window + 1)
                for position in range(first_position, seq_len)
            ]
            positions = torch.arange(first_visible[0], seq_len)
            blocks = prepared.metadata.block_table[row].long()[positions // prepared.block_size]
            offsets = positions % prepared.block_size
            keys = cache.keys[blocks, offsets].float().repeat_interleave(group_size, dim=1)  # [L, Hq, Dk]
            values = cache.values[blocks, offsets].float().repeat_interleave(group_size, dim=1)
            for i, first in enumerate(first_visible):
                seen = slice(first - first_visible[0], first_position + i + 1 - first_visible[0])
                scores = torch.einsum("hd,lhd->hl", query[starts[row] + i].float(), keys[seen]) * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.float().unsqueeze(1)], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : seen.stop - seen.start]
                out[starts[row] + i] = torch.einsum("hl,lhd->hd", weights, values[seen]).to(out.dtype)
        return out
