"""The mathematics of attention, as an oracle: keys and values kept per sequence, dense causal softmax in float32."""

# T tokens of a step  S tokens of one sequence so far  Hq query heads  Hkv key/value heads  Dk key size  Dv value size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class ReferenceStep:
    """Which tokens of the packed batch belong to which sequence; shared by all layers of a model.

    `begin([(sequence, number of new tokens), ...])` before each forward, in the order of the packed batch.
    """

    parts: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, parts: Sequence[tuple[int, int]]) -> None:
        self.parts = list(parts)


class ReferenceAttention:
    """One attention layer. Satisfies `trimtab.models.attention_plug.AttentionLayer`."""

    def __init__(self, step: ReferenceStep) -> None:
        self.step = step
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        outputs = []
        start = 0
        for sequence, count in self.step.parts:
            rows = slice(start, start + count)
            start += count
            self.keys[sequence] = self._append(self.keys.get(sequence), key[rows])
            self.values[sequence] = self._append(self.values.get(sequence), value[rows])
            outputs.append(
                attend(query[rows], self.keys[sequence], self.values[sequence], scaling, window, sinks, softcap)
            )
        assert start == query.shape[0], f"the step has {start} tokens, the batch {query.shape[0]}"
        return torch.cat(outputs)

    @staticmethod
    def _append(before: Tensor | None, new: Tensor) -> Tensor:
        return new.clone() if before is None else torch.cat([before, new])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The last T of S tokens attend: query [T, Hq, Dk], key [S, Hkv, Dk], value [S, Hkv, Dv] -> [T, Hq, Dv]."""
    groups = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(groups, dim=1)
    values = value.float().repeat_interleave(groups, dim=1)
    scores = torch.einsum("thd,shd->hts", query.float(), keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(key.shape[0] - query.shape[0], key.shape[0])[:, None]
    other = torch.arange(key.shape[0])[None]
    hidden = other > position
    if window is not None:
        hidden |= other <= position - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, query.shape[0], 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : key.shape[0]]
    return torch.einsum("hts,shd->thd", weights, values).to(query.dtype)
