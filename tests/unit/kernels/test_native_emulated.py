"""The AVX-512 kernels where no CPU can run them: built against emulated instructions, they equal the AVX2 ones.

Layout, tiling, row preparation and arithmetic are the shipped code; only the intrinsics are plain C++. On a CPU with
the instructions the self-test at load covers the rest. Also: a kernel that computes wrongly is found and not used.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from native_cases import SHAPES, assert_close_to_reference, load_kernels, make_layer, routed

from trimtab.kernels.native.attention import NativeAttention, paged_view, self_test_error
from trimtab.kernels.native.build import SOURCE_FLAGS, build, find_compiler
from trimtab.kernels.native.library import Format, Level, NativeCore, NativeKernels, choose_kernels
from trimtab.kernels.native.moe import MoeShape

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

AVX2 = load_kernels()
EMULATION = Path(__file__).with_name("emulated_avx512.hpp")


@pytest.fixture(scope="module")
def emulated_path(tmp_path_factory) -> Path:
    source_flags = {name: ("-mavx2", "-mfma") if "avx512" in name else flags for name, flags in SOURCE_FLAGS.items()}
    # scripts/sanitize_native.sh adds its own.
    extra = os.environ.get("TRIMTAB_TEST_FLAGS", "").split()
    flags = (f'-DTRIMTAB_EMULATED_AVX512="{EMULATION}"', "-Wno-psabi", *extra)
    target = tmp_path_factory.mktemp("native") / "emulated.so"
    return build(target, optimize="-O1", extra_flags=flags, source_flags=source_flags)


@pytest.fixture(scope="module")
def emulated(emulated_path) -> NativeKernels:
    return choose_kernels(NativeCore(emulated_path), Level.AVX512)


@pytest.fixture
def faulty(emulated_path, tmp_path, monkeypatch) -> NativeCore:
    """The same library under another name, and so loaded anew, with a bf16 dot product that drops every second
    product."""
    monkeypatch.setenv("TRIMTAB_INJECTED_FAULT", "1")
    return NativeCore(Path(shutil.copy(emulated_path, tmp_path / "faulty.so")))


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_avx512_kernel_passes_its_self_test(emulated):
    assert [choice.chosen for choice in emulated.choices] == ["avx512_fp32", "avx512_bf16", "avx512_vnni"]


@pytest.mark.parametrize("weight_format", list(Format), ids=lambda f: f.name.lower())
def test_avx512_layers_equal_the_reference(emulated, weight_format):
    generator = torch.Generator().manual_seed(1)
    # bf16 dot products take bf16 inner values: half a unit of rounding.
    inner_error = 2.0**-8 if weight_format is Format.BF16 else 0.0
    for shape in [*SHAPES, MoeShape(131, 77), MoeShape(600, 40)]:
        layer = make_layer(emulated, shape, weight_format, 4, generator)
        slot_ids, gates = routed(23, 2, 4, generator, padding=0.1)
        hidden = torch.randn(23, shape.hidden_size, generator=generator).bfloat16()
        assert_close_to_reference(layer, hidden, slot_ids, gates, inner_error=inner_error)


@pytest.mark.parametrize("weight_format", list(Format), ids=lambda f: f.name.lower())
def test_avx512_rows_do_not_depend_on_the_batch(emulated, weight_format):
    generator = torch.Generator().manual_seed(2)
    layer = make_layer(emulated, MoeShape(600, 70), weight_format, 3, generator)
    hidden = torch.randn(40, 600, generator=generator)
    slot_ids, gates = routed(40, 2, 3, generator)
    alone = torch.cat([layer.native(hidden[t : t + 1], slot_ids[t : t + 1], gates[t : t + 1]) for t in range(40)])
    for size in (2, 3, 5, 6, 7, 40):
        assert torch.equal(layer.native(hidden[:size], slot_ids[:size], gates[:size]), alone[:size])


def test_int8_results_are_the_same_bits_on_every_instruction_set(emulated):
    """Slots move between unlike machines as bytes: the sums are exact integers, scaled in one order of operations."""
    for shape in (MoeShape(131, 77, activation="relu"), MoeShape(96, 64, has_gate=False, activation="relu2")):
        layers = [
            make_layer(kernels, shape, Format.INT8, 3, torch.Generator().manual_seed(3)) for kernels in (AVX2, emulated)
        ]
        assert torch.equal(layers[0].native.slots, layers[1].native.slots)
        generator = torch.Generator().manual_seed(4)
        slot_ids, gates = routed(20, 2, 3, generator)
        hidden = torch.randn(20, shape.hidden_size, generator=generator)
        outs = [layer.native(hidden, slot_ids, gates) for layer in layers]
        assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_gives_the_same_bits_on_every_instruction_set(emulated, dtype):
    """Scores add up by coordinate, values by token, the softmax in sixteen lanes by position: no order depends on the
    width of a vector."""
    wide = NativeAttention(emulated.core, Level.AVX512)
    narrow = NativeAttention(emulated.core, Level.AVX2)
    assert self_test_error(wide, dtype) is None and self_test_error(narrow, dtype) is None
    generator = torch.Generator().manual_seed(5)
    block_size, heads, sizes, length = 16, 2, (24, 40), 300
    pages = -(-length // block_size) + 1
    stride = heads * sum(sizes) * block_size
    keys, values = paged_view(torch.zeros(pages * stride, dtype=dtype), pages, stride, block_size, heads, sizes)
    blocks = torch.arange(1, pages, dtype=torch.int32)[None]
    slots = torch.arange(length) + block_size
    key, value = (torch.randn(length, heads, size, generator=generator).to(dtype) for size in sizes)
    narrow.write(keys, values, key, value, slots)
    query = torch.randn(50, 6, sizes[0], generator=generator).to(dtype)
    outs = [
        attention.attend(
            query,
            keys,
            values,
            block_table=blocks,
            query_start=torch.tensor([0, 50], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            window=None,
            scaling=0.2,
            sinks=None,
            softcap=None,
        )
        for attention in (narrow, wide)
    ]
    assert torch.equal(*outs)


def test_a_kernel_that_computes_wrongly_is_reported_and_replaced_by_the_next_level(faulty, caplog):
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels(faulty)
    assert kernels.levels == {Format.FP32: Level.AVX512, Format.BF16: Level.AVX2, Format.INT8: Level.AVX512}
    assert "native kernel avx512_bf16 failed its self-test and is not used: linear: row" in caplog.text
    bf16 = next(choice for choice in kernels.choices if choice.name == "native bf16")
    assert bf16 == ("native bf16", "avx2_bf16", "avx512_bf16 failed its self-test; self-test passed")


def test_a_forced_level_that_fails_its_self_test_leaves_none(faulty):
    assert not choose_kernels(faulty, Level.AVX512).supports(Format.BF16)
