"""Sizes as people write them."""

import pytest

from trimtab.config import EngineConfig, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 gi", 3 << 29), (" 7 ", 7), ("3k", 3000), (5.9, 5)],
)
def test_units_are_of_ten_or_of_two_as_written(text: str | float, expected: int) -> None:
    assert parse_bytes("size", text) == expected


@pytest.mark.parametrize("value", [0, -1, True, float("nan"), float("inf"), "0", "9" * 400])
def test_a_size_that_no_machine_has_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes \(.*\) must be above 0 bytes and at most 2\*\*62"):
        EngineConfig(kv_cache_memory_bytes=value)


@pytest.mark.parametrize("text", ["", "GiB", "1TiB", "1e9", "-1GiB", "1 2"])
def test_text_that_is_no_size_is_refused_with_the_spellings(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a number of bytes; write it as 536870912, 512MiB or 2GB"):
        parse_bytes("kv_cache_memory_bytes", text)
