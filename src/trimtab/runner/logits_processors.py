"""What a request may do to its logits before a token is drawn: masks, bias, penalties; one small class per feature.

A row that does not use a feature costs nothing. No processor keeps a history: all depends on the row's parameters and
on the tokens in its row of the request table, so that preemption and steps in flight need no care here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trimtab.plan import OpenRow

MASKED = float("-inf")


class SelectedRow(NamedTuple):
    """A row of the batch that uses a feature."""

    batch_index: int
    row: int  # in the request table
    position: int  # of the token to be drawn: the row's first `position` tokens are known
    setting: Any  # the processor's own, as `setting` returned it


class LogitsProcessor:
    """1. `open` and `close` follow the request's row.
    2. `gather` picks the rows of a batch that use the feature in this step.
    3. `apply` changes their logits in place.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        self.token_ids = token_ids  # [rows, model length + 1], the request table's
        self.vocab_size = vocab_size
        self._settings: dict[int, Any] = {}

    def setting(self, opened: OpenRow) -> Any:
        """What `apply` needs to know of the request; None when it does not use the feature."""
        raise NotImplementedError

    def apply(self, logits: torch.Tensor, selected: list[SelectedRow]) -> None:
        raise NotImplementedError

    def wanted(self, setting: Any, position: int) -> bool:
        return True

    def open(self, opened: OpenRow) -> None:
        if (setting := self.setting(opened)) is not None:
            self._settings[opened.row] = setting

    def close(self, row: int) -> None:
        self._settings.pop(row, None)

    def gather(self, rows: list[int], positions: list[int]) -> list[SelectedRow]:
        if not self._settings:
            return []
        return [
            SelectedRow(index, row, position, setting)
            for index, (row, position) in enumerate(zip(rows, positions, strict=True))
            if (setting := self._settings.get(row)) is not None and self.wanted(setting, position)
        ]

    def ids(self, token_ids: list[int]) -> torch.Tensor:
        assert all(0 <= token < self.vocab_size for token in token_ids), "token ids are checked when a request comes in"
        return torch.tensor(token_ids, dtype=torch.int64, device=self.token_ids.device)


class AllowedTokens(LogitsProcessor):
    """`allowed_token_ids`: every other token is masked."""

    def setting(self, opened: OpenRow) -> torch.Tensor | None:
        allowed = opened.sampling.allowed_token_ids
        return None if allowed is None else self.ids(sorted(set(allowed)))

    def apply(self, logits: torch.Tensor, selected: list[SelectedRow]) -> None:
        for index, _, _, allowed in selected:
            kept = logits[index].index_select(0, allowed)
            logits[index].fill_(MASKED).index_copy_(0, allowed, kept)


class BadWords(LogitsProcessor):
    """`bad_words`: the last token of a forbidden sequence is masked where the output ends in the rest of it."""

    def setting(self, opened: OpenRow) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        # A word with an id outside the vocabulary (a tokenizer may know more tokens than the model) cannot be written.
        words = [word for word in opened.bad_word_token_ids if word and max(word) < self.vocab_size]
        if not words:
            return None
        # Prefixes right-aligned; -1 stands for "no token asked for here".
        width = max(len(word) for word in words) - 1
        prefixes = [[-1] * (width - len(word) + 1) + word[:-1] for word in words]
        prefix_table = torch.tensor(prefixes, dtype=torch.int64, device=self.token_ids.device).view(len(words), width)
        return prefix_table, self.ids([word[-1] for word in words]), opened.num_prompt_tokens

    def apply(self, logits: torch.Tensor, selected: list[SelectedRow]) -> None:
        for index, row, position, (prefixes, last_tokens, num_prompt_tokens) in selected:
            width = prefixes.shape[1]
            tail = torch.full((width,), -2, dtype=torch.int64, device=logits.device)  # -2 equals no token
            known = min(width, position - num_prompt_tokens)
            if known:
                tail[width - known :] = self.token_ids[row, position - known : position]
            completes = ((prefixes == tail) | (prefixes == -1)).all(dim=1)
            penalty = torch.zeros(len(last_tokens), dtype=torch.float32, device=logits.device).masked_fill_(
                completes, MASKED
            )
            logits[index].index_add_(0, last_tokens, penalty)


class MinTokens(LogitsProcessor):
    """`min_tokens`: what would end the request is masked until its output is long enough."""

    def setting(self, opened: OpenRow) -> tuple[torch.Tensor, int] | None:
        # An id outside the vocabulary cannot be drawn: nothing to mask.
        stops = [token for token in set(opened.stop_token_ids) if token < self.vocab_size]
        if not opened.sampling.min_tokens or not stops:
            return None
        return self.ids(sorted(stops)), opened.num_prompt_tokens + opened.sampling.min_tokens

    def wanted(self, setting: tuple[torch.Tensor, int], position: int) -> bool:
        return position < setting[1]

    def apply(self, logits: torch.Tensor, selected: list[SelectedRow]) -> None:
        for index, _, _, (stops, _) in selected:
            logits[index].index_fill_(0, stops, MASKED)


class LogitBias(LogitsProcessor):
    """`logit_bias`: added to the logits."""

    def setting(self, opened: OpenRow) -> tuple[torch.Tensor, torch.Tensor] | None:
        bias = opened.sampling.logit_bias
        if not bias:
            return None
        values = torch.tensor(list(bias.values()), dtype=torch.float32, device=self.token_ids.device)
        return self.ids(list(bias)), values

    def apply(self, logits: torch.Tensor, selected: list[SelectedRow]) -> None:
        for index, _, _, (tokens, values) in selected:
            logits[index].index_add_(0, tokens, values)


class _PenaltySetting(NamedTuple):
    num_prompt_tokens: int
    repetition: float
    frequency: float
    presence: float


class Penalties(LogitsProcessor):
    """`repetition_penalty` over prompt and output, then `frequency_penalty` and `presence_penalty` over the output.

    Touches only the tokens that occur in the row, never the whole vocabulary.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__(token_ids, vocab_size)
        self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=token_ids.device)  # all zero between calls

    def setting(self, opened: OpenRow) -> _PenaltySetting | None:
        sampling = opened.sampling
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        return None if penalties == (1.0, 0.0, 0.0) else _PenaltySetting(opened.num_prompt_tokens, *penalties)

    def apply(self, logits: torch.Tensor, selected: list[SelectedRow]) -> None:
        for index, row, position, setting in selected:
            tokens = self.token_ids[row, :position].long()
            row_logits = logits[index]
            if setting.repetition != 1.0:
                # A token that occurs twice is written twice, with the same value.
                seen = row_logits[tokens]
                row_logits[tokens] = torch.where(seen > 0, seen / setting.repetition, seen * setting.repetition)
            output = tokens[setting.num_prompt_tokens :]
            if len(output) and (setting.frequency or setting.presence):
                self._counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
                penalty = self._counts[output] * setting.frequency + setting.presence
                row_logits[output] = row_logits[output] - penalty
                self._counts.index_fill_(0, output, 0)


# The order is vLLM's: masks and bias first, then penalties.
PROCESSORS: tuple[type[LogitsProcessor], ...] = (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties)
