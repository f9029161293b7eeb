"""Log-probabilities of chosen tokens and of the likeliest ones, from the model's own logits."""

# n rows  V vocabulary  k candidates

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.plan import TokenLogprobs
from trimtab.runner.candidates import RowMass, block_maxima, top_tokens

# Rows worked on at a time: bounds the scratch memory when a long prompt's log-probabilities are asked for.
ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, eq=False)
class LogprobsTensors:
    """Column 0 is the chosen token, then the k likeliest by falling log-probability."""

    token_ids: torch.Tensor  # int64 [n, 1 + k]
    logprobs: torch.Tensor  # float32 [n, 1 + k]
    ranks: torch.Tensor  # int64 [n]: 1 = the likeliest; of equals, the lower id comes first

    def to(self, device: torch.device | str) -> LogprobsTensors:
        return LogprobsTensors(
            *(tensor.to(device, non_blocking=True) for tensor in (self.token_ids, self.logprobs, self.ranks))
        )

    def entry(self, index: int, num_logprobs: int) -> TokenLogprobs:
        """Row `index` for the host, with the candidates that its request asked for."""
        columns = slice(0, 1 + num_logprobs)
        return TokenLogprobs(
            self.token_ids[index, columns].numpy(), self.logprobs[index, columns].numpy(), int(self.ranks[index])
        )


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> LogprobsTensors:
    """Log-probabilities of `token_ids` [n] and of the `num_logprobs` likeliest tokens under `logits` [n, V].

    A row's numbers depend neither on the other rows nor on how many candidates the others asked for.
    """
    parts = [
        _rows_logprobs(logits[start : start + ROWS_AT_A_TIME].float(), token_ids[start : start + ROWS_AT_A_TIME], k)
        for k in [min(num_logprobs, logits.shape[1])]
        for start in range(0, len(logits), ROWS_AT_A_TIME)
    ]
    return LogprobsTensors(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _rows_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen_ids = token_ids.unsqueeze(1)
    chosen = logits.gather(1, chosen_ids)
    maxima = block_maxima(logits)
    peak = maxima.amax(dim=1, keepdim=True)
    log_total = RowMass(logits, peak).total.log()
    ids, values = chosen_ids, chosen
    if num_logprobs:
        top_values, top_ids = top_tokens(logits, maxima, num_logprobs)
        ids, values = torch.cat([chosen_ids, top_ids], dim=1), torch.cat([chosen, top_values], dim=1)
    lower_ids = torch.arange(logits.shape[1], device=logits.device) < chosen_ids
    ahead = (logits > chosen).logical_or_((logits == chosen).logical_and_(lower_ids))
    ranks = 1 + ahead.sum(dim=1, dtype=torch.int32).long()  # int32: twice as fast as torch's own choice for bools
    return ids, ((values - peak).double() - log_total).float(), ranks
