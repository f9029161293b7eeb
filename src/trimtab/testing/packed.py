"""Runs a LanguageModel over several sequences as an engine would: packed, ragged, in chunks, with kept K/V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trimtab.models.language_model import LanguageModel
from trimtab.testing.reference_attention import ReferenceAttention, ReferenceStep

Part = tuple[int, int, int]  # sequence, first position, number of tokens


def schedule(lengths: Sequence[int], chunks: Sequence[int]) -> Iterator[list[Part]]:
    """Steps of a batch in which sequence i advances by chunks[i] tokens until it ends, so that prefill, chunked
    prefill and decode (a chunk of 1) meet in one step."""
    done = [0] * len(lengths)
    while any(start < length for start, length in zip(done, lengths, strict=True)):
        parts = [
            (index, done[index], min(chunks[index], length - done[index]))
            for index, length in enumerate(lengths)
            if done[index] < length
        ]
        yield parts
        for index, _, count in parts:
            done[index] += count


def packed_logits(model: LanguageModel, sequences: Sequence[Tensor], chunks: Sequence[int]) -> list[Tensor]:
    """Logits [length, V] of each sequence, run by `schedule`."""
    step = ReferenceStep()
    model.bind_attention({layer.layer_id: ReferenceAttention(step) for layer in model.spec.attention_layers})
    steps = []
    for parts in schedule([len(tokens) for tokens in sequences], chunks):
        step.begin([(index, count) for index, _, count in parts])
        output = model.forward(
            torch.cat([sequences[index][start : start + count] for index, start, count in parts]),
            torch.cat([torch.arange(start, start + count) for _, start, count in parts]),
            torch.arange(sum(count for _, _, count in parts)),
        )
        steps.append((parts, output))
    return unpack(steps, len(sequences))


def unpack(steps: Sequence[tuple[list[Part], Tensor]], num_sequences: int) -> list[Tensor]:
    """Rows of packed steps, put back together per sequence."""
    rows: list[list[Tensor]] = [[] for _ in range(num_sequences)]
    for parts, packed in steps:
        for (index, _, _), part in zip(parts, packed.split([count for _, _, count in parts]), strict=True):
            rows[index].append(part)
    return [torch.cat(part) for part in rows]
