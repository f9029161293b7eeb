"""The checksum of bytes: one value wherever it is computed, and no change goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimtab.kernels import checksum as module
from trimtab.kernels.checksum import checksum, checksum_by_numpy, copy_with_checksum

SEED = 20_261_130
MASK = 2**64 - 1


def by_definition(data: bytes) -> int:
    """Word by word in Python's integers."""

    def mixed(word: int, key: int) -> int:
        word = ((word ^ key) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 32)) * 0x94D049BB133111EB) & MASK
        return word ^ (word >> 29)

    total = 0
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(data[index * 8 : index * 8 + 8].ljust(8, b"\0"), "little")
        total += mixed(word, ((index + 1) * 0x9E3779B97F4A7C15) & MASK)
    return mixed(total & MASK, len(data))


def random_bytes(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def test_native_core_numpy_and_definition_agree_for_every_short_length() -> None:
    generator = torch.Generator().manual_seed(SEED)
    for length in range(101):
        data = random_bytes(length, generator)
        expected = by_definition(bytes(data.tolist()))
        assert checksum(data) == checksum_by_numpy(data.numpy()) == expected, length


@pytest.mark.parametrize("length", [4_096, 524_287, 524_288, 524_289, 3_000_001])
def test_native_core_and_numpy_agree_for_long_data(length: int) -> None:
    print(f"seed {SEED + length}")
    data = random_bytes(length, torch.Generator().manual_seed(SEED + length))
    assert checksum(data) == checksum_by_numpy(data.numpy())


def test_it_is_right_wherever_the_bytes_begin() -> None:
    data = random_bytes(200, torch.Generator().manual_seed(SEED))
    for start in range(9):
        assert checksum(data[start : start + 90]) == by_definition(bytes(data[start : start + 90].tolist()))


@pytest.mark.parametrize("native", [True, False])
def test_a_copy_gives_the_sum_of_what_was_copied_and_touches_nothing_else(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(module, "_native_function", lambda: None)
    source = random_bytes(1_003, torch.Generator().manual_seed(SEED))
    around = torch.full((1_013,), 7, dtype=torch.uint8)
    assert copy_with_checksum(source, around[5:1_008]) == checksum_by_numpy(source.numpy())
    assert torch.equal(around[5:1_008], source)
    assert around[:5].eq(7).all() and around[1_008:].eq(7).all()


def test_every_changed_bit_changed_length_and_swapped_word_is_seen() -> None:
    data = random_bytes(40, torch.Generator().manual_seed(SEED))
    seen = {checksum(data)}
    for byte in range(40):
        for bit in range(8):
            changed = data.clone()
            changed[byte] ^= 1 << bit
            seen.add(checksum(changed))
    swapped = torch.cat([data[8:16], data[:8], data[16:]])
    seen |= {checksum(swapped), checksum(data[:39]), checksum(torch.cat([data, torch.zeros(1, dtype=torch.uint8)]))}
    assert len(seen) == 1 + 320 + 3


def test_zeros_of_different_length_differ() -> None:
    assert len({checksum(torch.zeros(length, dtype=torch.uint8)) for length in range(64)}) == 64


def test_signs_flipped_in_two_words_are_seen() -> None:
    """Top bits would cancel in a sum of products alone."""
    data = torch.from_numpy(np.random.default_rng(SEED).integers(0, 256, 8 * 200).astype(np.uint8))
    sums = {checksum(data)}
    for index in range(1, 200):
        changed = data.clone()
        changed[7] ^= 128
        changed[8 * index + 7] ^= 128
        sums.add(checksum(changed))
    assert len(sums) == 200
