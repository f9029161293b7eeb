"""Every attention backend against the dense mathematics, on ragged chunked batches over a fragmented cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from trimtab.plan import KVCacheConfig
from trimtab.runner.attention import choose_backend, portable
from trimtab.runner.attention.base import AttentionBackend, AttentionMetadata, AttentionStep, PagedAttention
from trimtab.runner.attention.kv_cache import PagedKVCache, group_layers
from trimtab.runner.attention.native import native_backend
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

    `run` sends chunks of rows through a backend. Block tables are drawn from a shuffled pool; blocks wholly before the
    window name the null block 0.
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
        self.cache = PagedKVCache(config, [spec], dtype, pages=backend.pages)
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
        # As models hand them over: heads first in memory.
        query, key, value = (
            torch.cat([tokens[row][a:b].transpose(0, 1) for row, a, b in spans], dim=1).transpose(0, 1)
            for tokens in (self.query, self.key, self.value)
        )
        out = self.layer(
            query,
            key,
            value,
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


def native(dtype: torch.dtype = torch.float32) -> AttentionBackend:
    found = native_backend(dtype, 16)
    if isinstance(found, str):
        pytest.skip(f"no native attention: {found}")
    return found


BACKENDS = {"reference": ReferenceAttention, "portable": PortableAttention, "native": native}
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


@pytest.mark.parametrize(
    ("backend", "block_size"),
    [("portable", 1), ("portable", 5), ("portable", 16), ("reference", 5), ("native", 16), ("native", 32)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_chunked_batches_equal_dense_attention(shape: str, block_size: int, backend: str) -> None:
    """B93: windows and sinks on prompts below, at and beyond the window, prefill, chunked prefill and decode.
    Unwritten positions are NaN, so that reading one shows."""
    rows = PagedRows(SHAPES[shape], LENGTHS, block_size, BACKENDS[backend](), seed=block_size)
    for row, out in enumerate(run_all(rows)):
        torch.testing.assert_close(out, rows.dense(row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["grouped heads", "sinks and window 8", "softcap", "values smaller than keys"])
def test_contexts_longer_than_a_piece_are_attended_whole(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of keys meet by their log-sum-exp; tiles of queries split long chunks: small limits reach every path."""
    monkeypatch.setattr(portable, "KEY_PIECE_TOKENS", 7)
    monkeypatch.setattr(portable, "WINDOW_QUERY_TILE", 5)
    monkeypatch.setattr(portable, "DENSE_SCORES", 64)
    rows = PagedRows(SHAPES[shape], LENGTHS, 4, PortableAttention(), seed=3)
    for row, out in enumerate(run_all(rows)):
        torch.testing.assert_close(out, rows.dense(row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["grouped heads", "sinks and window 8", "values smaller than keys"])
def test_half_precision_caches_lose_only_the_last_rounding(shape: str, dtype: torch.dtype) -> None:
    """Keys and values are read as stored and attended in fp32, as in the dense run over the same rounded inputs, so
    only the output's own rounding remains: half a unit in the last place, relative 2**-8 (bf16) or 2**-11 (fp16)."""
    backends = [(5, PortableAttention())] + ([(16, native(dtype))] if dtype == torch.bfloat16 else [])
    for block_size, backend in backends:
        rows = PagedRows(SHAPES[shape], LENGTHS, block_size, backend, dtype=dtype, seed=4)
        for row, out in enumerate(run_all(rows)):
            torch.testing.assert_close(out, rows.dense(row), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(("backend", "block_size"), [("portable", 4), ("native", 16)])
@pytest.mark.parametrize("shape", ["grouped heads", "one key head", "sinks and window 8", "softcap"])
def test_a_rows_result_is_bitwise_the_same_alone_and_in_company(shape: str, backend: str, block_size: int) -> None:
    """B109. The last step decodes seven rows together: some of like length, gathered together, some not."""
    lengths = [40, 9, 23, 41, 39, 90, 38]
    prefill = [(row, n - 1) for row, n in enumerate(lengths)]
    together = PagedRows(SHAPES[shape], lengths, block_size, BACKENDS[backend](), seed=6)
    prefilled = together.run(prefill)
    decoded = together.run([(row, 1) for row in range(len(lengths))])
    alone = PagedRows(SHAPES[shape], lengths, block_size, BACKENDS[backend](), seed=6)
    for row, count in prefill:
        assert torch.equal(alone.run([(row, count)])[0], prefilled[row])
        assert torch.equal(alone.run([(row, 1)])[0], decoded[row])


def test_padded_lengths_cover_the_row_and_waste_at_most_a_quarter_beyond_128() -> None:
    for length in range(1, 5000):
        padded = portable.padded_length(length)
        assert padded >= length and (length < 128 or padded <= 1.25 * length)


def test_attention_outside_a_step_is_an_assertion() -> None:
    rows = PagedRows(LayerShape(), [3], 4, PortableAttention())
    rows.run([(0, 2)])
    with pytest.raises(AssertionError, match="outside a step"):
        rows.layer(rows.query[0], rows.key[0], rows.value[0], scaling=1.0)


def test_a_layer_asking_for_another_window_than_its_groups_is_an_assertion() -> None:
    rows = PagedRows(LayerShape(window=8), [3], 4, PortableAttention())
    metadata = AttentionMetadata.from_host(
        np.array([0, 1]), np.array([1]), np.array([[1]], dtype=np.int32), np.array([4])
    )
    rows.step.begin({0: metadata})
    with pytest.raises(AssertionError, match="layer 0 asked for window None, its KV group has 8"):
        rows.layer(rows.query[0][:1], rows.key[0][:1], rows.value[0][:1], scaling=1.0, window=None)


def test_a_step_that_was_not_cleared_is_an_assertion() -> None:
    rows = PagedRows(LayerShape(), [3], 4, PortableAttention())
    metadata = AttentionMetadata.from_host(
        np.array([0, 1]), np.array([1]), np.array([[1]], dtype=np.int32), np.array([4])
    )
    rows.step.begin({0: metadata})
    with pytest.raises(AssertionError, match="not cleared"):
        rows.step.begin({0: metadata})


def test_backends_are_chosen_by_name_and_unknown_ones_refused() -> None:
    assert choose_backend("cpu", torch.float16, 16).name == "portable", "the native core has no float16 pages"
    assert choose_backend("cpu", torch.float32, 5).name == "portable", "a block of 5 is not whole vectors"
    assert choose_backend("cpu", torch.float32, 16, "reference").name == "reference"
    with pytest.raises(ValueError, match=r"attention backend \('native'\) cannot serve here: block_size 5"):
        choose_backend("cpu", torch.float32, 5, "native")
    with pytest.raises(ValueError, match=r"attention backend \('flash9'\) must be one of"):
        choose_backend("cpu", torch.float32, 16, "flash9")
