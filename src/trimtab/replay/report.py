"""How far a trainer's router and log-probabilities are from the rollout's, without replay and with it.

Router mismatch, per layer: the share of rows whose SET of experts differs, and the share of (row, expert) pairs of the
rollout that the trainer did not choose. KL(rollout || trainer) is estimated from the sampled tokens, with
d = rollout's log-probability - trainer's: k1 = mean(d), unbiased and of either sign; k3 = mean(exp(-d) - 1 + d), never
negative and of less variance. Both need tokens sampled from what the log-probabilities describe: at temperature 1 and
without top-k or top-p they estimate the KL; elsewhere they only measure how far the two differ.
"""

# S tokens of a completion  L MoE layers  K top-k  V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.replay.forcing import replay_routed_experts
from trimtab.replay.recording import record_routed_experts
from trimtab.replay.routes import Routes


@dataclass(slots=True)
class LayerMismatch:
    """Counts of one MoE layer."""

    layer_id: int
    num_rows: int = 0
    num_pairs: int = 0
    rows_that_differ: int = 0
    pairs_that_differ: int = 0

    @property
    def row_share(self) -> float:
        return self.rows_that_differ / max(self.num_rows, 1)

    @property
    def pair_share(self) -> float:
        return self.pairs_that_differ / max(self.num_pairs, 1)


@dataclass(slots=True)
class RunReport:
    """One way of running the trainer, over all completions."""

    layers: list[LayerMismatch]
    num_tokens: int = 0  # sampled tokens with the rollout's log-probability
    sum_k1: float = 0.0
    sum_k3: float = 0.0

    @property
    def agreement(self) -> float:
        """Share of the rollout's (row, expert) pairs that the trainer used too, over all layers."""
        return 1.0 - sum(layer.pairs_that_differ for layer in self.layers) / max(self._pairs, 1)

    @property
    def row_mismatch(self) -> float:
        """Share of (row, layer) whose set of experts differs."""
        rows = sum(layer.num_rows for layer in self.layers)
        return sum(layer.rows_that_differ for layer in self.layers) / max(rows, 1)

    @property
    def kl_k1(self) -> float | None:
        return self.sum_k1 / self.num_tokens if self.num_tokens else None

    @property
    def kl_k3(self) -> float | None:
        return self.sum_k3 / self.num_tokens if self.num_tokens else None

    @property
    def _pairs(self) -> int:
        return sum(layer.num_pairs for layer in self.layers)

    def count_experts(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Both [rows, L, K]."""
        for ordinal, layer in enumerate(self.layers):
            wanted, chosen = expected[:, ordinal], found[:, ordinal]
            missed = ~(wanted[:, :, None] == chosen[:, None, :]).any(axis=2)  # [rows, K]
            layer.num_rows += len(missed)
            layer.num_pairs += missed.size
            layer.rows_that_differ += int(missed.any(axis=1).sum())
            layer.pairs_that_differ += int(missed.sum())

    def count_logprobs(self, rollout: np.ndarray, trainer: np.ndarray) -> None:
        difference = rollout.astype(np.float64) - trainer.astype(np.float64)
        self.num_tokens += len(difference)
        self.sum_k1 += float(difference.sum())
        self.sum_k3 += float((np.exp(-difference) - 1.0 + difference).sum())

    def as_dict(self) -> dict[str, Any]:
        return {
            "agreement": self.agreement,
            "row_mismatch": self.row_mismatch,
            "kl_k1": self.kl_k1,
            "kl_k3": self.kl_k3,
            "layers": [
                {"layer_id": layer.layer_id, "row_mismatch": layer.row_share, "pair_mismatch": layer.pair_share}
                for layer in self.layers
            ],
        }


@dataclass(slots=True)
class ReplayReport:
    """`without` replay the trainer's router chose, `with_replay` the rollout's experts were forced."""

    without: RunReport
    with_replay: RunReport
    num_completions: int = 0
    num_rows: int = 0
    left_out: list[str] = field(default_factory=list)  # completions with no row

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_completions": self.num_completions,
            "num_rows": self.num_rows,
            "num_sampled_tokens": self.without.num_tokens,
            "without_replay": self.without.as_dict(),
            "with_replay": self.with_replay.as_dict(),
            "left_out": self.left_out,
        }


@torch.no_grad()
def report_replay(
    model: nn.Module, routes: Iterable[Routes], progress: Callable[[int], None] | None = None
) -> ReplayReport:
    """Runs `model` twice over each completion, one at a time. `progress` is told how many are done.

    Raises ValueError where routes and model do not fit, or no completion has a row.
    """
    report: ReplayReport | None = None
    for number, entry in enumerate(routes, 1):
        if report is None:
            report = ReplayReport(without=_empty_run(entry), with_replay=_empty_run(entry))
        if entry.num_rows:
            report.num_completions += 1
            report.num_rows += entry.num_rows
            _run(model, entry, report.without, replayed=False)
            _run(model, entry, report.with_replay, replayed=True)
        else:
            report.left_out.append(entry.label)
        if progress is not None:
            progress(number)
    if report is None or not report.num_completions:
        raise ValueError("no completion has a row of routed experts; there is nothing to compare")
    return report


def _run(model: nn.Module, entry: Routes, run: RunReport, *, replayed: bool) -> None:
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.asarray(entry.token_ids, np.int64)).to(device)
    # All but the last token: its output says nothing about a sampled one. Where the routes have its row, it runs too.
    whole = entry.num_rows == entry.num_tokens - entry.start
    inputs = tokens[None] if whole else tokens[None, :-1]
    with ExitStack() as stack:
        stack.enter_context(replay_routed_experts(model, entry) if replayed else nullcontext())
        recording = stack.enter_context(record_routed_experts(model))
        logits = model(input_ids=inputs, use_cache=False).logits[0]  # [S or S - 1, V]
    run.count_experts(entry.experts, recording.experts[entry.start : entry.start + entry.num_rows])
    if entry.logprobs is None or not len(entry.logprobs):
        return
    first = entry.num_prompt_tokens
    if first == 0:
        return  # the first token was not sampled after anything
    sampled = tokens[first:]
    logprobs = logits[first - 1 : first - 1 + len(sampled)].float().log_softmax(dim=-1)
    run.count_logprobs(entry.logprobs, logprobs.gather(1, sampled[:, None])[:, 0].cpu().numpy())


def _empty_run(entry: Routes) -> RunReport:
    return RunReport([LayerMismatch(layer_id) for layer_id in entry.model.layer_ids])
