"""New weights while serving, as a pure function: (state, event) -> (state, commands).

    NoRefit -> Checking -> Halting -> Writing -> NoRefit

1. Checking: every rank says whether it can load the files; one that cannot ends the refit, and nothing was harmed.
2. Halting: the open transaction is aborted and comes to rest, for staged bytes would be of the old weights.
3. Writing: one command, in one plan for all ranks, between two steps. A rank that fails after the first byte leaves
   the ranks' weights mixed: the engine is unhealthy until a refit succeeds.

No transaction begins while a refit is open. Time counts from the plan that asked for what is waited for: the step in
which files were checked may have taken long, and is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.experts.control.transaction import NextStep, StepDone, Tick
from trimtab.experts.ports import CheckWeights, Command, Refit, Refitted, WeightsChecked


@dataclass(frozen=True, slots=True)
class RefitResult:
    """`problem` is empty where all ranks compute with the new weights. `is_harmed`: ranks' weights are mixed."""

    weights_version: int
    problem: str = ""
    is_harmed: bool = False


@dataclass(frozen=True, slots=True)
class NoRefit:
    result: RefitResult | None = None  # of the last one


@dataclass(frozen=True, slots=True)
class Checking:
    path: str
    weights_version: int
    timeout_s: float
    is_sent: bool = False
    ranks: frozenset[int] = frozenset()  # those that found the files good
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Halting:
    path: str
    weights_version: int
    timeout_s: float
    is_waiting: bool = False  # a plan went out and found a transaction open
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Writing:
    weights_version: int
    step: int  # whose output brings all ranks' answers


RefitState = NoRefit | Checking | Halting | Writing


def advance_refit(
    state: RefitState, event: NextStep | StepDone | Tick, *, num_ranks: int, is_at_rest: bool
) -> tuple[RefitState, list[Command]]:
    """`is_at_rest`: no transaction is open."""
    match state, event:
        case Checking(is_sent=False), NextStep():
            return replace(state, is_sent=True), [CheckWeights(state.path, state.weights_version)]
        case Checking(), StepDone():
            return _on_checked(state, event, num_ranks), []
        case Halting(), NextStep(step=step) if is_at_rest:
            return Writing(state.weights_version, step), [Refit(state.path, state.weights_version)]
        case Halting(), NextStep():
            return replace(state, is_waiting=True), []
        case Writing(), StepDone(step=step) if step == state.step:
            return _on_written(state, event, num_ranks), []
        case ((Checking(is_sent=True) | Halting(is_waiting=True)), Tick(counted_s=counted_s)):
            return _on_tick(state, counted_s), []
        case _:
            return state, []


def _on_checked(state: Checking, event: StepDone, num_ranks: int) -> RefitState:
    answers = [
        report
        for report in event.reports
        if isinstance(report, WeightsChecked) and report.weights_version == state.weights_version
    ]
    for answer in answers:
        if answer.problem:
            return NoRefit(RefitResult(state.weights_version, f"rank {answer.rank}: {answer.problem}"))
    ranks = state.ranks | {answer.rank for answer in answers}
    if len(ranks) < num_ranks:
        return replace(state, ranks=ranks)
    return Halting(state.path, state.weights_version, state.timeout_s)


def _on_written(state: Writing, event: StepDone, num_ranks: int) -> NoRefit:
    answers = {
        report.rank: report.problem
        for report in event.reports
        if isinstance(report, Refitted) and report.weights_version == state.weights_version
    }
    silence = "did not say whether it has the new weights"
    # All of them: ranks that then find their replicas to differ need not be the ones that failed.
    problems = [f"rank {rank}: {problem}" for rank in range(num_ranks) if (problem := answers.get(rank, silence))]
    return NoRefit(RefitResult(state.weights_version, "; ".join(problems), is_harmed=bool(problems)))


def _on_tick(state: Checking | Halting, gap_s: float) -> RefitState:
    waited_s = state.waited_s + gap_s
    if waited_s < state.timeout_s:
        return replace(state, waited_s=waited_s)
    what = "not all ranks checked the files" if isinstance(state, Checking) else "a rearrangement did not come to rest"
    return NoRefit(RefitResult(state.weights_version, f"{what} within {state.timeout_s:g} s; nothing was changed"))
