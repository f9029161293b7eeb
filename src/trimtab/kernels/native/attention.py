"""Paged attention of the native core: keys transposed within a page, one fused call per layer for any mix of rows."""

# T tokens  R rows  Hq query heads  Hkv key/value heads  G = Hq / Hkv  Dk key size  Dv value size  S block size

from __future__ import annotations

import ctypes
import functools
import logging

import torch
from torch import Tensor

from trimtab.kernels.native.library import SCALARS, Format, Level, NativeCore, check_status, native_kernels

logger = logging.getLogger(__name__)

_FORMATS = {torch.float32: Format.FP32, torch.bfloat16: Format.BF16}


class AttentionCall(ctypes.Structure):
    """AttentionCall of csrc/attention.hpp."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("scalar", ctypes.c_int32),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("query_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("key_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class PageWrite(ctypes.Structure):
    """PageWrite of csrc/attention.cpp."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("key_token_stride", ctypes.c_int64),
        ("key_head_stride", ctypes.c_int64),
        ("value_token_stride", ctypes.c_int64),
        ("value_head_stride", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("key_size", ctypes.c_int64),
        ("value_size", ctypes.c_int64),
        ("element_bytes", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class NativeAttention:
    """`keys` [N, S, Hkv, Dk] and `values` [N, S, Hkv, Dv] are views of one layer's pages: in memory keys lie as
    [Hkv][Dk][S], values as [Hkv][S][Dv], in each page."""

    def __init__(self, core: NativeCore, level: Level) -> None:
        self._core = core
        self._level = level

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Stores key [T, Hkv, Dk] and value [T, Hkv, Dv], of the pages' dtype, at slots [T] int64."""
        assert key.dtype == value.dtype == keys.dtype and slots.dtype == torch.int64
        key, value = _dense_heads(key), _dense_heads(value)
        call = PageWrite(
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_token_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_token_stride=value.stride(0),
            value_head_stride=value.stride(1),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            page_stride=keys.stride(0),
            block_size=keys.shape[1],
            slots=slots.data_ptr(),
            num_tokens=key.shape[0],
            kv_heads=key.shape[1],
            key_size=key.shape[2],
            value_size=value.shape[2],
            element_bytes=key.element_size(),
            num_threads=torch.get_num_threads(),
        )
        self._core.write_pages(ctypes.addressof(call))

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        block_table: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        window: int | None,
        scaling: float,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        """query [T, Hq, Dk] -> [T, Hq, Dv]; block_table [R, B], query_start [R + 1], seq_lens [R], all int32."""
        assert query.dtype == keys.dtype, f"query is {query.dtype}, the pages are {keys.dtype}"
        query = _dense_heads(query)
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[3])
        call = AttentionCall(
            query=query.data_ptr(),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            out=out.data_ptr(),
            scalar=SCALARS[query.dtype],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            page_stride=keys.stride(0),
            block_size=keys.shape[1],
            block_table=block_table.data_ptr(),
            table_stride=block_table.stride(0),
            query_start=query_start.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            num_rows=seq_lens.shape[0],
            query_heads=query.shape[1],
            kv_heads=keys.shape[2],
            key_size=keys.shape[3],
            value_size=values.shape[3],
            window=window or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
            scaling=scaling,
            softcap=softcap or 0.0,
            num_threads=torch.get_num_threads(),
        )
        check_status(self._core.attention(self._level, ctypes.addressof(call)))
        return out


def paged_view(
    buffer: Tensor, num_pages: int, page_stride: int, block_size: int, heads: int, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer as views [N, S, Hkv, D] of its buffer, laid out as the kernel reads them."""
    key_size, value_size = sizes
    keys = buffer.as_strided(
        (num_pages, block_size, heads, key_size), (page_stride, 1, key_size * block_size, block_size)
    )
    values = buffer.as_strided(
        (num_pages, block_size, heads, value_size),
        (page_stride, value_size, value_size * block_size, 1),
        buffer.storage_offset() + heads * key_size * block_size,
    )
    return keys, values


def native_attention(dtype: torch.dtype, block_size: int) -> NativeAttention | str:
    """The kernel for pages of this dtype and block size, or why there is none."""
    if dtype not in _FORMATS:
        return f"no native kernel reads {dtype} pages"
    kernels = native_kernels()
    weight_format = _FORMATS[dtype]
    if kernels.core is None or not kernels.supports(weight_format):
        return "; ".join(f"{choice.name}: {choice.reason}" for choice in kernels.choices)
    if not kernels.core.attention_block_size_allowed(block_size):
        return f"block_size {block_size} is not 16, 32, 64, 128 or 256"
    attention = NativeAttention(kernels.core, kernels.levels[weight_format])
    if (error := self_test_error(attention, dtype)) is not None:
        logger.warning("native attention failed its self-test and is not used: %s", error)
        return f"failed its self-test ({error})"
    return attention


@functools.cache
def _expected(dtype: torch.dtype) -> dict[str, Tensor]:
    """A small problem with a window, sinks and a softcap, and its answer by plain arithmetic in float64."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, key_size, value_size, length, queries = 6, 2, 20, 12, 37, 5
    random = functools.partial(torch.randn, generator=generator)
    query = random(queries, heads, key_size).to(dtype)
    key, value = random(length, kv_heads, key_size).to(dtype), random(length, kv_heads, value_size).to(dtype)
    sinks = random(heads)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double().repeat_interleave(3, 1)) * 0.3
    scores = 4.0 * torch.tanh(scores / 4.0)
    position = torch.arange(length - queries, length)[:, None]
    seen = (torch.arange(length) <= position) & (torch.arange(length) > position - 19)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], -1).softmax(-1)[..., :-1]
    out = torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(3, 1))
    return {"query": query, "key": key, "value": value, "sinks": sinks, "out": out}


def self_test_error(attention: NativeAttention, dtype: torch.dtype) -> str | None:
    """What the kernel computed wrongly on a small odd-shaped problem, or None."""
    problem = _expected(dtype)
    query, key, value = problem["query"], problem["key"], problem["value"]
    length, kv_heads, key_size = key.shape
    block_size, blocks = 16, torch.tensor([[3, 1, 4]], dtype=torch.int32)
    page = kv_heads * (key_size + value.shape[2]) * block_size
    buffer = torch.full((5 * page,), float("nan"), dtype=dtype)  # what is not written must not be read
    keys, values = paged_view(buffer, 5, page, block_size, kv_heads, (key_size, value.shape[2]))
    positions = torch.arange(length)
    slots = blocks[0].long()[positions // block_size] * block_size + positions % block_size
    attention.write(keys, values, key, value, slots)
    out = attention.attend(
        query,
        keys,
        values,
        block_table=blocks,
        query_start=torch.tensor([0, len(query)], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        window=19,
        scaling=0.3,
        sinks=problem["sinks"],
        softcap=4.0,
    )
    error = float((out.double() - problem["out"]).abs().max())
    # fp32 sums of 37 products of size one; bfloat16 rounds the output once more (2^-9 of values up to 2).
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    return None if error < limit else f"off by {error:.2g}, allowed {limit}"


def _dense_heads(tensor: Tensor) -> Tensor:
    """Each head's vector contiguous, as the kernel reads it; heads and tokens may lie anywhere."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
