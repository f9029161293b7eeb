"""Memory per rank, on a model small enough to count by hand."""

from types import SimpleNamespace

import pytest
import torch

from trimtab.cli.inspect import _span
from trimtab.cli.layout import format_bytes, format_count, kv_bytes_per_token, rank_memory


def spec(num_experts: int = 4) -> SimpleNamespace:
    """2 MoE layers of experts with 6 parameters; 100 other parameters; bfloat16."""
    shape = SimpleNamespace(num_parameters=6)
    layers = tuple(SimpleNamespace(layer_id=n, num_experts=num_experts, shape=shape) for n in (1, 2))
    attention = tuple(
        SimpleNamespace(num_kv_heads=2, key_size=8, value_size=4, window=window) for window in (None, 16, None)
    )
    expert_bytes = 2 * num_experts * 6 * 2
    return SimpleNamespace(
        dtype=torch.bfloat16,
        moe_layers=layers,
        attention_layers=attention,
        num_bytes=200 + expert_bytes,
        num_expert_bytes=expert_bytes,
    )


def test_one_rank_holds_every_expert_once():
    memory = rank_memory(spec())
    assert (memory.num_slots_per_layer, memory.dense_bytes, memory.expert_bytes) == (4, 200, 96)
    assert memory.weight_bytes == spec().num_bytes


def test_ranks_share_the_slots_and_each_holds_all_dense_weights():
    memory = rank_memory(spec(), num_ranks=2, num_redundant_experts=2)
    assert (memory.num_slots_per_layer, memory.dense_bytes, memory.expert_bytes) == (3, 200, 72)


def test_slots_that_do_not_divide_name_the_next_number_that_does():
    with pytest.raises(ValueError, match=r"num_redundant_experts \(1\) .* must divide .* \(3\); try .* 2"):
        rank_memory(spec(), num_ranks=3, num_redundant_experts=1)
    assert rank_memory(spec(), num_ranks=3, num_redundant_experts=2).num_slots_per_layer == 2


@pytest.mark.parametrize("layout", [{"num_ranks": 0}, {"num_redundant_experts": -1}])
def test_impossible_layouts_are_refused(layout):
    with pytest.raises(ValueError, match="must be at least"):
        rank_memory(spec(), **layout)


def test_kv_bytes_count_keys_and_values_of_every_layer():
    assert kv_bytes_per_token(spec()) == 3 * 2 * (8 + 4) * 2
    assert kv_bytes_per_token(spec(), windowed=True) == 2 * (8 + 4) * 2


def test_sizes_are_written_for_people():
    assert [format_bytes(n) for n in (999, 1536, 300 << 20, 5 << 30)] == ["999 B", "1.5 KiB", "300 MiB", "5 GiB"]
    assert [format_count(n) for n in (7, 1500, 692e6, 30.5e9)] == ["7", "1.5 K", "692 M", "30.5 B"]
    assert _span([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
