"""The words between the engine and its workers: a step's plan goes down, a step's output comes back.

Plain data (ints, lists, strings, numpy), so that a plan can cross a process boundary. A *row* is a place in the
worker's request table: a request keeps its row from `OpenRow` until it is closed; the scheduler owns the numbering.
Rows closed by a plan are free before the same plan opens rows. All plans are executed in the order of `step_id`.

Each data-parallel rank has rows of its own and gets its own plan for every step; lists of plans and of outputs are
indexed by that rank. The tensor-parallel ranks of one data-parallel rank all run its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trimtab.experts.ports import CheckWeights, Command, Refit, Report
from trimtab.sampling_params import SamplingParams


@dataclass(slots=True)
class OpenRow:
    """A request takes a row. Sent once per residence; again, with all tokens known so far, after a preemption."""

    row: int
    request_id: str
    token_ids: list[int]  # prompt, then what was generated before a preemption
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # resolved: the request's own seed or one drawn from the engine's
    stop_token_ids: list[int]  # every id that ends the request (EOS included): masked while min_tokens is not reached
    bad_word_token_ids: list[list[int]] = field(default_factory=list)  # token sequences never to complete


@dataclass(slots=True)
class ScheduledRow:
    """`num_tokens` tokens of one row, from position `start`. `samples`: the last of them is followed by a new token,
    which the worker writes to position `start + num_tokens` of the row, so that the next plan can name it before the
    engine has seen it."""

    row: int
    start: int
    num_tokens: int
    samples: bool
    new_block_ids: tuple[list[int], ...]  # per KV cache group: block ids appended to the row's block table


@dataclass(slots=True)
class StepPlan:
    """One data-parallel rank's part of a step, which may be nothing."""

    step_id: int
    close_rows: list[int] = field(default_factory=list)
    open_rows: list[OpenRow] = field(default_factory=list)
    scheduled: list[ScheduledRow] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)  # the balancer's, executed before the forward
    # Whether any rank computes in this step: MoE layers are collective, so one without rows then takes part with none.
    runs_forward: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.scheduled)

    @property
    def weights_timeout_s(self) -> float | None:
        """Where commands read new weights: the step may take as long as this, in place of the executor's own limit."""
        limits = (command.timeout_s for command in self.commands if isinstance(command, CheckWeights | Refit))
        return max(limits, default=None)


@dataclass(slots=True)
class TokenLogprobs:
    """Candidates of one position: ids, log-probabilities and the chosen token's rank. Entry 0 is the chosen token."""

    token_ids: np.ndarray  # int64 [1 + k]
    logprobs: np.ndarray  # float32 [1 + k]
    rank: int  # 1 = most likely


@dataclass(slots=True)
class RoutedRows:
    """The experts that a step's tokens chose, in the order of the plan's tokens: logical ids, in the router's order."""

    experts: np.ndarray  # integers [T, num_moe_layers, top_k]
    slot_mapping: np.ndarray  # int64 [T]: where each token's K/V went, in the capturer's KV cache group


@dataclass(slots=True)
class StepOutput:
    """What one step gave. `token_ids[row]` exists for each scheduled row with `samples`, unless it is in `failures`."""

    step_id: int
    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # row -> one entry per scheduled prompt position p in [start, start + num_tokens): the log-probability of prompt
    # token p + 1 given the tokens up to p (positions whose next token is not a prompt token are left out)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # row -> reason; the request fails, the others go on
    routed_experts: RoutedRows | None = None
    reports: list[Report] = field(default_factory=list)  # the balancer's


def join_token_groups(outputs: Sequence[StepOutput], tensor_parallel_size: int) -> list[StepOutput]:
    """outputs of all ranks -> one per data-parallel rank: its first one's, with the reports of all."""
    joined = list(outputs[::tensor_parallel_size])
    for index, output in enumerate(outputs):
        if index % tensor_parallel_size:
            joined[index // tensor_parallel_size].reports += output.reports
    return joined


class PendingOutput(Protocol):
    """One rank's output on its way. `get` waits for it; called exactly once, in launch order."""

    def get(self) -> StepOutput: ...


class Runner(Protocol):
    """One rank's worker as executors see it: launch a step, then launch its sampling."""

    def execute(self, plan: StepPlan) -> None: ...

    def sample(self) -> PendingOutput: ...


class PendingStep(Protocol):
    """A step in flight. `get` waits for all ranks' outputs; called exactly once, in launch order."""

    def get(self) -> list[StepOutput]: ...

    def wait(self, timeout_s: float) -> bool:
        """Waits no longer than that -> whether `get` would return, or raise, at once."""
        ...


class Executor(Protocol):
    """Runs step plans on the workers of all ranks.

    1. `execute(plans)`, one plan per data-parallel rank with the same `step_id`, launches the step and returns at once
       where the device allows it.
    2. `PendingStep.get()` gives the outputs, in launch order; it raises what the step raised on any rank.
    3. `check_health()` raises the fault of a worker that failed, also between steps.
    4. `shutdown()` ends everything that was started; safe to call twice.
    """

    def execute(self, plans: list[StepPlan]) -> PendingStep: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table. `window` None: full attention (MLA counts as such); else a sliding window of
    that many tokens, query position included."""

    layer_ids: tuple[int, ...]
    window: int | None
    bytes_per_token: int  # over all layers of the group


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Decided once, at start, by the composition root; worker and engine read the same object.

    All groups draw block ids from one pool. The j-th layer of every group lives in buffer j, so a block costs
    `block_size * sum_j(max over groups of the j-th layer's bytes per token)` whichever group holds it. Block 0 is never
    handed out: it is the null block that stands for positions a sliding window has left behind.
    """

    block_size: int
    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]
