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
    step_timeout_s: float  # of a step that checks the files or writes the weights
    timeout_s: float  # until answers are there
    is_sent: bool = False
    ranks: frozenset[int] = frozenset()  # those that found the files good
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Halting:
    path: str
    weights_version: int
    step_timeout_s: float
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
            return replace(state, is_sent=True), [CheckWeights(state.path, state.weights_version, state.step_timeout_s)]
        case Checking(), StepDone():
            return _on_checked(state, event, num_ranks), []
        case Halting(), NextStep(step=step) if is_at_rest:
            command = Refit(state.path, state.weights_version, state.step_timeout_s)
            return Writing(state.weights_version, step), [command]
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
    return Halting(state.path, state.weights_version, state.step_timeout_s, state.timeout_s)


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


class Refits:
    """The refits of one engine, one at a time, and what came of the last one. Called on: the engine's thread."""

    def __init__(self, num_ranks: int, timeout_s: float, weights_version: int = 0) -> None:
        self.weights_version = weights_version
        self.harm = ""  # why ranks' weights are mixed: from a refit that failed halfway until one that succeeds
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._state: RefitState = NoRefit()

    @property
    def is_open(self) -> bool:
        return not isinstance(self._state, NoRefit)

    @property
    def is_halting(self) -> bool:
        """Files are good on all ranks, and it waits for an open transaction to come to rest."""
        return isinstance(self._state, Halting)

    @property
    def holds_requests(self) -> bool:
        """No request may compute in a step that is planned now: ranks' weights are, or may be, half new."""
        return bool(self.harm) or isinstance(self._state, Halting | Writing)

    @property
    def result(self) -> RefitResult | None:
        """Of the last refit that ended; None while one is open and before the first."""
        return self._state.result if isinstance(self._state, NoRefit) else None

    def request(self, path: str, weights_version: int, step_timeout_s: float) -> None:
        """Raises ValueError while another one is open."""
        if self.is_open:
            raise ValueError(f"weights ({path!r}) cannot be loaded while others are being loaded; wait for their end")
        self._state = Checking(path, weights_version, step_timeout_s, self._timeout_s)

    def cancel(self, reason: str) -> RefitResult | None:
        """Ends the one that is open, unless its weights are being written -> what came of it."""
        if not isinstance(self._state, Checking | Halting):
            return None
        return self._end(RefitResult(self._state.weights_version, reason))

    def advance(
        self, event: NextStep | StepDone | Tick, *, is_at_rest: bool
    ) -> tuple[list[Command], RefitResult | None]:
        """-> commands for the plan that a `NextStep` names, and the result of a refit that ended with this event."""
        if not self.is_open:
            return [], None
        self._state, commands = advance_refit(self._state, event, num_ranks=self._num_ranks, is_at_rest=is_at_rest)
        return commands, None if self.result is None else self._end(self.result)

    def _end(self, result: RefitResult) -> RefitResult:
        self._state = NoRefit(result)
        if result.is_harmed:
            self.harm = result.problem
        elif not result.problem:
            self.harm, self.weights_version = "", result.weights_version
        return result
