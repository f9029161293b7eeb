"""Every way a linear layer may be stored gives the same layer, bit for bit the same row in any batch."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.kernels import linear
from trimtab.kernels.linear import InPlaceStorage, PackedLinear, WidenedStorage, choose_storage, pack_linear, tile_spans

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One rounding to the type, relative to the largest output.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(1, 1), (7, 5), (64, 48), (100, 96), (131, 67), (8, 300)]
SEED = 7


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts even the tests' small weights into several tiles."""
    monkeypatch.setattr(linear, "TILE_ELEMENTS", 4096)


@pytest.fixture(params=["native", "torch"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native core where there is one, and without."""
    if request.param == "torch":
        monkeypatch.setattr(linear, "native_format", lambda dtype: None)


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "native_format", lambda dtype: None)


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CPU_FEATURES", "avx2")


def draw(*size: int, dtype: torch.dtype, seed: int = SEED) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equals_the_layer(packed: PackedLinear, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = packed(x)
    assert found.shape == expected.shape
    assert found.dtype == x.dtype
    scale = expected.abs().max().clamp(min=1e-3)
    assert ((found.double() - expected).abs().max() / scale).item() <= TOLERANCE[packed.dtype]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_plain_layer_at_odd_shapes(
    dtype: torch.dtype, has_bias: bool, shared: bool, small_tiles: None, core: None
) -> None:
    for out_features, in_features in SHAPES:
        weight = draw(out_features, in_features, dtype=dtype)
        bias = draw(out_features, dtype=dtype, seed=8) if has_bias else None
        packed = pack_linear(weight, bias, shared=shared)
        for size in [(in_features,), (1, in_features), (3, 5, in_features), (0, in_features)]:
            x = draw(*size, dtype=dtype, seed=9)
            if x.numel():
                assert_equals_the_layer(packed, x, weight, bias)
            else:
                assert packed(x).shape == (0, out_features)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_gives_the_weight_back_bit_for_bit(
    dtype: torch.dtype, shared: bool, small_tiles: None, core: None
) -> None:
    for out_features, in_features in SHAPES:
        weight, bias = draw(out_features, in_features, dtype=dtype), draw(out_features, dtype=dtype)
        packed = pack_linear(weight, bias, shared=shared)
        assert torch.equal(packed.unpack(), weight)
        assert torch.equal(packed.unpack_bias(), bias)
        again = pack_linear(packed.unpack(), packed.unpack_bias(), shared=shared)
        x = draw(3, in_features, dtype=dtype)
        assert torch.equal(again(x), packed(x)), "packing is stable under repeated moves"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_in_any_batch_and_at_any_position(
    dtype: torch.dtype, shared: bool, num_threads: int, small_tiles: None, core: None
) -> None:
    """B109: results do not depend on batch mates."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for out_features, in_features in [(192, 64), (131, 67)]:
            packed = pack_linear(
                draw(out_features, in_features, dtype=dtype), draw(out_features, dtype=dtype), shared=shared
            )
            x = draw(300, in_features, dtype=dtype)
            whole = packed(x)
            for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 100, 299):
                for start in (0, 1, 300 - num_rows):
                    part = packed(x[start : start + num_rows])
                    assert torch.equal(part, whole[start : start + num_rows]), f"{num_rows} rows from {start}"
    finally:
        torch.set_num_threads(before)


def test_bf16_without_bf16_instructions_keeps_16_bits_and_multiplies_in_fp32(no_bf16: None, torch_only: None) -> None:
    """B124."""
    choice = choose_storage(torch.bfloat16)
    assert choice.compute_dtype == torch.float32
    assert "no bfloat16 instructions" in choice.reason or "oneDNN" in choice.reason
    weight, x = draw(256, 512, dtype=torch.bfloat16), draw(4, 512, dtype=torch.bfloat16)
    packed = pack_linear(weight)
    assert packed.nbytes < 1.1 * weight.nbytes
    exact = F.linear(x.float(), weight.float())
    assert torch.equal(packed.multiply(x.float()), pack_linear(weight.float()).multiply(x.float()))
    assert (packed(x).float() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_the_choice_is_logged_once_with_its_reason(
    caplog: pytest.LogCaptureFixture, no_bf16: None, torch_only: None
) -> None:
    """B124, B126."""
    linear._logged.clear()
    with caplog.at_level("INFO", logger="trimtab.kernels.linear"):
        for _ in range(3):
            pack_linear(draw(8, 8, dtype=torch.bfloat16))
    assert len(caplog.messages) == 1
    assert "bfloat16" in caplog.messages[0] and "multiplied in float32" in caplog.messages[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_packed_layer_is_the_only_copy_of_the_weight(dtype: torch.dtype, core: None) -> None:
    weight = draw(640, 512, dtype=dtype)
    gone = weakref.ref(weight)
    packed = pack_linear(weight)
    num_bytes = weight.nbytes
    del weight
    gc.collect()
    assert gone() is None
    assert num_bytes <= packed.nbytes < 1.1 * num_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shared_weight_is_read_in_place(dtype: torch.dtype) -> None:
    embedding = draw(50, 16, dtype=dtype)
    packed = pack_linear(embedding, shared=True)
    embedding.copy_(draw(50, 16, dtype=dtype, seed=11))
    assert_equals_the_layer(packed, draw(3, 16, dtype=dtype), embedding, None)


def test_without_onednn_the_plain_product_serves(monkeypatch: pytest.MonkeyPatch, torch_only: None) -> None:
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    for dtype in DTYPES:
        weight, bias = draw(40, 24, dtype=dtype), draw(40, dtype=dtype)
        packed = pack_linear(weight, bias)
        assert isinstance(packed.storage, InPlaceStorage)
        assert_equals_the_layer(packed, draw(3, 24, dtype=dtype), weight, bias)
        x = draw(64, 24, dtype=dtype)
        assert torch.equal(packed(x[5:6]), packed(x[:32])[5:6])


@pytest.mark.skipif(not linear._has_onednn(), reason="no oneDNN on this machine")
def test_a_weight_packed_under_one_thread_count_is_read_right_under_another(small_tiles: None) -> None:
    before = torch.get_num_threads()
    weight, x = draw(200, 96, dtype=torch.bfloat16), draw(9, 96, dtype=torch.bfloat16)
    try:
        torch.set_num_threads(1)
        one = WidenedStorage(weight)
        torch.set_num_threads(2)
        two = WidenedStorage(weight)
        assert torch.equal(one.unpack(), weight) and torch.equal(two.unpack(), weight)
        for storage in (one, two, one):
            torch.testing.assert_close(storage.multiply(x.float(), None), F.linear(x.float(), weight.float()))
    finally:
        torch.set_num_threads(before)


def test_threads_that_multiply_at_once_do_not_share_a_workspace(small_tiles: None, no_bf16: None, core: None) -> None:
    layers = [pack_linear(draw(256, 64, dtype=torch.bfloat16, seed=seed)) for seed in range(2)]
    x = draw(4, 64, dtype=torch.bfloat16)
    expected = [layer(x) for layer in layers]
    wrong: list[int] = []

    def multiply(index: int) -> None:
        for _ in range(200):
            if not torch.equal(layers[index](x), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=multiply, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 10), (1536, 2048), (32_000, 1024), (3000, 100_000)])
def test_tiles_cover_the_rows_once_in_order_and_are_bounded(rows: int, columns: int) -> None:
    spans = tile_spans(rows, columns)
    assert [row for start, end in spans for row in range(start, end)] == list(range(rows))
    largest = max(end - start for start, end in spans)
    assert largest * columns <= max(linear.TILE_ELEMENTS + 64 * columns, 64 * columns)


def test_bad_weights_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\)\) must be \[out_features, in_features\]"):
        pack_linear(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"linear bias \(shape \(3,\)\) must be \[4\]"):
        pack_linear(torch.zeros(4, 2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"weight dtype \(torch.int8\) must be one of"):
        pack_linear(torch.zeros(4, 2, dtype=torch.int8))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_values_in_place_multiply_like_a_fresh_layer(
    dtype: torch.dtype, shared: bool, small_tiles: None, core: None
) -> None:
    """B23: weight and bias come one after the other, in either order; layer and storage stay the same objects."""
    weights = [draw(131, 67, dtype=dtype, seed=seed) for seed in (1, 2)]
    biases = [draw(131, dtype=dtype, seed=seed) for seed in (3, 4)]
    x = draw(5, 67, dtype=dtype)
    fresh = pack_linear(weights[1], biases[1], shared=shared)
    for bias_first in (False, True):
        packed = pack_linear(weights[0].clone(), biases[0], shared=shared)
        storage, nbytes = packed.storage, packed.nbytes
        before = packed(x)
        for is_bias in (bias_first, not bias_first):
            packed.load_bias(biases[1]) if is_bias else packed.load_weight(weights[1])
        assert torch.equal(packed(x), fresh(x)) and not torch.equal(packed(x), before)
        assert torch.equal(packed.unpack(), weights[1]) and torch.equal(packed.unpack_bias(), biases[1])
        assert packed.storage is storage and packed.nbytes == nbytes


def test_layers_used_in_inference_mode_can_be_used_outside_of_it(small_tiles: None, no_bf16: None, core: None) -> None:
    """Workspaces outlive the mode they were made in."""
    for shared in (False, True):
        weight, x = draw(96, 41, dtype=torch.float16), draw(2, 41, dtype=torch.float16)
        packed = pack_linear(weight, shared=shared)
        with torch.inference_mode():
            inside = packed(x)
        assert torch.equal(packed(x), inside)
