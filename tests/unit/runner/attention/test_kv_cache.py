"""The paged KV cache: its bytes are those asked for, and layers that share a buffer never touch each other's blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from trimtab.plan import KVCacheConfig
from trimtab.runner.attention.kv_cache import PagedKVCache, group_layers, kv_cache_bytes_per_token


@dataclass(frozen=True)
class LayerShape:
    layer_id: int
    num_kv_heads: int = 2
    key_size: int = 4
    value_size: int = 4
    window: int | None = None


def hybrid(num_layers: int = 5) -> list[LayerShape]:
    """Windows on even layers; the full-attention layers have more heads, and values unlike keys."""
    return [
        LayerShape(i, window=8) if i % 2 == 0 else LayerShape(i, num_kv_heads=3, key_size=6, value_size=5)
        for i in range(num_layers)
    ]


def make_cache(specs: list[LayerShape], dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache(KVCacheConfig(4, 7, group_layers(specs, dtype)), specs, dtype)


def test_groups_are_full_attention_first_then_one_per_window() -> None:
    specs = [LayerShape(0, window=8), LayerShape(1), LayerShape(3, window=32), LayerShape(4), LayerShape(5, window=8)]
    groups = group_layers(specs, torch.bfloat16)
    assert [(group.layer_ids, group.window) for group in groups] == [((1, 4), None), ((3,), 32), ((0, 5), 8)]
    assert [group.bytes_per_token for group in groups] == [64, 32, 64]  # 2 heads * (4 + 4) * 2 bytes a layer


def test_a_model_of_windows_only_has_no_full_attention_group() -> None:
    assert [group.window for group in group_layers([LayerShape(0, window=8)], torch.float32)] == [8]


def test_a_blocks_price_is_the_dearest_layer_at_each_place() -> None:
    """Two full layers of 3 * 11 values beside three window layers of 2 * 8: places cost 33, 33 and 16 values."""
    assert kv_cache_bytes_per_token(hybrid(), torch.float32) == (33 + 33 + 16) * 4
    assert kv_cache_bytes_per_token(hybrid(), torch.bfloat16) == (33 + 33 + 16) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_is_what_was_asked_for_to_the_byte(dtype: torch.dtype) -> None:
    specs = hybrid()
    assert make_cache(specs, dtype).num_bytes == 7 * 4 * kv_cache_bytes_per_token(specs, dtype)


def test_layers_that_share_a_buffer_keep_to_their_own_blocks() -> None:
    specs = hybrid()
    cache = make_cache(specs)
    generator = torch.Generator().manual_seed(0)
    # Group 0 (odd layers) holds blocks 2 and 5, group 1 (even layers) blocks 1 and 6; every position is written.
    blocks = {True: torch.tensor([2, 5]), False: torch.tensor([6, 1])}
    written = {}
    for spec in specs:
        slots = (blocks[spec.window is None].unsqueeze(1) * 4 + torch.arange(4)).flatten()
        key = torch.randn(8, spec.num_kv_heads, spec.key_size, generator=generator)
        value = torch.randn(8, spec.num_kv_heads, spec.value_size, generator=generator)
        cache.write(spec.layer_id, key, value, slots)
        written[spec.layer_id] = key, value
    for spec in specs:
        layer, own = cache.layer(spec.layer_id), blocks[spec.window is None]
        assert torch.equal(layer.keys[own].flatten(0, 1), written[spec.layer_id][0])
        assert torch.equal(layer.values[own].flatten(0, 1), written[spec.layer_id][1])


def test_tokens_go_to_their_slots_in_any_order() -> None:
    specs = [LayerShape(0)]
    cache = make_cache(specs)
    cache.layer(0).keys.zero_()
    cache.layer(0).values.zero_()
    key = torch.arange(3.0).add(1).view(3, 1, 1).expand(3, 2, 4)
    cache.write(0, key, -key, torch.tensor([27, 4, 18]))
    stored = cache.layer(0).keys[:, :, 0, 0].flatten()
    assert stored.nonzero().flatten().tolist() == [4, 18, 27] and stored[[27, 4, 18]].tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(cache.layer(0).values, -cache.layer(0).keys)


def test_a_layer_outside_every_group_is_an_assertion() -> None:
    specs = [LayerShape(0), LayerShape(1)]
    with pytest.raises(AssertionError, match="exactly one KV cache group"):
        PagedKVCache(KVCacheConfig(4, 2, group_layers(specs[:1], torch.float32)), specs, torch.float32)
