"""The shell around the protocol that the engine drives: it counts steps, looks at loads and asks the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.experts.control.config import EplbConfig
from trimtab.experts.control.gain import (
    Changes,
    Outlook,
    balancedness,
    count_changes,
    look_ahead,
    mean_balancedness,
)
from trimtab.experts.control.load_trace import LoadTrace
from trimtab.experts.control.load_window import Bucket, LoadWindow
from trimtab.experts.control.policy.process import PolicyRunner
from trimtab.experts.control.refit import RefitResult, Refits
from trimtab.experts.control.tally import Tally
from trimtab.experts.control.transaction import (
    Aborted,
    Aborting,
    Begin,
    Broken,
    Cancel,
    ChangedLayer,
    Committing,
    Done,
    Idle,
    NextStep,
    OpenState,
    State,
    StepDone,
    Tick,
    advance,
    placement_of,
    state_name,
)
from trimtab.experts.control.trigger import Trigger
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement
from trimtab.experts.placement_diff import describe
from trimtab.experts.ports import Collect, Command, LoadReport, Report

# (event, its numbers and words): "declined", "policy_failed", "began", "committed", "done", "aborting", "aborted",
# "abort_overdue", "balancedness", "refit_ended".
Observer = Callable[[str, Mapping[str, Any]], None]


class RankProtocolError(RuntimeError):
    """A rank did not do what the protocol demands: ranks may hold different placements, and the engine has to end."""


def observe_nothing(event: str, numbers: Mapping[str, Any]) -> None:
    """The null object."""


@dataclass(frozen=True, slots=True)
class _SentStep:
    sent_at: float
    is_measured: bool  # with a forward that is traffic
    is_rearranging: bool


@dataclass
class _Decision:
    """From a due trigger to the policy's answer."""

    was_requested: bool
    end: int  # on the clock: the load up to there decides
    load: ExpertLoad | None = None
    asked_at: float = 0.0


class Controller:
    """One per engine. Called on: the engine's thread.

    1. `commands` for every step plan, before it is sent, in the order of the plans; 2. `on_reports` for every step's
    output, in the same order. 3. While `wants_step`, an engine without work sends plans of commands alone.
    4. `drain`, step until `is_at_rest`; `close`.

    `placement` is in force at start; a slot's bytes as they travel are `slot_nbytes`. `on_reports` raises
    RankProtocolError where a rank broke the protocol.
    """

    def __init__(
        self,
        config: EplbConfig,
        placement: Placement,
        *,
        slot_nbytes: int,
        policy: PolicyRunner,
        observer: Observer = observe_nothing,
        trace: LoadTrace | None = None,
        weights_version: int = 0,
    ) -> None:
        self.config, self.slot_nbytes, self.policy = config, slot_nbytes, policy
        self.observer, self.trace = observer, trace
        topology = placement.topology
        self.trigger = Trigger(config.step_interval, config.window_size)
        self.window = LoadWindow(topology.num_ranks, placement.num_layers, topology.num_experts, config.window_size)
        self.state: State = Idle(placement)
        self.tally = Tally(slot_nbytes)
        self.outlook: Outlook | None = None  # of the last decision, also when the answer was no
        self._num_ranks = topology.num_ranks
        self._refits = Refits(topology.num_ranks, config.stall_timeout_s, weights_version)
        self._decision: _Decision | None = None
        self._num_transactions = 0
        self._num_sent = self._num_returned = 0  # steps
        self._sent: deque[_SentStep] = deque()  # and not returned
        self._returned_at = 0.0  # the last one
        self._start = placement  # of the transaction that is open, or was last
        self._now: float | None = None
        self._is_warming_up = self._is_draining = False
        self._balancedness = 1.0
        self._by_layer = np.ones(placement.num_layers)  # balancedness [L] of the load that was last looked at

    # -- what the engine asks and tells --------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """In force on all ranks, as far as their reports tell."""
        return placement_of(self.state)

    @property
    def is_at_rest(self) -> bool:
        """No transaction, decision or refit is open."""
        return not isinstance(self.state, OpenState) and self._decision is None and not self._refits.is_open

    @property
    def wants_step(self) -> bool:
        """An idle engine must send plans of commands alone, until this is over."""
        return not self.is_at_rest or (self.trigger.is_requested and self._may_decide())

    @property
    def holds_requests(self) -> bool:
        """No request may compute in a step that is planned now: ranks' weights are, or may be, half new."""
        return self._refits.holds_requests

    @property
    def overdue_reason(self) -> str:
        """Why a transaction was aborted whose ranks do not come to rest, so that none can follow; else empty."""
        return self.state.reason if isinstance(self.state, Aborting) and self.state.is_overdue else ""

    @property
    def unhealthy_reason(self) -> str:
        """Not empty from a refit that failed after the first byte until one that succeeds."""
        return self._refits.harm

    @property
    def weights_version(self) -> int:
        return self._refits.weights_version

    @property
    def refit_result(self) -> RefitResult | None:
        """Of the last refit that ended; None while one is open and before the first."""
        return self._refits.result

    def request_rearrangement(self) -> None:
        """A decision at the next step, whatever its gain."""
        self.trigger.request()

    def request_refit(self, path: str, weights_version: int, timeout_s: float) -> None:
        """New weights from `path`, each step of it within `timeout_s`; `refit_result` tells how it ended. Raises
        ValueError while another one is open."""
        if self._is_draining:
            raise ValueError(f"weights ({path!r}) cannot be loaded into an engine that shuts down; start a new one")
        self._refits.request(path, weights_version, timeout_s)

    def begin_warm_up(self) -> None:
        """Steps from now on are no traffic: not counted, not recorded, and they move nothing."""
        self._is_warming_up = True

    def end_warm_up(self) -> None:
        self._is_warming_up = False

    def drain(self) -> None:
        """No decision from now on; an open transaction is aborted with the next plan, one that was sent is executed."""
        self._is_draining = True
        self._drop_decision()
        self._note_refit(self._refits.cancel("the engine shuts down; nothing was changed"))
        self._advance(Cancel("drain"))

    def close(self) -> None:
        """Ends the policy's process, from every state; safe to call twice."""
        self.policy.close()
        if self.trace is not None:
            self.trace.close()

    def commands(self, *, runs_forward: bool, now: float) -> list[Command]:
        """What the next plan of every rank carries."""
        self._tick(now)
        commands: list[Command] = list(self._collect())
        self._decide(now, commands)
        if self._refits.is_halting:
            self._advance(Cancel("new weights"))
        step = NextStep(self._num_sent)
        commands += self._advance(step)
        commands += self._advance_refit(step)
        self._num_sent += 1
        is_traffic = runs_forward and not self._is_warming_up
        self._sent.append(_SentStep(now, is_traffic, isinstance(self.state, OpenState)))
        if is_traffic:
            self.trigger.count_step()
            self.tally.count_step(self.state)
        return commands

    def on_reports(self, reports: Sequence[Report], now: float) -> None:
        """All ranks' reports of the oldest step whose output was still out."""
        step = StepDone(self._num_returned, tuple(reports))
        self._num_returned += 1
        assert self._num_returned <= self._num_sent, "an output without a plan"
        self._measure_step(self._sent.popleft(), now)
        if isinstance(self.state, OpenState):
            self.tally.measure(reports, self.state.work.transaction, self._num_ranks)
        for report in reports:
            if isinstance(report, LoadReport):
                self._add_load(report)
        self._advance(step)
        self._advance_refit(step)
        self._tick(now, is_idle=False)

    def stats(self) -> dict[str, Any]:
        outlook = self.outlook.numbers() if self.outlook else {}
        return {
            "state": self._state_name(),
            "steps_to_next": self.trigger.steps_to_next,
            "clock": self.trigger.clock,
            **self.tally.numbers(),
            "balancedness": self._balancedness,
            "max_over_mean_by_layer": (1 / self._by_layer).tolist(),
            "predicted_balancedness": outlook.get("predicted_balancedness"),
            "last_decision": outlook,
            "weights_version": self.weights_version,
            "placement": self.placement.digest(),
        }

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _collect(self) -> list[Command]:
        """Opens the recording, closes it for a warm-up, or cuts it where a window begins or a line is to be logged."""
        clock, window, config = self.trigger.clock, self.window, self.config
        if self._is_warming_up:
            if not window.is_open:
                return []
            window.close(clock, is_cut=True, reopen=False)
            return [Collect(False)]
        if not window.is_open:
            window.open(clock)
            return [Collect(True)]
        is_logged = config.log_balancedness and clock % config.log_balancedness_interval == 0
        if clock == window.start or not (self.trigger.is_cut or is_logged):
            return []
        window.close(clock, is_cut=self.trigger.is_cut)
        return [Collect(True)]

    def _decide(self, now: float, commands: list[Command]) -> None:
        """Moves the decision on by one stage: trigger -> load of all ranks -> the policy's answer -> transaction."""
        decision = self._decision
        if decision is None:
            if self.trigger.is_due and self._may_decide():
                self._decision = _Decision(self.trigger.restart(), self.trigger.clock)
                if not commands:  # else the bucket ends here already
                    self.window.close(self.trigger.clock, is_cut=True)
                    commands.append(Collect(True))
        elif decision.load is None:
            # Not "all buckets are complete": where each step has one of its own, that never holds.
            if self.window.last_end >= decision.end:
                self._ask_policy(decision, now)
        elif not self._refits.is_open and (answer := self.policy.poll()) is not None:
            self._decision = None
            self.tally.planning_s += now - decision.asked_at
            self._consider(decision, answer)

    def _may_decide(self) -> bool:
        """Never beside an open transaction or refit, nor on mixed weights: what is due then waits."""
        return self.is_at_rest and not (self._is_draining or self._is_warming_up or self._refits.harm)

    def _drop_decision(self) -> None:
        if self._decision is not None:
            self._decision = None
            self.policy.close()

    def _ask_policy(self, decision: _Decision, now: float) -> None:
        load, num_fresh = self.window.load(), self.window.take_fresh()
        if self.trace is not None and load.num_pairs:
            self.trace.append(load, self.placement, self.window.last_end)
        if load.num_pairs == 0 or not (num_fresh or decision.was_requested):
            self._decision = None
            self._decline("no load was recorded since the last decision", {})
            return
        decision.load, decision.asked_at = load, now
        self.policy.submit(load, self.placement)

    def _consider(self, decision: _Decision, answer: Placement | str) -> None:
        if isinstance(answer, str):
            self.tally.num_failed += 1
            self.observer("policy_failed", {"reason": answer})
            return
        assert decision.load is not None
        current = self.placement
        changes = count_changes(current, answer)
        outlook = look_ahead(
            decision.load,
            self.window.times(),
            current,
            answer,
            changes,
            slot_nbytes=self.slot_nbytes,
            bandwidth=self.tally.bandwidth,
            horizon_steps=self.config.step_interval,
            min_gain=0.0 if decision.was_requested else self.config.min_gain,
        )
        self.outlook = outlook
        self._note_balance(outlook.by_layer, outlook.balancedness)
        if not changes.layers:
            self._decline("no better placement was found", outlook.numbers())
        elif not outlook.pays:
            self._decline("the gain is not worth the moves", outlook.numbers())
        else:
            self._begin(answer, changes, outlook)

    def _decline(self, reason: str, numbers: Mapping[str, Any]) -> None:
        self.tally.num_declined += 1
        self.observer("declined", {"reason": reason, **numbers})

    def _begin(self, target: Placement, changes: Changes, outlook: Outlook) -> None:
        worst_first = sorted(changes.layers, key=lambda layer: (float(outlook.by_layer[layer]), layer))
        layers = tuple(ChangedLayer(layer, bool(changes.num_moves[layer])) for layer in worst_first)
        self._num_transactions += 1
        self.tally.begin(changes)
        self._start = self.placement
        numbers = {"transaction": self._num_transactions, "layers": len(layers), **outlook.numbers()}
        self.observer("began", {**numbers, "changes": describe(self._start, target)})
        self._advance(Begin(self._num_transactions, target, layers, self.config.stall_timeout_s))

    # -- the protocol --------------------------------------------------------------------------------------------------

    def _advance(self, event: Begin | NextStep | StepDone | Tick | Cancel) -> list[Command]:
        before = self.state
        self.state, commands = advance(before, event)
        if self.state is not before:
            self._note(before, self.state)
        return commands

    def _note(self, before: State, after: State) -> None:
        """Keeps score of a transition and tells the observer; raises where the engine has to end."""
        if isinstance(after, Broken):
            raise RankProtocolError(after.reason)
        if isinstance(before, OpenState):
            self._note_commit(before, after)
        if isinstance(after, Aborting):
            words = {"transaction": after.work.transaction, **_blame(after)}
            if not isinstance(before, Aborting):
                self.observer("aborting", words)
            elif after.is_overdue and not before.is_overdue:
                self.observer("abort_overdue", words)
        elif isinstance(after, Done):
            self.tally.num_done += 1
            self.observer("done", {"transaction": after.transaction, "changes": self._changes(after)})
        elif isinstance(after, Aborted):
            self.tally.num_aborted += 1
            words = {"transaction": after.transaction, **_blame(after), "changes": self._changes(after)}
            self.observer("aborted", words)

    def _changes(self, ended: Done | Aborted) -> list[str]:
        start, self._start = self._start, ended.placement
        return describe(start, ended.placement)

    def _note_commit(self, before: OpenState, after: State) -> None:
        commit = before.commit if isinstance(before, Committing | Aborting) else None
        if commit is None or placement_of(after) is placement_of(before):
            return
        self.tally.count_commit(commit.layer)
        self.observer("committed", {"transaction": before.work.transaction, "layer": commit.layer})

    def _advance_refit(self, event: NextStep | StepDone | Tick) -> list[Command]:
        commands, ended = self._refits.advance(event, is_at_rest=not isinstance(self.state, OpenState))
        self._note_refit(ended)
        return commands

    def _note_refit(self, ended: RefitResult | None) -> None:
        if ended is not None:
            if ended.is_harmed:
                self._drop_decision()
            self.observer("refit_ended", {"weights_version": ended.weights_version, "problem": ended.problem})

    def _tick(self, now: float, is_idle: bool | None = None) -> None:
        gap_s = 0.0 if self._now is None else now - self._now
        self._now = now
        tick = Tick(gap_s, is_idle=self._num_sent == self._num_returned if is_idle is None else is_idle)
        self._advance(tick)
        self._advance_refit(tick)

    # -- measurements --------------------------------------------------------------------------------------------------

    def _measure_step(self, step: _SentStep, now: float) -> None:
        """Its time began when it was sent, or with the return of the step before it, where that came later."""
        if step.is_measured:
            durations = self.tally.steps_rearranging if step.is_rearranging else self.tally.steps_at_rest
            durations.add(now - max(step.sent_at, self._returned_at))
        self._returned_at = now

    def _note_balance(self, by_layer: npt.NDArray[np.float64], mean: float) -> None:
        self._by_layer, self._balancedness = by_layer, mean

    def _add_load(self, report: LoadReport) -> None:
        try:
            buckets = self.window.add(report)
        except ValueError as error:
            raise RankProtocolError(str(error)) from error
        for bucket in buckets:
            if self.config.log_balancedness and bucket.end % self.config.log_balancedness_interval == 0:
                self._log_balancedness(bucket)

    def _log_balancedness(self, bucket: Bucket) -> None:
        if bucket.counts.any():
            load = ExpertLoad(bucket.counts, bucket.num_steps)
            by_layer = balancedness(load, self.placement)
            self._note_balance(by_layer, mean_balancedness(load, by_layer))
            self.observer("balancedness", {"step": bucket.end, "balancedness": self._balancedness})

    def _state_name(self) -> str:
        if isinstance(self.state, OpenState) or self._decision is None:
            return state_name(self.state)
        return "WAITING_FOR_LOAD" if self._decision.load is None else "WAITING_FOR_POLICY"


def _blame(ended: Aborting | Aborted) -> dict[str, Any]:
    """Why, and at which layer and rank, where one is to blame."""
    places = {"layer": ended.layer, "rank": ended.rank}
    return {"reason": ended.reason, **{name: place for name, place in places.items() if place is not None}}
