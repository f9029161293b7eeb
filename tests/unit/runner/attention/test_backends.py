"""Every attention backend against the dense mathematics, on ragged chunked batches over a fragmented cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from trimtab.plan import KVCacheConfig
from trimtab.runner.attention.base import AttentionBackend, AttentionMetadata, AttentionStep, PagedAttention
from trimtab.runner.attention.kv_cache import PagedKVCache, group_layers
from trimtab.runner.attention.portable import PortableAttention
from trimtab.runner.attention.reference import ReferenceAttention


@dataclass(frozen=True)
class LayerShape:
    layer_id: int = 0
    num_heads: int = 4
    num_kv_heads: int = 2
    key_size: int = 8
    value_size: int = 8
    window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None


class PagedRows:
    """One layer's cache, its unwritten positions NaN, and some rows of random tokens.

    `run` sends chunks of rows through a backend. Block tables are drawn from a shuffled pool; blocks wholly before the window name the null block 0.
    """

    def __init__(
        self,
        spec: LayerShape,
        lengths: list[int],
        block_size: int,
        backend: AttentionBackend,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.spec, self.block_size, self.dtype = spec, block_size, dtype
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.query = [random(n, spec.num_heads, spec.key_size) for n in lengths]
        self.key = [random(n, spec.num_kv_heads, spec.key_size) for n in lengths]
        self.value = [random(n, spec.num_kv_heads, spec.value_size) for n in lengths]
        self.sinks = random(spec.num_heads) if spec.has_sinks else None
        self.scaling = spec.key_size**-0.5
        blocks_per_row = [-(-n // block_size) for n in lengths]
        num_blocks = 1 + sum(blocks_per_row) + 3
        config = KVCacheConfig(block_size, num_blocks, group_layers([spec], dtype))
        self.cache = PagedKVCache(config, [spec], dtype)
        self.cache.layer(0).keys.fill_(float("nan"))
        self.cache.layer(0).values.fill_(float("nan"))
        pool = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.tables = [[pool.pop() for _ in range(count)] for count in blocks_per_row]
        self.written = [0] * len(lengths)
        self.step = AttentionStep(backend, block_size, (spec.window,))
        self.layer = PagedAttention(spec, 0, self.step, self.cache)

    def run(self, chunks: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Advances rows: chunks of (row, number of tokens). Returns each chunk's output [n, Hq, Dv]."""
        spans = [(row, self.written[row], self.written[row] + count) for row, count in chunks]
        width = max(len(self.tables[row]) for row, _ in chunks)
        table = np.zeros((len(chunks), width), dtype=np.int32)
        slots: list[int] = []
        for i, (row, start, end) in enumerate(spans):
            first = 0 if self.spec.window is None else max(0, start - self.spec.window + 1) // self.block_size
            used = -(-end // self.block_size)
            table[i, first:used] = self.tables[row][first:used]
            slots += [
                self.tables[row][p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, end)
            ]
            self.written[row] = end
        metadata = AttentionMetadata.from_host(
            np.cumsum([0] + [count for _, count in chunks]),
            np.array([end for _, _, end in spans]),
            table,
            np.array(slots),
        )
        self.step.begin({0: metadata})
        out = self.layer(
            torch.cat([self.query[row][a:b] for row, a, b in spans]),
            torch.cat([self.key[row][a:b] for row, a, b in spans]),
            torch.cat([self.value[row][a:b] for row, a, b in spans]),
            scaling=self.scaling,
            window=self.spec.window,
            sinks=self.sinks,
            softcap=self.spec.softcap,
        )
        self.step.clear()
        return list(out.split([count for _, count in chunks]))

    def dense(self, row: int) -> torch.Tensor:
        """All of a row at once, without a cache: fp32 [n, Hq, Dv], by torch's own attention where it can."""
        spec = self.spec
        groups = spec.num_heads // spec.num_kv_heads
        q = self.query[row].float().transpose(0, 1)
        k = self.key[row].float().repeat_interleave(groups, 1).transpose(0, 1)
        v = self.value[row].float().repeat_interleave(groups, 1).transpose(0, 1)
        n = q.shape[1]
        distance = torch.arange(n).unsqueeze(1) - torch.arange(n)
        visible = distance >= 0
        if spec.window is not None:
            visible &= distance < spec.window
        if self.sinks is None and spec.softcap is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scaling)
            return out.transpose(0, 1)
        scores = q @ k.transpose(1, 2) * self.scaling
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.float().view(-1, 1, 1).expand(-1, n, 1)], dim=-1)
        return (torch.softmax(scores, -1)[..., :n] @ v).transpose(0, 1)


SHAPES = {
    "grouped heads": LayerShape(),
    "one head per key head": LayerShape(num_heads=3, num_kv_heads=3),
    "one key head": LayerShape(num_heads=4, num_kv_heads=1, key_size=5, value_size=5),
    "window 1": LayerShape(window=1),
    "window 8": LayerShape(window=8),
    "window beyond the context": LayerShape(window=1000),
    "sinks": LayerShape(has_sinks=True),
    "sinks and window 8": LayerShape(has_sinks=True, window=8),
    "softcap": LayerShape(softcap=1.5),
    "softcap, sinks and window 8": LayerShape(softcap=1.5, has_sinks=True, window=8),
    "values smaller than keys": LayerShape(num_heads=2, num_kv_heads=2, key_size=12, value_size=8),
    "values larger than keys": LayerShape(key_size=4, value_size=6),
}
BACKENDS = {"reference": ReferenceAttention, "portable": PortableAttention}
# Row lengths and, per step, (row, tokens): prefill, chunked prefill that continues, decode, all mixed.
LENGTHS = [40, 9, 23, 8, 33]
STEPS = [
    [(0, 17), (1, 8)],
    [(1, 1), (0, 20), (2, 1)],
    [(2, 21), (0, 1), (3, 4), (4, 32)],
    [(0, 1), (2, 1), (3, 4), (4, 1)],
    [(0, 1)],
]


def run_all(rows: PagedRows) -> list[torch.Tensor]:
    outputs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for chunks in STEPS:
        for (row, _), out in zip(chunks, rows.run(chunks), strict=True):
            outputs[row].append(out)
    return [torch.cat(parts).float() for parts in outputs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_chunked_batches_equal_dense_attention(shape: str, block_size: int, backend: str) -> None:
    """B93: windows and sinks on prompts below, at and beyond the window, prefill, chunked prefill and decode.
    Unwritten positions are NaN, so that reading one shows."""
    rows = PagedRows(SHAPES[shape], LENGTHS, block_size, BACKENDS[backend](), seed=block_size)
    for row, out in enumerate(run_all(rows)):
        torch.testing.assert_close(out, rows.dense(row), rtol=1e-5, atol=1e-5)
