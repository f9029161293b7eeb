"""The protocol with a fault in it, one each: negative controls for the simulation's checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulated_engine import Mutation

from trimtab.experts.control.controller import Controller
from trimtab.experts.control.transaction import (
    Aborted,
    Aborting,
    Begin,
    Cancel,
    Committing,
    Done,
    Finishing,
    NextStep,
    OpenState,
    Ready,
    Staging,
    StepDone,
)
from trimtab.experts.ports import Abort, Command, Commit, Staged


class CommitsBeforeAllStaged(Controller):
    def _advance(self, event: Any) -> list[Command]:
        commands = super()._advance(event)
        if isinstance(self.state, Staging) and self.state.ranks:
            self.state = Ready(self.state.work, self.state.layer)
        return commands


class StartsBeforeAllQuiescent(Controller):
    def _advance(self, event: Any) -> list[Command]:
        commands = super()._advance(event)
        if isinstance(self.state, Aborting) and self.state.ranks:
            self.state = Aborted(self.state.work.placement, self.state.work.transaction, self.state.reason)
        return commands


class EndsBeforeAllAreHome(Controller):
    """Believes a transaction over with its last commit: kernels may still read staging."""

    def _advance(self, event: Any) -> list[Command]:
        commands = super()._advance(event)
        if isinstance(self.state, Finishing):
            self.state = Done(self.state.work.placement, self.state.work.transaction)
        return commands


class OverlapsTransactions(Controller):
    """A due trigger does not wait for the end of the open one."""

    def _may_decide(self) -> bool:
        return self._decision is None and not self._is_warming_up

    def _advance(self, event: Any) -> list[Command]:
        if isinstance(event, Begin) and isinstance(self.state, OpenState):
            work = self.state.work
            self.state = Aborted(work.placement, work.transaction, "forgotten")
        return super()._advance(event)


class CommitsAfterAbort(Controller):
    def _advance(self, event: Any) -> list[Command]:
        before = self.state
        commands = super()._advance(event)
        if isinstance(before, Aborting) and before.work.next_layer and any(isinstance(c, Abort) for c in commands):
            commands.append(Commit(before.work.transaction, before.work.next_layer.layer))
        return commands


class BelievesAnyTransaction(Controller):
    """Reports are not dropped for being of another transaction."""

    def _advance(self, event: Any) -> list[Command]:
        if isinstance(event, StepDone) and isinstance(self.state, Staging):
            transaction = self.state.work.transaction
            reports = [Staged(r.rank, transaction, r.layer) if isinstance(r, Staged) else r for r in event.reports]
            event = replace(event, reports=tuple(reports))
        return super()._advance(event)


class ForgetsLayersOnRefit(Controller):
    """New weights are written without waiting for the open transaction to rest."""

    def _advance_refit(self, event: Any) -> list[Command]:
        state = self.state
        try:
            if isinstance(state, OpenState):
                self.state = Aborted(state.work.placement, state.work.transaction, "")
            return super()._advance_refit(event)
        finally:
            self.state = state


class CountsEmptySteps(Controller):
    """The clock runs in steps without a forward."""

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]:
        if not runs_forward:
            self.trigger.count_step()
        return super().commands(runs_forward=runs_forward, now=now)


class NeverGivesUp(Controller):
    """No deadline."""

    def _tick(self, now: float, is_idle: bool | None = None) -> None:
        super()._tick(self._now or now, is_idle)


class LosesACommit(Controller):
    """Believes a layer committed when it is only sent: what a rank lost is not noticed."""

    def _advance(self, event: Any) -> list[Command]:
        if isinstance(event, StepDone) and isinstance(self.state, Committing):
            commit, work = self.state.commit, self.state.work
            if event.step == commit.step:
                placement = work.placement.with_layer(commit.layer, work.target)
                self.state = Aborting(replace(work, placement=placement, num_committed=work.num_committed + 1), "lost")
        return super()._advance(event)


class IgnoresDrain(Controller):
    def _advance(self, event: Any) -> list[Command]:
        commands = [] if isinstance(event, Cancel) else super()._advance(event)
        if isinstance(event, NextStep) and self._is_draining and isinstance(self.state, OpenState):
            self.state = Aborted(self.state.work.placement, self.state.work.transaction, "drain")
        return commands


MUTATIONS = {
    "commits before all have staged": Mutation(CommitsBeforeAllStaged),
    "starts before all are quiescent": Mutation(StartsBeforeAllQuiescent),
    "ends before all experts are home": Mutation(EndsBeforeAllAreHome),
    "overlaps transactions": Mutation(OverlapsTransactions),
    "commits after an abort": Mutation(CommitsAfterAbort),
    "believes any transaction": Mutation(BelievesAnyTransaction),
    "writes weights into an open transaction": Mutation(ForgetsLayersOnRefit),
    "counts empty steps": Mutation(CountsEmptySteps),
    "never gives up": Mutation(NeverGivesUp),
    "ends at once when draining": Mutation(IgnoresDrain),
    "reuses a group after an abort": Mutation(reuse_group=True),
}
