"""Paged attention: where keys and values of past tokens live, and how queries read them."""

from __future__ import annotations

import torch

from trimtab.runner.attention.base import AttentionBackend, AttentionMetadata, AttentionStep, PagedAttention
from trimtab.runner.attention.kv_cache import PagedKVCache, group_layers, kv_cache_bytes_per_token
from trimtab.runner.attention.portable import PortableAttention
from trimtab.runner.attention.reference import ReferenceAttention

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionStep",
    "PagedAttention",
    "PagedKVCache",
    "PortableAttention",
    "ReferenceAttention",
    "choose_backend",
    "group_layers",
    "kv_cache_bytes_per_token",
]


def choose_backend(device: torch.device | str, dtype: torch.dtype, name: str = "auto") -> AttentionBackend:
    """The backend for a model's dtype on a device; `name` asks for one. Raises `ValueError` for an unknown name."""
    if name == "reference":
        return ReferenceAttention()
    if name in ("auto", "portable"):
        return PortableAttention()
    raise ValueError(f"attention backend ({name!r}) must be one of auto, portable, reference; try auto")
