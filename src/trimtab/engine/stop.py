"""What ends a completion: the stop set of token ids, stop strings in its text, and words it must never write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimtab.engine.detokenizer import Tokenizer

TokenIdSource = int | Iterable[int] | None


def eos_token_ids(*sources: TokenIdSource) -> frozenset[int]:
    """The union of all sources of end-of-sequence ids (generation config, tokenizer, model config), each an id, a list
    of ids or None (B121). Raises ValueError for anything else."""
    ids: set[int] = set()
    for source in sources:
        if source is None:
            continue
        for token_id in source if isinstance(source, (list, tuple, set, frozenset)) else [source]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ValueError(
                    f"eos_token_id ({source!r}) must be a token id or a list of them; mend the model's JSON"
                )
            ids.add(token_id)
    return frozenset(ids)


class StopStringFinder:
    """Finds the first stop string in a text that grows by deltas, however they cut it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = stop
        self._longest = max(map(len, stop), default=0)

    def find(self, text: str, num_new: int, *, start: int = 0) -> tuple[int, int, str] | None:
        """(start, end, string) of the match that ends first, at `start` or later in `text`, among those that touch its
        last `num_new` characters; the longest of those ending together."""
        start = max(start, len(text) - num_new - self._longest + 1)
        matches = [(at + len(string), at, string) for string in self.stop if (at := text.find(string, start)) >= 0]
        if not matches:
            return None
        end, at, string = min(matches)
        return at, end, string

    def num_held_back(self, text: str) -> int:
        """Characters at the text's end that may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(string) > size and text.endswith(string[:size]) for string in self.stop):
                return size
        return 0


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences that spell the words, at a text's start and after a space, as tokenizers tell the two apart."""
    sequences: list[list[int]] = []
    for word in words:
        if not word.strip():
            raise ValueError(f"bad_words ({word!r}) must hold words with visible characters; drop the others")
        for text in (word.strip(), " " + word.strip()):
            token_ids = list(tokenizer.encode(text, add_special_tokens=False))
            if token_ids and token_ids not in sequences:
                sequences.append(token_ids)
    return sequences
