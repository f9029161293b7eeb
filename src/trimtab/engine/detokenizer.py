"""Turns a growing list of token ids into text, a delta at a time.

A character's bytes may be spread over tokens; a decoder shows the incomplete ones as U+FFFD. Such a tail is held back
until the bytes are complete, so no delta holds a broken character (B112). The deltas join up to exactly what decoding
prompt and output together shows after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "�"
# A UTF-8 character has at most 4 bytes, so 3 tokens after its first one it is complete or never will be.
MAX_INCOMPLETE = 3
# A tail of U+FFFD this many tokens long is no character in the making: it is let through but for its last 3.
MAX_HELD_TOKENS = 16
# Decoding restarts from a recent clean boundary once this many tokens lie behind it.
WINDOW_TOKENS = 8


class Decoder(Protocol):
    """Token ids to text; the tokenizers of `tokenizers` and of `transformers` are such."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any:
        """A string: the type is left open for libraries that also take batches."""


class Tokenizer(Decoder, Protocol):
    """What the engine asks of a tokenizer; those of `transformers` are such."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class IncrementalDetokenizer:
    """The text of one completion.

    `push` gives what is new and certain. `flush`, once at the end, gives the rest: an incomplete character then shows
    as U+FFFD, as it does in a decode of the whole. Decoding starts inside the prompt, because many tokenizers treat the
    first token of a text apart. Where the prompt ends inside a character, the output that completes it brings the whole
    character, and nothing else of the prompt.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        # The window: context, whose text was given before, then tokens whose text is given in part. `_given` counts
        # the characters of both.
        self._window, context = self._prompt_context(prompt_token_ids)
        self._clean = len(self._window)  # tokens up to the last clean boundary: the next window's context starts here
        self._num_pending = 0  # tokens since the text last ended in a whole character
        self._given = len(context.rstrip(REPLACEMENT))
        self._prompt_tail = context if context.endswith(REPLACEMENT) else None

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_pending += 1
        text = self._decode(self._window)
        certain = len(text.rstrip(REPLACEMENT))
        if self._num_pending > MAX_HELD_TOKENS:
            certain = max(certain, len(text) - MAX_INCOMPLETE)
        delta = self._take(text, certain)
        if certain == len(text):
            self._num_pending = 0
            self._advance_window()
        return delta

    def flush(self) -> str:
        text = self._decode(self._window)
        return self._take(text, len(text))

    def _take(self, text: str, certain: int) -> str:
        if self._prompt_tail is not None and certain > self._given:
            if text.startswith(self._prompt_tail):
                if certain <= len(self._prompt_tail):
                    return ""  # still nothing but the prompt's own broken tail
                self._given = len(self._prompt_tail)
            self._prompt_tail = None
        delta = text[self._given : certain]
        self._given = max(self._given, certain)
        return delta

    def _advance_window(self) -> None:
        """Drops tokens that later ones cannot change, and keeps enough of them to decode the next in context."""
        if len(self._window) - self._clean < WINDOW_TOKENS:
            return
        context = self._window[self._clean :]
        text = self._decode(context)
        if text and not text.endswith(REPLACEMENT):  # tokens without text are no context
            self._window, self._clean, self._given = context, len(context), len(text)

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        size = WINDOW_TOKENS
        while True:
            context = list(prompt_token_ids[-size:])
            text = self._decode(context)
            if text.strip(REPLACEMENT) or size >= len(prompt_token_ids):
                return context, text
            size *= 2

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
