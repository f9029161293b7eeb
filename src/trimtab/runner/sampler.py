"""From logits to tokens: processors, then the largest logit or a draw, and log-probabilities for those who asked."""

# R rows of the batch  V vocabulary  n rows of a group  C candidates

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trimtab.plan import StepOutput
from trimtab.runner.candidates import (
    RowMass,
    block_maxima,
    candidate_steps,
    largest_tokens,
    ordered_candidates,
    rows_of,
)
from trimtab.runner.logprobs import LogprobsTensors, token_logprobs
from trimtab.runner.sampling_batch import FilteredRows, LogprobsRows, SampledRows, SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """A batch's tokens, on the device; `to` starts the copy to the host, `report` reads it there."""

    token_ids: torch.Tensor  # int64 [R]
    peaks: torch.Tensor  # float32 [R]: the largest processed logit; a row whose peak is not finite has failed
    logprobs: LogprobsTensors | None
    logprobs_rows: LogprobsRows | None

    def to(self, device: torch.device | str) -> SamplerOutput:
        return SamplerOutput(
            self.token_ids.to(device, non_blocking=True),
            self.peaks.to(device, non_blocking=True),
            None if self.logprobs is None else self.logprobs.to(device),
            self.logprobs_rows,
        )

    def report(self, rows: np.ndarray, output: StepOutput) -> None:
        """Enters tokens, log-probabilities and failures under the request rows `rows` [R]. Called on the host copy."""
        row_list = rows.tolist()
        for row, token, peak in zip(row_list, self.token_ids.tolist(), self.peaks.tolist(), strict=True):
            if math.isfinite(peak):
                output.token_ids[row] = token
            else:
                output.failures[row] = _failure(peak)
        if self.logprobs is None or self.logprobs_rows is None:
            return
        asked = zip(self.logprobs_rows.index_host.tolist(), self.logprobs_rows.num_logprobs.tolist(), strict=True)
        for entry, (index, num_logprobs) in enumerate(asked):
            if row_list[index] in output.token_ids:
                output.logprobs[row_list[index]] = self.logprobs.entry(entry, num_logprobs)


def _failure(peak: float) -> str:
    if peak == -math.inf:
        return "no token is left to choose: allowed_token_ids, bad_words, min_tokens or the grammar mask all; relax one"
    return f"the model gave logits that are not finite ({peak}); check the checkpoint and the dtype"


class Sampler:
    """Stateless. Order of the steps as in vLLM: mask, bias, penalties, temperature, min_p, top_k, top_p, draw.

    Log-probabilities are of the model's own logits, before all of that (vLLM's default, `raw_logprobs`).
    """

    def __call__(
        self, logits: torch.Tensor, batch: SamplingBatch, grammar_masks: torch.Tensor | None = None
    ) -> SamplerOutput:
        """Draws a token for each row of logits [R, V], which it may overwrite. `grammar_masks` bool [R, V]: allowed."""
        logits = logits.float()
        raw = self._raw_logits(logits, batch, grammar_masks)
        if grammar_masks is not None:
            logits.masked_fill_(~grammar_masks, -math.inf)
        for processor, selected in batch.processors:
            processor.apply(logits, selected)
        maxima = block_maxima(logits)
        peaks, token_ids = largest_tokens(logits, maxima)
        if batch.unfiltered is not None:
            token_ids[batch.unfiltered.index] = _draw(logits, peaks, batch.unfiltered)
        if batch.filtered is not None:
            token_ids[batch.filtered.index] = _draw_filtered(logits, maxima, peaks, batch.filtered)
        logprobs = None
        if batch.logprobs is not None and raw is not None:
            num_logprobs = int(batch.logprobs.num_logprobs.max())
            logprobs = token_logprobs(raw, token_ids[batch.logprobs.index], num_logprobs)
        return SamplerOutput(token_ids, peaks, logprobs, batch.logprobs)

    def _raw_logits(
        self, logits: torch.Tensor, batch: SamplingBatch, grammar_masks: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The logits whose log-probabilities are reported, copied if something is about to overwrite them."""
        if batch.logprobs is None:
            return None
        if batch.processors or grammar_masks is not None:
            return logits.index_select(0, batch.logprobs.index)
        return rows_of(logits, batch.logprobs.index)


def _draw(logits: torch.Tensor, peaks: torch.Tensor, rows: SampledRows) -> torch.Tensor:
    """Tokens [n] drawn from the whole vocabulary."""
    mass = RowMass(rows_of(logits, rows.index), peaks[rows.index].unsqueeze(1), rows.temperature)
    return mass.draw(rows.uniform)[:, 0]


def _draw_filtered(logits: torch.Tensor, maxima: torch.Tensor, peaks: torch.Tensor, rows: FilteredRows) -> torch.Tensor:
    """Tokens [n] drawn from what min_p, top_k and top_p leave.

    In the order of falling logits each filter keeps a prefix, so the draw needs the candidates only as far as the
    shortest prefix goes: rows that are not settled by the likeliest 64 look at more.
    """
    logits, maxima = rows_of(logits, rows.index), rows_of(maxima, rows.index)
    vocab_size = logits.shape[1]
    peaks = peaks[rows.index].unsqueeze(1)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    # top_p alone is a fraction of the whole row's mass; otherwise of what min_p and top_k leave.
    whole_row = (rows.top_k == vocab_size) & (rows.min_p == 0)
    total = torch.zeros_like(rows.uniform)
    if whole := torch.nonzero(whole_row[:, 0])[:, 0].tolist():
        total[whole] = RowMass(logits[whole], peaks[whole], rows.temperature[whole]).total
    may_settle = whole_row | (rows.min_p > 0)  # in any step; top_k alone is settled by more candidates than it keeps
    open_rows = torch.arange(len(logits), device=logits.device)
    for size in candidate_steps(vocab_size):
        # Which steps a row goes through is its own affair: no other row makes it skip or add one.
        now = open_rows[(may_settle | (rows.top_k < size) | (size == vocab_size))[open_rows, 0]]
        if not len(now):
            continue
        values, ids = ordered_candidates(rows_of(logits, now), rows_of(maxima, now), size)
        drawn, settled = _draw_prefix(values, peaks[now], rows, now, whole_row[now], total[now], size == vocab_size)
        tokens[now] = ids.gather(1, drawn)[:, 0]
        open_rows = open_rows[~torch.isin(open_rows, now[settled[:, 0]])]
        if not len(open_rows):
            break
    return tokens


def _draw_prefix(
    values: torch.Tensor,  # [n, C], falling
    peaks: torch.Tensor,
    rows: FilteredRows,
    now: torch.Tensor,  # which of `rows` these are
    whole_row: torch.Tensor,
    total: torch.Tensor,
    complete: bool,  # the candidates are the whole vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drawn candidate [n, 1] and whether these candidates were enough to tell [n, 1]."""
    num_candidates = values.shape[1]
    mass = ((values - peaks) / rows.temperature[now]).exp_().double()
    cumulative = mass.cumsum(dim=-1)
    survives = (mass > 0) & (mass >= rows.min_p[now])
    kept = torch.minimum(survives.sum(dim=-1, keepdim=True), rows.top_k[now]).clamp_min_(1)
    seen_all = (kept < num_candidates) | complete
    base = torch.where(seen_all, cumulative.gather(1, kept - 1), total)
    top_p = rows.top_p[now]
    reaching = (cumulative < top_p * base).sum(dim=-1, keepdim=True) + 1
    kept = torch.where(top_p < 1, torch.minimum(kept, reaching), kept)
    last = kept - 1
    target = rows.uniform[now] * cumulative.gather(1, last)
    drawn = torch.minimum((cumulative <= target).sum(dim=-1, keepdim=True), last)
    # Candidates equal to the last one may be incomplete (see ordered_candidates): the prefix must end above them.
    settled = (values.gather(1, last) > values[:, -1:]) & (seen_all | whole_row) | complete
    return drawn, settled
