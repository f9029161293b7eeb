"""Paged attention in plain torch, fast where torch allows: gathers a row's blocks into a workspace, then attends."""

# T query tokens  L keys  Hq query heads  Hkv key/value heads  G query heads per key/value head  D size of a head

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from trimtab.runner.attention.base import AttentionMetadata
from trimtab.runner.attention.kv_cache import LayerCache, TokenMajorPages

# Keys gathered at a time: bounds the workspace on long contexts; the pieces meet by their log-sum-exp.
KEY_PIECE_TOKENS = 4096
# Queries of a window layer share the keys of their tile: wide enough to amortise the gather, narrow enough that the
# masked corner stays small beside a usual window (128 to 4096).
WINDOW_QUERY_TILE = 256
# Decoding rows of like length are gathered together while their keys stay in the caches (measured: past a few MB one
# row at a time is faster, below it the call overhead dominates).
DECODE_BATCH_TOKENS = 4096
# Scores held at once by the softcap path.
DENSE_SCORES = 2**22


class _Piece(NamedTuple):
    """A run of keys of one row."""

    blocks: torch.Tensor  # int64: block ids to gather
    skip: int  # tokens of the first block before the run
    length: int
    mask: torch.Tensor | None  # fp32 [T, L], added to the scores
    causal: bool  # key i is seen by the queries from i on


class _Tile(NamedTuple):
    """Queries of one row that attend together. The last piece holds their own positions."""

    start: int
    end: int
    pieces: list[_Piece]


class _DecodeBatch(NamedTuple):
    """Rows with one query each whose contexts round up to the same length."""

    tokens: torch.Tensor  # int64 [n]
    blocks: torch.Tensor  # int64 [n * blocks per row]
    length: int
    unwritten: torch.Tensor  # int64: entries of the gathered [n * blocks per row * block_size] that hold no key
    mask: torch.Tensor  # fp32 [n, 1, 1, L]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    decode: list[_DecodeBatch]
    tiles: list[_Tile]


def padded_length(length: int) -> int:
    """Length a decoding row's keys are padded to: a function of the row alone, so that batch mates change nothing.

    Steps of an eighth of the length (at least 32) keep the waste small and the number of different lengths too.
    """
    step = max(32, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


class PortableAttention:
    """Works on any torch device. Computes in `compute_dtype`; rows are never mixed in one sum, so a row's result does
    not depend on the other rows of the step."""

    name = "portable"
    pages = TokenMajorPages()

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        # fp32 over a half-precision cache too. Measured on AVX2 (Zen 3): the bf16 kernel takes 1.2 to 1.8 times as long
        # for a prompt of 2048 and the same for decoding, and fp32 sums leave the output's rounding as the only loss.
        self.compute_dtype = compute_dtype
        self._workspaces: dict[str, torch.Tensor] = {}

    def prepare(self, metadata: AttentionMetadata, window: int | None, block_size: int) -> _Plan:
        starts, seq_lens = metadata.query_start_host, metadata.seq_lens_host
        table = metadata.block_table.to(torch.int64)
        decode: dict[int, list[int]] = defaultdict(list)
        tiles: list[_Tile] = []
        for row, (start, end, seq_len) in enumerate(
            zip(starts[:-1].tolist(), starts[1:].tolist(), seq_lens.tolist(), strict=True)
        ):
            visible = seq_len if window is None else min(seq_len, window)
            if end - start == 1 and visible <= KEY_PIECE_TOKENS:
                # The window's first position need not start a block: what the blocks hold before it is padding too.
                first_block = (seq_len - visible) // block_size
                decode[padded_length(seq_len - first_block * block_size)].append(row)
            else:
                tiles += _row_tiles(start, end, seq_len, window, block_size, table[row])
        batches = [
            _decode_batch(rows[i : i + size], length, metadata, table, window, block_size)
            for length, rows in sorted(decode.items())
            for size in [max(1, DECODE_BATCH_TOKENS // length)]
            for i in range(0, len(rows), size)
        ]
        return _Plan(batches, tiles)

    def attend(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        prepared: _Plan,
        *,
        scaling: float,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        num_tokens, num_heads, _ = query.shape
        num_kv_heads, value_size = cache.values.shape[2:]
        shape = (num_kv_heads, num_heads // num_kv_heads)
        out = query.new_empty(num_tokens, num_heads, value_size)
        sink_logits = None if sinks is None else sinks.float().view(shape)
        for batch in prepared.decode:
            keys, values = self._gather(cache, batch.blocks, len(batch.tokens), batch.unwritten)
            queries = self._queries(query[batch.tokens]).view(-1, *shape, query.shape[-1])
            attended, lse = _attend(
                queries,
                keys[..., : batch.length, :],
                values[..., : batch.length, :],
                batch.mask,
                False,
                scaling,
                softcap,
            )
            if sink_logits is not None:
                attended = attended * torch.sigmoid(lse - sink_logits).unsqueeze(-1)
            out[batch.tokens] = attended.reshape(-1, num_heads, value_size).to(out.dtype)
        for tile in prepared.tiles:
            queries = self._queries(query[tile.start : tile.end]).view(-1, *shape, query.shape[-1]).permute(1, 2, 0, 3)
            attended, lse = self._attend_tile(queries, cache, tile, scaling, softcap)
            if sink_logits is not None:
                attended = attended * torch.sigmoid(lse - sink_logits.unsqueeze(-1)).unsqueeze(-1)
            out[tile.start : tile.end].view(-1, *shape, value_size).copy_(attended.permute(2, 0, 1, 3))
        return out

    def _queries(self, query: torch.Tensor) -> torch.Tensor:
        """A copy whose strides and alignment are its own: the bits of a product may depend on them, and a model's
        views have strides that depend on the number of tokens in the step."""
        return query.to(self.compute_dtype, copy=True, memory_format=torch.contiguous_format)

    def _attend_tile(
        self, queries: torch.Tensor, cache: LayerCache, tile: _Tile, scaling: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        merged: tuple[torch.Tensor, torch.Tensor] | None = None
        for piece in tile.pieces:
            keys, values = self._gather(cache, piece.blocks, 1)
            run = slice(piece.skip, piece.skip + piece.length)
            # [Hkv, 1, L, D]: one copy serves the G query heads
            part = _attend(
                queries,
                keys[0, :, run].unsqueeze(1),
                values[0, :, run].unsqueeze(1),
                piece.mask,
                piece.causal,
                scaling,
                softcap,
            )
            merged = part if merged is None else _merge(merged, part)
        assert merged is not None
        return merged

    def _gather(
        self, cache: LayerCache, blocks: torch.Tensor, num_rows: int, unwritten: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks, [rows, Hkv, L, D] (strided), valid until the next call."""
        parts = []
        for name, source in (("keys", cache.keys), ("values", cache.values)):
            _, block_size, num_kv_heads, size = source.shape
            shape = (len(blocks), block_size, num_kv_heads, size)
            gathered = self._workspace(name, source.dtype, shape)
            torch.index_select(source, 0, blocks, out=gathered)
            if source.dtype != self.compute_dtype:
                gathered = self._workspace(name, self.compute_dtype, shape).copy_(gathered)
            tokens = gathered.view(-1, num_kv_heads, size)
            if unwritten is not None:
                # Masked scores would still be NaN if the key were, and 0 * NaN is NaN in the values.
                tokens.index_fill_(0, unwritten, 0)
            parts.append(tokens.view(num_rows, -1, num_kv_heads, size).transpose(1, 2))
        return parts[0], parts[1]

    def _workspace(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Scratch memory that is reused: fresh memory of this size would be paid for in page faults at every layer."""
        numel = int(np.prod(shape))
        key = f"{name} {dtype}"
        space = self._workspaces.get(key)
        if space is None or space.numel() < numel:
            space = self._workspaces[key] = torch.empty(numel, dtype=dtype)
        return space[:numel].view(shape)


def _row_tiles(
    start: int, end: int, seq_len: int, window: int | None, block_size: int, table: torch.Tensor
) -> list[_Tile]:
    """Tiles of a row's queries `start` to `end` of the step, the last of which has position `seq_len - 1`."""

    def piece(low: int, high: int, mask: torch.Tensor | None, causal: bool) -> _Piece:
        first_block = low // block_size
        blocks = table[first_block : -(-high // block_size)]
        return _Piece(blocks, low - first_block * block_size, high - low, mask, causal)

    first_position = seq_len - (end - start)
    if window is None:
        bounds = [*range(0, first_position, KEY_PIECE_TOKENS), first_position]
        context = [piece(low, high, None, False) for low, high in pairwise(bounds)]
        return [_Tile(start, end, [*context, piece(first_position, seq_len, None, True)])]
    tiles = []
    for tile_start in range(start, end, WINDOW_QUERY_TILE):
        tile_end = min(tile_start + WINDOW_QUERY_TILE, end)
        low_query, high = first_position + tile_start - start, first_position + tile_end - start
        low = max(0, low_query - window + 1)
        positions, keys = torch.arange(low_query, high).unsqueeze(1), torch.arange(low, high)
        hidden = (keys > positions) | (keys <= positions - window)
        mask = torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, float("-inf"))
        tiles.append(_Tile(tile_start, tile_end, [piece(low, high, mask, False)]))
    return tiles


def _decode_batch(
    rows: list[int], length: int, metadata: AttentionMetadata, table: torch.Tensor, window: int | None, block_size: int
) -> _DecodeBatch:
    seq_lens = metadata.seq_lens_host[rows]
    visible = seq_lens if window is None else np.minimum(seq_lens, window)
    first_blocks = (seq_lens - visible) // block_size
    num_blocks = -(-length // block_size)
    # Past its last block a row repeats it: any block id may stand there, this one exists.
    columns = np.minimum(first_blocks[:, None] + np.arange(num_blocks), ((seq_lens - 1) // block_size)[:, None])
    positions = first_blocks[:, None] * block_size + np.arange(num_blocks * block_size)
    seen = (positions < seq_lens[:, None]) & (positions >= (seq_lens - visible)[:, None])
    mask = np.where(seen[:, :length], np.float32(0), np.float32(-np.inf))
    return _DecodeBatch(
        tokens=torch.from_numpy(metadata.query_start_host[rows]),
        blocks=table[torch.tensor(rows).unsqueeze(1), torch.from_numpy(columns)].flatten(),
        length=length,
        unwritten=torch.from_numpy(np.flatnonzero(~seen)),
        mask=torch.from_numpy(mask)[:, None, None, :],
    )


def _merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts, each given as (output, log-sum-exp of its scores)."""
    lse = torch.logaddexp(one[1], other[1])
    attended = one[0] * torch.exp(one[1] - lse).unsqueeze(-1)
    return attended.addcmul_(other[0], torch.exp(other[1] - lse).unsqueeze(-1)), lse


def _attend(
    queries: torch.Tensor,  # [B, H, T, D]
    keys: torch.Tensor,  # [B, H or 1, L, D]
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, T, Dv] and the log-sum-exp of the scores, fp32 [B, H, T]."""
    if softcap is not None:
        return _attend_softcapped(queries, keys, values, mask, causal, scaling, softcap)
    return _attend_fused(queries, keys, values, mask, causal, scaling)


def _attend_fused(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads = queries.shape[:2]
    value_size = values.shape[-1]
    size = max(queries.shape[-1], value_size)
    # torch's kernel wants keys and values of one size; zeros add nothing to a score and are cut from the output.
    queries, keys, values = (
        x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))
        for x in (queries, keys, values)
    )
    attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries,
        keys.expand(batch, heads, -1, -1),  # a stride of zero: the kernel reads the one copy
        values.expand(batch, heads, -1, -1),
        0.0,
        causal,
        attn_mask=mask,
        scale=scaling,
    )
    return attended[..., :value_size], lse.view(batch, heads, -1)


def _attend_softcapped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """No fused kernel knows softcap: scores of as many queries at a time as fit `DENSE_SCORES`.

    One entry of the leading dimension (a decoding row, or a key/value head of a tile) at a time: the bits of a batched
    product depend on the size of the batch.
    """
    batch, heads, num_queries, _ = queries.shape
    num_keys = keys.shape[2]
    attended = queries.new_empty(batch, heads, num_queries, values.shape[-1])
    lse = queries.new_empty(batch, heads, num_queries, dtype=torch.float32)
    tile = max(1, DENSE_SCORES // (heads * num_keys))
    for entry in range(batch):
        entry_mask = mask if mask is None or mask.dim() == 2 else mask[entry]
        for start in range(0, num_queries, tile):
            part = slice(start, min(start + tile, num_queries))
            folded = queries[entry, :, part].reshape(keys.shape[1], -1, queries.shape[-1])
            scores = (folded @ keys[entry].transpose(-1, -2)).float().view(heads, -1, num_keys)
            scores = torch.tanh(scores * (scaling / softcap)) * softcap
            if entry_mask is not None:
                scores += entry_mask[part] if entry_mask.dim() == 2 else entry_mask
            if causal:
                hidden = torch.arange(num_keys) > torch.arange(part.start, part.stop).unsqueeze(1)
                scores.masked_fill_(hidden, float("-inf"))
            lse[entry, :, part] = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - lse[entry, :, part].unsqueeze(-1)).to(values.dtype)
            product = weights.view(keys.shape[1], -1, num_keys) @ values[entry]
            attended[entry, :, part] = product.view(heads, -1, values.shape[-1])
    return attended, lse
