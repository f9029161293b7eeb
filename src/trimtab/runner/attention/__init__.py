"""Paged attention: where keys and values of past tokens live, and how queries read them."""

from __future__ import annotations

import logging

import torch

from trimtab.runner.attention.base import AttentionBackend, AttentionMetadata, AttentionStep, PagedAttention
from trimtab.runner.attention.kv_cache import PagedKVCache, group_layers, kv_cache_bytes_per_token
from trimtab.runner.attention.native import NativeBackend, native_backend
from trimtab.runner.attention.portable import PortableAttention
from trimtab.runner.attention.reference import ReferenceAttention

logger = logging.getLogger(__name__)

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionStep",
    "NativeBackend",
    "PagedAttention",
    "PagedKVCache",
    "PortableAttention",
    "ReferenceAttention",
    "choose_backend",
    "group_layers",
    "kv_cache_bytes_per_token",
]


def choose_backend(
    device: torch.device | str, dtype: torch.dtype, block_size: int, name: str = "auto"
) -> AttentionBackend:
    """The backend for a model's dtype on a device; `name` asks for one. Raises `ValueError` where it cannot serve."""
    if name == "reference":
        return ReferenceAttention()
    if name == "portable":
        return PortableAttention()
    if name not in ("auto", "native"):
        raise ValueError(f"attention backend ({name!r}) must be one of auto, native, portable, reference; try auto")
    found = native_backend(dtype, block_size) if torch.device(device).type == "cpu" else f"{device} is not the CPU"
    if not isinstance(found, str):
        logger.info("attention: native")
        return found
    if name == "native":
        raise ValueError(f"attention backend ('native') cannot serve here: {found}; try auto")
    logger.info("attention: portable (%s)", found)
    return PortableAttention()
