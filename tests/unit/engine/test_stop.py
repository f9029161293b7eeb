"""Stop sets, stop strings however the text is cut into deltas, and words never to write."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trimtab.engine.stop import StopStringFinder, bad_word_token_ids, eos_token_ids


def test_stop_set_is_the_union_of_all_sources() -> None:
    """B121: generation config list, tokenizer's own, model config's own."""
    assert eos_token_ids([2, 7], 9, None, 0) == {0, 2, 7, 9}
    assert eos_token_ids(None, None) == frozenset()


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["END"], "abENDcd", (2, 5, "END")),
        (["b", "ab"], "xab", (1, 3, "ab")),
        (["abc", "b"], "xabc", (2, 3, "b")),
        (["zz"], "abc", None),
        ([], "abc", None),
    ],
)
def test_first_stop_string_to_end_is_found(stop: list[str], text: str, found: tuple[int, int, str] | None) -> None:
    assert StopStringFinder(stop).find(text, len(text)) == found


def test_cut_of_the_deltas_does_not_change_what_is_found() -> None:
    for seed in range(300):
        print(f"seed {seed}")
        rng = random.Random(seed)
        text = "".join(rng.choices("ab", k=20))
        stop = ["".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(2)]
        ends = [(at + len(s), at, s) for s in stop for at in range(len(text)) if text.startswith(s, at)]
        expected = (min(ends)[1], min(ends)[0], min(ends)[2]) if ends else None
        finder, seen, found = StopStringFinder(stop), "", None
        while len(seen) < len(text) and found is None:
            delta = text[len(seen) : len(seen) + rng.randint(1, 4)]
            seen += delta
            found = finder.find(seen, len(delta))
        assert found == expected


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    finder = StopStringFinder(["<end>", "ab"])
    assert finder.num_held_back("hello <en") == 3
    assert finder.num_held_back("hello <end") == 4
    assert finder.num_held_back("hello a") == 1
    assert finder.num_held_back("hello") == 0
    assert StopStringFinder([]).num_held_back("hello") == 0


class _LetterTokenizer:
    def encode(self, text: str, **kwargs: Any) -> list[int]:
        assert kwargs == {"add_special_tokens": False}
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


def test_bad_words_are_spelled_with_and_without_a_space_before() -> None:
    assert bad_word_token_ids(["ab", " ab"], _LetterTokenizer()) == [[97, 98], [32, 97, 98]]


def test_blank_bad_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bad_words \(' '\) must hold words"):
        bad_word_token_ids([" "], _LetterTokenizer())
