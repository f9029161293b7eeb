"""The fused MoE kernel equals plain torch, and computes a row the same whatever stands beside it."""

from __future__ import annotations

import ctypes
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from native_cases import SHAPES, Layer, assert_close_to_reference, load_kernels, make_layer, random_weights, routed

from trimtab.kernels.native.library import Format, native_kernels
from trimtab.kernels.native.moe import MoeShape, MoeWeights, NativeMoe

KERNELS = load_kernels()
ALL_FORMATS = pytest.mark.parametrize("weight_format", list(Format), ids=lambda f: f.name.lower())


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@ALL_FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.activation}-{'gated' if s.has_gate else 'plain'}")
def test_every_activation_equals_the_reference(weight_format, shape):
    generator = torch.Generator().manual_seed(1)
    layer = make_layer(KERNELS, shape, weight_format, 4, generator)
    slot_ids, gates = routed(21, 2, 4, generator)
    for dtype in (torch.bfloat16, torch.float32):
        assert_close_to_reference(layer, torch.randn(21, 40, generator=generator).to(dtype), slot_ids, gates)


@ALL_FORMATS
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"),
    [(1, 1), (3, 5), (31, 33), (63, 65), (130, 70), (257, 96), (600, 37)],
)
def test_sizes_need_not_be_multiples_of_anything(weight_format, hidden_size, intermediate_size):
    generator = torch.Generator().manual_seed(2)
    for has_gate in (True, False):
        layer = make_layer(KERNELS, MoeShape(hidden_size, intermediate_size, has_gate), weight_format, 3, generator)
        slot_ids, gates = routed(10, 3, 3, generator)
        assert_close_to_reference(layer, torch.randn(10, hidden_size, generator=generator), slot_ids, gates)


@ALL_FORMATS
def test_no_tokens_give_no_rows(weight_format):
    layer = make_layer(KERNELS, MoeShape(40, 24), weight_format, 2, torch.Generator().manual_seed(3))
    out = layer.native(torch.empty(0, 40), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert out.shape == (0, 40)


@ALL_FORMATS
@pytest.mark.parametrize("num_tokens", [1, 95, 97, 500])
def test_one_expert_may_take_every_token_and_others_none(weight_format, num_tokens):
    generator = torch.Generator().manual_seed(4)
    layer = make_layer(KERNELS, MoeShape(72, 40), weight_format, 8, generator)
    slot_ids = torch.full((num_tokens, 1), 5)
    hidden = torch.randn(num_tokens, 72, generator=generator).bfloat16()
    assert_close_to_reference(layer, hidden, slot_ids, torch.rand(num_tokens, 1, generator=generator))


@ALL_FORMATS
def test_five_thousand_tokens_pass_in_bounded_pieces(weight_format):
    generator = torch.Generator().manual_seed(5)
    layer = make_layer(KERNELS, MoeShape(70, 36), weight_format, 16, generator)
    slot_ids, gates = routed(5000, 8, 16, generator, padding=0.02)
    assert_close_to_reference(layer, torch.randn(5000, 70, generator=generator).bfloat16(), slot_ids, gates)


def test_random_layers_equal_the_reference():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(25):
        base = draw.choice(SHAPES)
        shape = base._replace(hidden_size=draw.randint(1, 300), intermediate_size=draw.randint(1, 200))
        num_slots, top_k = draw.randint(1, 9), draw.randint(1, 4)
        layer = make_layer(KERNELS, shape, draw.choice(list(Format)), num_slots, generator)
        num_tokens = draw.choice([1, 2, 3, 7, 33, 150])
        slot_ids, gates = routed(num_tokens, top_k, num_slots, generator, padding=draw.choice([0.0, 0.3]))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        hidden = (torch.randn(num_tokens, shape.hidden_size, generator=generator) * draw.choice([0.1, 3.0])).to(dtype)
        print(shape, layer.native.weight_format, num_slots, num_tokens, top_k, dtype)
        assert_close_to_reference(layer, hidden, slot_ids, gates)


@ALL_FORMATS
def test_padding_ids_contribute_nothing(weight_format):
    """B20."""
    generator = torch.Generator().manual_seed(6)
    layer = make_layer(KERNELS, MoeShape(40, 24), weight_format, 4, generator)
    hidden = torch.randn(6, 40, generator=generator)
    slot_ids, gates = routed(6, 3, 4, generator)
    slot_ids[:, 1] = -1
    gates[:, 1] = float("nan")  # a padded pair's weight is never read
    kept = [0, 2]
    assert torch.equal(layer.native(hidden, slot_ids, gates), layer.native(hidden, slot_ids[:, kept], gates[:, kept]))
    assert torch.equal(layer.native(hidden, torch.full_like(slot_ids, -1), gates), torch.zeros(6, 40))


def rows_alone(layer: Layer, hidden: torch.Tensor, slot_ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return torch.cat(
        [layer.native(hidden[t : t + 1], slot_ids[t : t + 1], gates[t : t + 1]) for t in range(len(hidden))]
    )


@ALL_FORMATS
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_bitwise_the_same_alone_in_any_batch_and_at_any_position(weight_format, num_threads):
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(7)
    # Deeper than one block of steps, so that sums are stored and reloaded.
    layer = make_layer(KERNELS, MoeShape(650, 131), weight_format, 5, generator)
    hidden = torch.randn(140, 650, generator=generator)
    slot_ids, gates = routed(140, 2, 5, generator, padding=0.1)
    slot_ids[20:, 0] = 3  # more rows than one row block
    alone = rows_alone(layer, hidden, slot_ids, gates)
    for size in (2, 3, 4, 5, 6, 7, 13, 140):
        assert torch.equal(layer.native(hidden[:size], slot_ids[:size], gates[:size]), alone[:size])
    order = torch.randperm(140, generator=generator)
    assert torch.equal(layer.native(hidden[order], slot_ids[order], gates[order]), alone[order])


@ALL_FORMATS
def test_no_number_of_rows_of_an_expert_changes_a_row(weight_format):
    """Few rows are multiplied in whole steps, many strip by strip, in tiles of every height; the depth is no multiple
    of a block, of a turn of the prefetcher or of the words taken together."""
    generator = torch.Generator().manual_seed(16)
    layer = make_layer(KERNELS, MoeShape(587, 75), weight_format, 2, generator)
    hidden = torch.randn(110, 587, generator=generator)
    slot_ids, gates = torch.ones(110, 1, dtype=torch.int64), torch.rand(110, 1, generator=generator)
    alone = rows_alone(layer, hidden, slot_ids, gates)
    for size in [*range(2, 50), 95, 96, 97, 110]:
        assert torch.equal(layer.native(hidden[-size:], slot_ids[-size:], gates[-size:]), alone[-size:]), size


@ALL_FORMATS
def test_the_slot_an_expert_lies_in_changes_no_bit(weight_format):
    generator = torch.Generator().manual_seed(8)
    layer = make_layer(KERNELS, MoeShape(96, 64), weight_format, 6, generator)
    hidden = torch.randn(30, 96, generator=generator).bfloat16()
    slot_ids, gates = routed(30, 4, 6, generator)
    before = layer.native(hidden, slot_ids, gates)
    slot_of_expert = torch.randperm(6, generator=generator)
    bytes_before = layer.native.slots.clone()
    for expert, slot in enumerate(slot_of_expert.tolist()):
        layer.native.slots[slot].copy_(bytes_before[expert])  # the bytes alone are the expert
    assert torch.equal(layer.native(hidden, slot_of_expert[slot_ids], gates), before)


def test_the_slot_table_can_be_redirected_between_calls():
    generator = torch.Generator().manual_seed(9)
    layer = make_layer(KERNELS, MoeShape(40, 24), Format.BF16, 2, generator)
    hidden = torch.randn(4, 40, generator=generator)
    ids, gates = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    from_slot_one = layer.native(hidden, ids + 1, gates)
    layer.native.slot_table[0] = layer.native.slot_table[1]
    assert torch.equal(layer.native(hidden, ids, gates), from_slot_one)


@ALL_FORMATS
def test_a_row_that_is_not_finite_poisons_itself_and_no_other(weight_format):
    generator = torch.Generator().manual_seed(10)
    layer = make_layer(KERNELS, MoeShape(40, 24), weight_format, 3, generator)
    hidden = torch.randn(9, 40, generator=generator)
    slot_ids, gates = routed(9, 2, 3, generator)
    clean = layer.native(hidden, slot_ids, gates)
    hidden[4, 7] = float("nan")
    out = layer.native(hidden, slot_ids, gates)
    others = [t for t in range(9) if t != 4]
    assert out[4].isnan().all() and torch.equal(out[others], clean[others])


@ALL_FORMATS
@pytest.mark.parametrize("shape", [MoeShape(33, 19), MoeShape(128, 64), MoeShape(5, 70, has_gate=False)])
def test_unpack_gives_back_every_bit(weight_format, shape):
    weights = random_weights(shape, weight_format, torch.Generator().manual_seed(11))
    native = NativeMoe(KERNELS, shape, 2, weight_format)
    native.pack(1, weights)
    for packed, unpacked in zip(weights, native.unpack(1), strict=True):
        assert (packed is None and unpacked is None) or torch.equal(packed, unpacked)


def test_missing_biases_come_back_as_zeros():
    shape = MoeShape(33, 19)
    weights = random_weights(shape, Format.FP32, torch.Generator().manual_seed(12))
    native = NativeMoe(KERNELS, shape, 1, Format.FP32)
    native.pack(0, MoeWeights(weights.gate_up, weights.down))
    assert torch.equal(native.unpack(0).gate_up_bias, torch.zeros(38))


@pytest.mark.parametrize("bad_id", [-2, 4, 2**40])
def test_a_slot_id_out_of_range_is_refused(bad_id):
    layer = make_layer(KERNELS, MoeShape(40, 24), Format.FP32, 4, torch.Generator().manual_seed(13))
    with pytest.raises(RuntimeError, match="slot id is below -1 or not below num_slots"):
        layer.native(torch.zeros(1, 40), torch.tensor([[bad_id]]), torch.ones(1, 1))


def test_a_slot_without_weights_is_refused():
    native = NativeMoe(KERNELS, MoeShape(40, 24), 2, Format.FP32)
    with pytest.raises(RuntimeError, match="holds no weights"):
        native(torch.zeros(1, 40), torch.tensor([[1]]), torch.ones(1, 1))


def test_unknown_activations_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'tanh' has no native kernel; one of silu"):
        NativeMoe(KERNELS, MoeShape(40, 24, activation="tanh"), 1, Format.FP32)
    with pytest.raises(ValueError, match="needs a gate"):
        NativeMoe(KERNELS, MoeShape(40, 24, has_gate=False, activation="swiglu_clamped"), 1, Format.FP32)
    with pytest.raises(ValueError, match="would overflow int32"):
        NativeMoe(KERNELS, MoeShape(65537, 24), 1, Format.INT8)


@ALL_FORMATS
def test_a_team_smaller_than_asked_for_still_computes_every_row(weight_format):
    """OpenMP may grant fewer threads (OMP_THREAD_LIMIT, OMP_DYNAMIC, nesting): nobody's share may be left out."""
    generator = torch.Generator().manual_seed(14)
    layer = make_layer(KERNELS, MoeShape(130, 70), weight_format, 3, generator)
    hidden = torch.randn(64, 130, generator=generator)
    slot_ids, gates = routed(64, 2, 3, generator)
    expected = layer.native(hidden, slot_ids, gates)
    openmp = ctypes.CDLL("libgomp.so.1")
    openmp.omp_set_dynamic(1)
    torch.set_num_threads(4 * (os.cpu_count() or 1))
    try:
        assert torch.equal(layer.native(hidden, slot_ids, gates), expected)
    finally:
        openmp.omp_set_dynamic(0)


def test_calls_from_several_python_threads_do_not_share_a_workspace():
    generator = torch.Generator().manual_seed(15)
    layer = make_layer(KERNELS, MoeShape(200, 90), Format.BF16, 4, generator)
    batches = []
    for num_tokens in (3, 40, 150, 77):
        slot_ids, gates = routed(num_tokens, 2, 4, generator)
        batches.append((torch.randn(num_tokens, 200, generator=generator), slot_ids, gates))
    expected = [layer.native(*batch) for batch in batches]
    with ThreadPoolExecutor(len(batches)) as pool:
        for _ in range(5):
            results = list(pool.map(lambda batch: layer.native(*batch), batches))
            assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))


@ALL_FORMATS
@pytest.mark.parametrize("hidden_size", [40, 64, 131])
def test_rows_read_and_outputs_written_by_address_have_the_same_bits(weight_format: Format, hidden_size: int) -> None:
    """What ranks do with each other's memory; nothing outside the rows is touched (run under the sanitizers too)."""
    generator = torch.Generator().manual_seed(11)
    layer = make_layer(KERNELS, MoeShape(hidden_size, 24), weight_format, 5, generator)
    for dtype in (torch.float32, torch.bfloat16):
        rows = [torch.randn(hidden_size, generator=generator).to(dtype) for _ in range(50)]
        outputs = [torch.full((hidden_size,), float("nan")) for _ in range(50)]
        slot_ids = torch.randint(5, (50,), generator=generator)
        addresses = [torch.tensor([tensor.data_ptr() for tensor in held]) for held in (rows, outputs)]
        layer.native.experts_in_place(dtype, addresses[0], slot_ids, addresses[1])
        assert torch.equal(torch.stack(outputs), layer.native.experts(torch.stack(rows), slot_ids))


def test_a_copy_past_the_caches_copies_every_byte_and_no_other() -> None:
    """Any length, and any place of source and target within a cache line."""
    core = native_kernels().core
    if core is None:
        pytest.skip("the native core is not built")
    random = np.random.default_rng(11)
    for _ in range(500):
        length, source_at, target_at = (int(random.integers(0, high)) for high in (400, 64, 64))
        source = torch.from_numpy(random.integers(1, 256, 512).astype(np.uint8))
        target = torch.zeros(600, dtype=torch.uint8)
        core.copy_past_caches(source.data_ptr() + source_at, target.data_ptr() + target_at, length)
        assert target[target_at : target_at + length].equal(source[source_at : source_at + length])
        assert not target[:target_at].any() and not target[target_at + length :].any()
