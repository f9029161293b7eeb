"""The protocol of one rearrangement as a pure function: (state, event) -> (state, commands). No threads, no I/O.

    Idle -> Planned -> Staging(layer) -> Ready(layer) -> Committing(layer) -> Committed(layer) ... -> Finishing -> Done
    and from any state in between Aborting(reason) -> Aborted; Broken: a rank did not keep the protocol

Commands come only with `NextStep`, the moment at which a step plan is about to be sent: all that is known by then has
been taken into account, and a decision never waits in a queue. Steps' outputs come back in the order of the plans; a
plan that was sent is executed whole. `{Commit l, Stage l+1}` stand in one plan: kernels may still read staging then,
and each rank stages l+1 when its experts of l have come home. After the last commit all ranks say `Quiescent` when
theirs have, and nothing that needs slots, staging or movers at rest begins before.

Time comes in as `Tick` alone, and counts from the last progress: a plan that was answered, any rank that has staged, or
come to rest, after the others. Half of `stall_timeout_s` is for that; the other half, from the abort on, is for all
ranks to come to rest, so that a transaction that stalls ends within it where all ranks live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.experts.placement import Placement
from trimtab.experts.ports import Abort, Command, Commit, Committed, Failed, Plan, Quiescent, Report, Stage, Staged

LONGEST_IDLE_TICK_S = 1.0  # with no step in flight nobody could make progress: more of such a gap does not count


@dataclass(frozen=True, slots=True)
class ChangedLayer:
    """A layer that a transaction changes. Without transfers its shares alone change: nothing to stage."""

    layer: int
    has_transfers: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What all states of an open transaction know."""

    transaction: int
    target: Placement
    layers: tuple[ChangedLayer, ...]  # in the order of their commits
    stall_timeout_s: float
    placement: Placement  # the start's, with what was committed since: each commit is of all ranks or of none
    num_committed: int = 0
    waited_s: float = 0.0  # since the last progress

    @property
    def next_layer(self) -> ChangedLayer | None:
        return self.layers[self.num_committed] if self.num_committed < len(self.layers) else None


@dataclass(frozen=True, slots=True)
class SentCommit:
    """A commit that cannot be taken back; the output of its step brings all ranks' `Committed`."""

    layer: int
    step: int


@dataclass(frozen=True, slots=True)
class Idle:
    placement: Placement


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan is to be sent, or was sent in `step`; stays so only until that step's output if nothing is staged."""

    work: Work
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Staging:
    work: Work
    layer: int
    ranks: frozenset[int] = frozenset()  # those that said Staged


@dataclass(frozen=True, slots=True)
class Ready:
    """All ranks have staged the layer: its commit stands in the next plan."""

    work: Work
    layer: int


@dataclass(frozen=True, slots=True)
class Committing:
    work: Work
    commit: SentCommit
    staged_ranks: frozenset[int] = frozenset()  # those that said Staged of the layer after it


@dataclass(frozen=True, slots=True)
class CommittedLayer:
    """All ranks have committed the layer; the one that follows was not staged beside it."""

    work: Work
    layer: int


@dataclass(frozen=True, slots=True)
class Finishing:
    """All layers are committed on all ranks, and experts of the last one may be on their way home, out of staging."""

    work: Work
    ranks: frozenset[int] = frozenset()  # those that rest


@dataclass(frozen=True, slots=True)
class Done:
    placement: Placement
    transaction: int


@dataclass(frozen=True, slots=True)
class Aborting:
    """Until every mover rests. A commit that was sent before is completed all the same."""

    work: Work
    reason: str
    step: int | None = None  # whose plan carries the Abort
    commit: SentCommit | None = None
    ranks: frozenset[int] = frozenset()  # those that rest
    is_overdue: bool = False  # a mover does not come to rest; no transaction can follow before it does
    layer: int | None = None  # whose fault it was, where one layer or rank is to blame
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    """Layers committed before stay so; the next plan starts from `placement`."""

    placement: Placement
    transaction: int
    reason: str
    layer: int | None = None  # as in Aborting
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A rank did not do what it must: the ranks' placements may differ, so the engine has to end."""

    placement: Placement
    reason: str


OpenState = Planned | Staging | Ready | Committing | CommittedLayer | Finishing | Aborting
ClosedState = Idle | Done | Aborted | Broken
State = OpenState | ClosedState


@dataclass(frozen=True, slots=True)
class Begin:
    """Only from a closed state; `target` was checked whole and differs from the placement in force in `layers`."""

    transaction: int
    target: Placement
    layers: tuple[ChangedLayer, ...]
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class NextStep:
    """The plan of this step is about to be sent to all ranks."""

    step: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """The outputs of a step, all ranks' reports in them; in the order of the plans."""

    step: int
    reports: Sequence[Report]


@dataclass(frozen=True, slots=True)
class Tick:
    """`gap_s` since the last one. `is_idle`: no step was in flight in between."""

    gap_s: float
    is_idle: bool = False

    @property
    def counted_s(self) -> float:
        """What of the gap a deadline counts."""
        return max(0.0, min(self.gap_s, LONGEST_IDLE_TICK_S) if self.is_idle else self.gap_s)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drain, refit or shutdown: the transaction is to be aborted."""

    reason: str


Event = Begin | NextStep | StepDone | Tick | Cancel


def state_name(state: State) -> str:
    """For people: IDLE, STAGING(3), ABORTING(why) and so on."""
    match state:
        case Staging(layer=layer) | Ready(layer=layer):
            return f"{type(state).__name__.upper()}({layer})"
        case CommittedLayer(layer=layer):
            return f"COMMITTED({layer})"
        case Committing(commit=commit):
            return f"COMMITTING({commit.layer})"
        case Aborting(reason=reason):
            return f"ABORTING({reason})"
        case _:
            return type(state).__name__.upper()


def placement_of(state: State) -> Placement:
    """The placement in force on all ranks, as far as their reports tell."""
    return state.work.placement if isinstance(state, OpenState) else state.placement


def advance(state: State, event: Event) -> tuple[State, list[Command]]:
    """Every transition there is. Commands are for the plan that a `NextStep` names, in order."""
    match event:
        case Begin():
            return _begin(state, event), []
        case NextStep(step=step):
            return _next_step(state, step)
        case StepDone():
            return _on_step_done(state, event), []
        case Tick():
            return _on_tick(state, event), []
        case Cancel(reason=reason):
            return state if isinstance(state, Finishing) else _abort(state, reason), []  # there is nothing to undo


# -- beginning and ending ----------------------------------------------------------------------------------------------


def _begin(state: State, event: Begin) -> Planned:
    assert isinstance(state, Idle | Done | Aborted), f"a transaction cannot begin in {state_name(state)}"
    assert event.layers, "a placement that changes nothing needs no transaction"
    return Planned(Work(event.transaction, event.target, event.layers, event.stall_timeout_s, state.placement))


def _abort(state: State, reason: str, layer: int | None = None, rank: int | None = None) -> State:
    """From now on nothing more is staged or committed. What no rank has heard of is over at once."""
    match state:
        case Planned(work=work, step=None):
            return Aborted(work.placement, work.transaction, reason, layer, rank)
        case (
            Planned(work=work)
            | Staging(work=work)
            | Ready(work=work)
            | CommittedLayer(work=work)
            | Finishing(work=work)
        ):
            return Aborting(replace(work, waited_s=0.0), reason, layer=layer, rank=rank)
        case Committing(work=work, commit=commit):
            return Aborting(replace(work, waited_s=0.0), reason, commit=commit, layer=layer, rank=rank)
        case _:
            return state


# -- a plan is about to be sent ----------------------------------------------------------------------------------------


def _next_step(state: State, step: int) -> tuple[State, list[Command]]:
    match state:
        case Planned(work=work, step=None):
            return _send_plan(work, step)
        case Ready(work=work, layer=layer):
            return _send_commit(work, layer, step)
        case CommittedLayer(work=work):
            following = work.next_layer
            assert following is not None, "the last commit ends a transaction"
            return _send_commit(work, following.layer, step)
        case Aborting(work=work, step=None):
            return replace(state, step=step), [Abort(work.transaction, state.reason)]
        case _:
            return state, []


def _send_plan(work: Work, step: int) -> tuple[State, list[Command]]:
    target, first = work.target, work.layers[0]
    plan = Plan(work.transaction, target.slot_to_expert, target.shares, work.placement.digest())
    if first.has_transfers:
        return Staging(work, first.layer), [plan, Stage(work.transaction, first.layer)]
    return Planned(work, step), [plan]  # a commit must not fail: it waits for word that no rank objects to the plan


def _send_commit(work: Work, layer: int, step: int) -> tuple[State, list[Command]]:
    commands: list[Command] = [Commit(work.transaction, layer)]
    following = work.layers[work.num_committed + 1 : work.num_committed + 2]
    if following and following[0].has_transfers:
        commands.append(Stage(work.transaction, following[0].layer))
    return Committing(replace(work, waited_s=0.0), SentCommit(layer, step)), commands


# -- a step's outputs are here -----------------------------------------------------------------------------------------


def _on_step_done(state: State, event: StepDone) -> State:
    if not isinstance(state, OpenState):
        return state
    work = state.work
    reports = [report for report in event.reports if getattr(report, "transaction", None) == work.transaction]
    failures = [report for report in reports if isinstance(report, Failed)]
    match state:
        case Planned(step=sent) if failures or sent != event.step:
            pass
        case Planned():
            state = Ready(replace(work, waited_s=0.0), work.layers[0].layer)
        case Staging(layer=layer, ranks=ranks):
            found = _staged(reports, layer)
            state = _stage(work, layer, ranks | found, has_progress=not found <= ranks)
        case Committing(commit=commit):
            state = _on_committing(state, commit, event.step, reports)
        case Finishing(ranks=ranks):
            state = _finish(work, ranks | _resting(reports), has_progress=not _resting(reports) <= ranks)
        case Aborting():
            causes = [failed for failed in failures if not failed.is_consequence]
            if causes:  # heard after a fault of which it may well be the cause
                cause = causes[0]
                reason = f"{_why(cause)}; {state.reason}"
                state = replace(state, reason=reason, layer=_layer_of(cause), rank=cause.rank)
            return _on_aborting(state, event.step, reports)
    if failures:
        first = min(failures, key=lambda failed: failed.is_consequence)
        return _abort(state, _why(first), _layer_of(first), first.rank)
    return state


def _layer_of(failed: Failed) -> int | None:
    return failed.layer if failed.layer >= 0 else None


def _why(failed: Failed) -> str:
    where = f"layer {failed.layer}, " if failed.layer >= 0 else ""
    return f"{where}rank {failed.rank}: {failed.reason}"


def _staged(reports: Sequence[Report], layer: int) -> frozenset[int]:
    return frozenset(report.rank for report in reports if isinstance(report, Staged) and report.layer == layer)


def _resting(reports: Sequence[Report]) -> frozenset[int]:
    return frozenset(report.rank for report in reports if isinstance(report, Quiescent))


def _stage(work: Work, layer: int, ranks: frozenset[int], *, has_progress: bool) -> Staging | Ready:
    if has_progress:  # others may be slow: a layer is not given up as long as one after the other has it
        work = replace(work, waited_s=0.0)
    if len(ranks) < work.placement.topology.num_ranks:
        return Staging(work, layer, ranks)
    return Ready(work, layer)


def _finish(work: Work, ranks: frozenset[int], *, has_progress: bool) -> Finishing | Done:
    if len(ranks) < work.placement.topology.num_ranks:
        return Finishing(replace(work, waited_s=0.0) if has_progress else work, ranks)
    return Done(work.placement, work.transaction)


def _on_committing(state: Committing, commit: SentCommit, step: int, reports: Sequence[Report]) -> State:
    following = state.work.layers[state.work.num_committed + 1 : state.work.num_committed + 2]
    staged = state.staged_ranks
    if following:
        staged |= _staged(reports, following[0].layer)
    if step != commit.step:
        return replace(state, staged_ranks=staged)
    work = _complete(state.work, commit, reports)
    if isinstance(work, Broken):
        return work
    if not following:
        return _finish(work, _resting(reports), has_progress=True)
    if following[0].has_transfers:
        return _stage(work, following[0].layer, staged, has_progress=True)
    return CommittedLayer(work, commit.layer)


def _complete(work: Work, commit: SentCommit, reports: Sequence[Report]) -> Work | Broken:
    """The layer is new on all ranks, or the engine cannot go on."""
    placement = work.placement.with_layer(commit.layer, work.target)
    digests = {
        report.rank: report.digest
        for report in reports
        if isinstance(report, Committed) and report.layer == commit.layer
    }
    silent = sorted(set(range(placement.topology.num_ranks)) - set(digests))
    if silent:
        return Broken(work.placement, f"rank {silent[0]} did not commit layer {commit.layer}, and must")
    expected = placement.digest()
    other = sorted(rank for rank, digest in digests.items() if digest != expected)
    if other:
        return Broken(work.placement, f"rank {other[0]} has another placement after the commit of layer {commit.layer}")
    return replace(work, placement=placement, num_committed=work.num_committed + 1, waited_s=0.0)


def _on_aborting(state: Aborting, step: int, reports: Sequence[Report]) -> State:
    if state.commit is not None and state.commit.step == step:
        work = _complete(state.work, state.commit, reports)
        if isinstance(work, Broken):
            return work
        if work.next_layer is None and state.step is None:  # it was the last one: nothing is left to abort
            return _finish(work, _resting(reports), has_progress=True)
        state = replace(state, work=work, commit=None)
    if state.step is None or step < state.step:
        return state
    ranks = state.ranks | _resting(reports)
    if len(ranks) < state.work.placement.topology.num_ranks:
        return replace(state, ranks=ranks)
    assert state.commit is None, "outputs come in the order of the plans"
    return Aborted(state.work.placement, state.work.transaction, state.reason, state.layer, state.rank)


# -- time --------------------------------------------------------------------------------------------------------------


def _on_tick(state: State, event: Tick) -> State:
    if not isinstance(state, OpenState) or (isinstance(state, Planned) and state.step is None):
        return state
    if isinstance(state, Ready | CommittedLayer):
        return state  # nobody is waited for: the next plan carries the commit
    work = replace(state.work, waited_s=state.work.waited_s + event.counted_s)
    state = replace(state, work=work)
    if isinstance(state, Committing) or work.waited_s < work.stall_timeout_s / 2:
        return state  # a commit ends with its step; a step that does not end is the executor's to find
    if isinstance(state, Aborting):
        return replace(state, is_overdue=True)
    return _abort(state, *_stall(state))


def _stall(state: OpenState) -> tuple[str, int | None, int | None]:
    """(reason, layer, rank) of a transaction that does not get on."""
    after = f"after {state.work.waited_s:.1f} s without progress"
    if not isinstance(state, Staging | Finishing):
        return f"{after} in {state_name(state)}", None, None
    rank = min(set(range(state.work.placement.topology.num_ranks)) - state.ranks)
    if isinstance(state, Finishing):
        return f"rank {rank}: not at rest {after}", None, rank
    return f"layer {state.layer}, rank {rank}: not staged {after}", state.layer, rank
