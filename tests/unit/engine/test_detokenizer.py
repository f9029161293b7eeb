"""Text a delta at a time, against a decode of the whole, over byte-level and byte-fallback tokenizers."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from trimtab.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer

TEXT = "Naïve café: 你好, мир! 🎉👩‍👩‍👧 ok 😀😀 e\u0301nd — “quoted” 🇩🇪."


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, a few merged ones that begin or end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    emoji = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀"))
    merges = [(emoji[0], emoji[1]), ("Ġ", emoji[0]), ("o", "k")]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Letters and spaces as tokens, all else as bytes; a text's first space is stripped when decoding."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzNï:,.!"]
    vocab = {token: index for index, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("$^"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level_tokenizer, "byte_fallback": byte_fallback_tokenizer}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    is_fallback = tokenizer.token_to_id("▁") is not None
    return tokenizer.encode(text.replace(" ", "▁") if is_fallback else text, add_special_tokens=False).ids


def deltas_of(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    """One delta per token, then what the flush gives."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [detokenizer.push(token_id) for token_id in output] + [detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    pieces = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
    return [tokenizer.token_to_id(piece) for piece in pieces]


def test_a_character_split_over_three_tokens_comes_whole() -> None:
    """B112: a 4-byte character split 1 + 1 + 2."""
    tokenizer = byte_level_tokenizer()
    first, second, third, fourth = byte_ids(tokenizer, "🎉")
    tokenizer.add_tokens([])
    deltas = deltas_of(tokenizer, encode(tokenizer, "hi "), [first, second, third, fourth, *encode(tokenizer, "!")])
    assert deltas == ["", "", "", "🎉", "!", ""]


def test_text_before_an_incomplete_character_is_not_held_back() -> None:
    tokenizer = byte_level_tokenizer()
    space_and_byte = tokenizer.token_to_id("Ġ" + tokenizer.id_to_token(byte_ids(tokenizer, "😀")[0]))
    rest = byte_ids(tokenizer, "😀")[1:]
    assert deltas_of(tokenizer, encode(tokenizer, "a"), [space_and_byte, *rest]) == [" ", "", "", "😀", ""]


def test_generation_that_ends_inside_a_character_flushes_one_replacement_character() -> None:
    """B112: the documented flush, the same as in a decode of the whole."""
    tokenizer = byte_level_tokenizer()
    output = [*encode(tokenizer, "ok"), *byte_ids(tokenizer, "🎉")[:3]]
    deltas = deltas_of(tokenizer, encode(tokenizer, "x"), output)
    assert deltas[-1] == REPLACEMENT and REPLACEMENT not in "".join(deltas[:-1])
    assert "".join(deltas) == tokenizer.decode(output)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_prompt_that_ends_inside_a_character_is_not_repeated(name: str, cut: int) -> None:
    """B112: the output brings the character it completes, and nothing else of the prompt."""
    tokenizer = TOKENIZERS[name]()
    begin = encode(tokenizer, "what is this ")
    emoji = byte_ids(tokenizer, "🎉") if name == "byte_level" else encode(tokenizer, "🎉")
    deltas = deltas_of(tokenizer, begin + emoji[:cut], emoji[cut:] + encode(tokenizer, " ok"))
    assert "".join(deltas) == "🎉 ok"


def test_broken_prompt_tail_that_is_never_completed_stays_out_of_the_output() -> None:
    tokenizer = byte_level_tokenizer()
    deltas = deltas_of(tokenizer, byte_ids(tokenizer, "a🎉")[:3], encode(tokenizer, "bcd"))
    assert "".join(deltas) == "bcd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_first_word_keeps_the_space_that_parts_it_from_the_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert "".join(deltas_of(tokenizer, encode(tokenizer, "abc"), encode(tokenizer, " def gh"))) == " def gh"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_skipped_special_tokens_leave_no_trace(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    special = tokenizer.get_vocab_size() - 1
    output = [*encode(tokenizer, " a")] + [special] * 12 + [*encode(tokenizer, " b")] + [special]
    assert "".join(deltas_of(tokenizer, encode(tokenizer, "x"), output)) == " a b"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_deltas_of_any_text_join_up_to_the_decode_of_the_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    for seed in range(300):
        print(f"seed {seed}")
        rng = random.Random(seed)
        token_ids = encode(tokenizer, "".join(rng.choices([*TEXT, " "], k=40)))
        cut = rng.randint(1, len(token_ids) - 1)
        prompt, output = token_ids[:cut], token_ids[cut:]
        deltas = deltas_of(tokenizer, prompt, output)
        given = tokenizer.decode(prompt).rstrip(REPLACEMENT)
        if name == "byte_fallback" and tokenizer.decode(prompt).endswith(REPLACEMENT):
            # This decoder shows every byte of a run that ends inside a character as broken, whole ones included.
            assert tokenizer.decode(token_ids).endswith("".join(deltas))
        else:
            assert "".join(deltas) == tokenizer.decode(token_ids)[len(given) :]
        assert REPLACEMENT not in "".join(deltas)


def test_deltas_of_random_bytes_join_up_to_the_decode_of_the_whole() -> None:
    tokenizer = byte_level_tokenizer()
    for seed in range(300):
        print(f"seed {seed}")
        rng = random.Random(seed)
        prompt = encode(tokenizer, "ab")
        output = [rng.randrange(tokenizer.get_vocab_size() - 1) for _ in range(rng.randint(1, 60))]
        assert "".join(deltas_of(tokenizer, prompt, output)) == tokenizer.decode(prompt + output)[2:]


def test_endless_broken_bytes_are_not_held_back_for_ever() -> None:
    tokenizer = byte_level_tokenizer()
    stray = byte_ids(tokenizer, "🎉")[1]  # a continuation byte, never the start of a character
    deltas = deltas_of(tokenizer, encode(tokenizer, "a"), [stray] * 100)
    assert "".join(deltas) == REPLACEMENT * 100
    assert len("".join(deltas[:50])) > 25


def test_long_outputs_are_decoded_a_window_at_a_time() -> None:
    """The work per token stays the same however long the output is."""

    class Counting:
        def __init__(self) -> None:
            self.longest = 0
            self.tokenizer = byte_level_tokenizer()

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            self.longest = max(self.longest, len(token_ids))
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting, encode(counting.tokenizer, "a" * 500))  # type: ignore[arg-type]
    output = encode(counting.tokenizer, TEXT * 20)
    text = "".join(detokenizer.push(token_id) for token_id in output) + detokenizer.flush()
    assert text == TEXT * 20
    assert counting.longest < 48
