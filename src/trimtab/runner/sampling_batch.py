"""What the sampler knows of each request: filled once when its row opens, gathered for a batch without a token loop."""

# N rows of the request table  R rows of the batch  n rows of a group

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trimtab.plan import OpenRow
from trimtab.runner.logits_processors import PROCESSORS, LogitsProcessor, SelectedRow

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit changes every output bit with probability near a half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed uint64, position), float64: nothing else has a say, so a request draws the
    same tokens alone, among others, after a preemption, in either runner (counter-based, after Steele et al. 2014,
    "Fast splittable pseudorandom number generators")."""
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN_GAMMA)
    bits = _mix(stream + _GOLDEN_GAMMA * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """Rows of a batch that draw at random. Column vectors, so that they broadcast over the vocabulary."""

    index: torch.Tensor  # int64 [n]
    temperature: torch.Tensor  # float32 [n, 1]
    uniform: torch.Tensor  # float64 [n, 1]


@dataclass(frozen=True, slots=True, eq=False)
class FilteredRows(SampledRows):
    """Those that draw from the likeliest tokens only."""

    top_k: torch.Tensor  # int64 [n, 1]; the vocabulary's size where there is no limit
    top_p: torch.Tensor  # float64 [n, 1]
    min_p: torch.Tensor  # float64 [n, 1]


@dataclass(frozen=True, slots=True, eq=False)
class LogprobsRows:
    """Rows of a batch that report log-probabilities."""

    index: torch.Tensor  # int64 [n]
    index_host: np.ndarray
    num_logprobs: np.ndarray  # int64 [n]: candidates beside the chosen token


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    unfiltered: SampledRows | None
    filtered: FilteredRows | None
    processors: list[tuple[LogitsProcessor, list[SelectedRow]]]
    logprobs: LogprobsRows | None


class SamplingTable:
    """Sampling parameters by row. Called on: runner thread.

    `token_ids` [N, model length + 1] is the request table's: prompt and output tokens, which penalties and bad words
    read. It must hold a row's first `position` tokens when a batch with that position is sampled.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.device = token_ids.device
        num_rows = token_ids.shape[0]
        self._processors = [processor(token_ids, vocab_size) for processor in PROCESSORS]
        self._greedy = np.ones(num_rows, dtype=bool)
        self._temperature = np.ones(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows)
        self._min_p = np.zeros(num_rows)
        self._filtered = np.zeros(num_rows, dtype=bool)
        self._seed = np.zeros(num_rows, dtype=np.uint64)
        self._num_logprobs = np.full(num_rows, -1, dtype=np.int64)

    def open(self, opened: OpenRow) -> None:
        row, sampling = opened.row, opened.sampling
        top_k = min(sampling.top_k or self.vocab_size, self.vocab_size)
        self._greedy[row] = sampling.greedy
        self._temperature[row] = sampling.temperature
        self._top_k[row] = top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._filtered[row] = top_k < self.vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        self._seed[row] = opened.seed % 2**64
        self._num_logprobs[row] = -1 if sampling.logprobs is None else min(sampling.logprobs, self.vocab_size)
        for processor in self._processors:
            processor.open(opened)

    def close(self, row: int) -> None:
        for processor in self._processors:
            processor.close(row)

    def gather(self, rows: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        """The batch that draws the token at `positions` [R] of request rows `rows` [R]."""
        sampled = ~self._greedy[rows]
        filtered = sampled & self._filtered[rows]
        row_list, position_list = rows.tolist(), positions.tolist()
        selections = [(processor, processor.gather(row_list, position_list)) for processor in self._processors]
        return SamplingBatch(
            unfiltered=self._sampled_rows(np.flatnonzero(sampled & ~filtered), rows, positions),
            filtered=self._filtered_rows(np.flatnonzero(filtered), rows, positions),
            processors=[(processor, selected) for processor, selected in selections if selected],
            logprobs=self._logprobs_rows(rows),
        )

    def _column(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).unsqueeze(1).to(self.device, non_blocking=True)

    def _sampled_rows(self, index: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> SampledRows | None:
        if not len(index):
            return None
        of = rows[index]
        return SampledRows(
            index=torch.from_numpy(index).to(self.device, non_blocking=True),
            temperature=self._column(self._temperature[of]),
            uniform=self._column(uniforms(self._seed[of], positions[index])),
        )

    def _filtered_rows(self, index: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> FilteredRows | None:
        sampled = self._sampled_rows(index, rows, positions)
        if sampled is None:
            return None
        of = rows[index]
        return FilteredRows(
            index=sampled.index,
            temperature=sampled.temperature,
            uniform=sampled.uniform,
            top_k=self._column(self._top_k[of]),
            top_p=self._column(self._top_p[of]),
            min_p=self._column(self._min_p[of]),
        )

    def _logprobs_rows(self, rows: np.ndarray) -> LogprobsRows | None:
        index = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not len(index):
            return None
        return LogprobsRows(
            index=torch.from_numpy(index).to(self.device, non_blocking=True),
            index_host=index,
            num_logprobs=self._num_logprobs[rows[index]],
        )
