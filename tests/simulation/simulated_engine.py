"""A schedule: an engine plans steps over simulated ranks, users ask and interrupt, things fail; checked throughout.

`run_schedule(seed)` is a function of its seed alone. Time is simulated; nothing here waits.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from simulated_rank import Faults, SimulatedRank, Transport, ViolationError
from simulated_transport import Clock, GlooGroup, SharedMemory

from trimtab.experts.control.config import EplbConfig
from trimtab.experts.control.controller import Controller, RankProtocolError
from trimtab.experts.control.transaction import OpenState
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Abort, Command, Commit, Plan, Quiescent, Refit, Report, Stage, Staged

STALL_TIMEOUT_S = 4.0
SLACK_S = 3.0  # steps in flight, transports and slow aborts, beyond the controller's own deadlines
MAX_STEPS_TO_REST = 1000
NUM_EXPERTS = 4
FAULTS = ("mover_fails", "mover_hangs", "home_hangs", "plan_refused", "check_fails", "write_fails", "commit_lost")


@dataclass
class Mutation:
    """A fault in the protocol itself; the checks must find it (negative controls)."""

    controller: type[Controller] = Controller
    reuse_group: bool = False  # one group for all transactions: receives of aborted ones swallow later bytes


initial_placement = cache(Placement.initial)  # the same few in all schedules


class RandomPolicy:
    """Any valid placement, after a while, or a failure; and it checks the load that it is asked about."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine, self.rng = engine, engine.rng
        self._answer: Placement | str | None = None
        self._polls_left = 0

    def submit(self, load: ExpertLoad, current: Placement) -> None:
        if self._answer is not None:
            raise ViolationError("the policy is asked again before it answered")
        self.engine.check_load(load)
        rng, topology = self.rng, current.topology
        self._polls_left = rng.randrange(4)
        kind = rng.random()
        if kind < 0.08:
            self._answer = "the policy raised"
            return
        slots, shares = current.slot_to_expert.copy(), current.shares.copy()
        for layer in range(current.num_layers):
            what = rng.random()
            if what < 0.6:
                rng.shuffle(slots[layer])  # numpy rows are views
            elif what < 0.8:
                shares[layer, rng.randrange(topology.num_slots)] += 1
            elif what < 0.9 and topology.num_redundant:
                slots[layer] = np.roll(np.arange(topology.num_slots) % topology.num_experts, rng.randrange(5))
        self._answer = Placement(topology, slots, shares)

    def poll(self) -> Placement | str | None:
        self._polls_left -= 1
        if self._polls_left >= 0:
            return None
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        self._answer = None


@dataclass
class SentStep:
    step: int
    commands: list[Command]
    runs_forward: bool
    outputs: dict[int, list[Report]] = field(default_factory=dict)


class SimulatedEngine:
    def __init__(self, seed: int, mutation: Mutation) -> None:
        self.seed, self.mutation = seed, mutation
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.coverage: Counter[str] = Counter()
        num_ranks = rng.choice((2, 2, 3, 4))
        num_redundant = rng.choice((0, num_ranks)) if NUM_EXPERTS % num_ranks == 0 else 2
        topology = Topology(NUM_EXPERTS, num_redundant, num_ranks)
        start = initial_placement(topology, rng.choice((1, 2, 3)))
        self.num_layers = start.num_layers
        self.config = EplbConfig(
            window_size=rng.randint(1, 10),
            step_interval=rng.randint(2, 8),
            min_gain=0,
            stall_timeout_s=STALL_TIMEOUT_S,
            log_balancedness=rng.random() < 0.1,
            log_balancedness_interval=rng.randint(1, 5),
        )
        self.faults = self._draw_faults()
        self.faults_were_drawn = any(vars(self.faults).values())
        self.groups: dict[int, Transport] = {}
        self.is_gloo = rng.random() < 0.5
        self.ranks = [
            SimulatedRank(rank, start, self.clock, rng, self.faults, self._open_transport) for rank in range(num_ranks)
        ]
        self.controller = mutation.controller(
            self.config, start, slot_nbytes=1, policy=RandomPolicy(self), observer=self._observe
        )
        self.depth = rng.randint(1, 4)
        self.slow_rank = rng.randrange(num_ranks) if rng.random() < 0.3 else -1
        self.in_flight: deque[SentStep] = deque()
        self.free_at = [0.0] * num_ranks  # when each rank will have executed the plans sent so far
        self.num_sent = 0
        self.forwards: list[np.ndarray] = []  # per step with a forward: what all ranks recorded
        self.digests: dict[int, str] = {}  # step -> the placement with which its forward ran
        self.staged: set[tuple[int, int, int]] = set()  # what the controller heard: (transaction, layer, rank)
        self.resting: set[tuple[int, int]] = set()  # those that were heard to rest: (transaction, rank)
        self.progress_at = 0.0
        self.open_transaction = 0
        self.version = 0
        self.expects_break = self.faults.commit_lost > 0

    def _draw_faults(self) -> Faults:
        faults, rng = Faults(), self.rng
        faults.duplicate_report = faults.stale_report = rng.choice((0.0, 0.4))
        if rng.random() < 0.5:
            setattr(faults, rng.choice(FAULTS), rng.choice((0.1, 0.5)))
        if rng.random() < 0.3:
            faults.slow_abort_s = 1.0
        return faults

    def _open_transport(self, transaction: int) -> Transport:
        key = 0 if self.mutation.reuse_group else transaction
        if key not in self.groups:
            self.groups[key] = (GlooGroup if self.is_gloo else SharedMemory)(self.clock, self.rng)
        return self.groups[key]

    def _observe(self, event: str, numbers: Mapping[str, Any]) -> None:
        self.coverage[event] += 1
        if event == "aborting" and numbers["reason"] not in ("drain", "new weights"):
            is_disturbed = any(numbers["transaction"] in rank.disturbed for rank in self.ranks)
            self._check(is_disturbed, f"a transaction ended without a cause: {numbers['reason']}")

    # -- the engine ----------------------------------------------------------------------------------------------------

    def run(self, num_steps: int) -> None:
        """`num_steps` of traffic, users and faults; then faults end, the engine drains and must come to rest."""
        if self.rng.random() < 0.2:
            self.controller.begin_warm_up()
        try:
            while self.num_sent < num_steps:
                self._act_as_user()
                self._turn(is_busy=self.rng.random() < 0.8)
            self._settle()
        except RankProtocolError:
            self._check(self.expects_break, "the engine ended though every rank kept the protocol")
            self.coverage["broken"] += 1
            return
        self._check_rest()

    def _settle(self) -> None:
        self.faults.stop()
        if self.rng.random() < 0.5:
            self.controller.drain()
            self.coverage["drained"] += 1
        limit = self.num_sent + MAX_STEPS_TO_REST
        while self.in_flight or self.controller.wants_step:
            self._turn(is_busy=False)
            self._check(self.num_sent < limit, "the controller does not come to rest")

    def _act_as_user(self) -> None:
        controller, kind = self.controller, self.rng.random()
        if kind < 0.03:
            controller.request_rearrangement()
        elif kind < 0.05 and controller.is_at_rest | (self.rng.random() < 0.5):
            if not controller._is_draining and controller.stats()["weights_version"] == self.version:
                self._request_refit()
        elif kind < 0.055:
            controller.drain()
        elif kind < 0.15:
            controller.end_warm_up()
        elif kind < 0.17:
            controller.begin_warm_up()
        elif kind < 0.2 and not self.in_flight:
            gap_s = self.rng.choice((0.5, 500.0))  # nobody steps the engine; its movers go on
            self.progress_at += gap_s
            self.clock.after(gap_s, lambda: None)
            target = self.clock.now + gap_s
            while self.clock.now < target and self.clock.run_next():
                pass
            self.coverage["gap"] += 1

    def _request_refit(self) -> None:
        try:
            self.controller.request_refit("/weights", self.version + 1, 60.0)
        except ValueError:
            return
        self.coverage["refit_requested"] += 1

    def _turn(self, *, is_busy: bool) -> None:
        """As `Engine.step`: fill the pipeline, then take the oldest output."""
        while len(self.in_flight) < self.depth and (is_busy or self.controller.wants_step):
            self._send(runs_forward=is_busy)
            if not is_busy:
                break
        if not self.in_flight:
            self.clock.run_next()
            return
        oldest = self.in_flight[0]
        while len(oldest.outputs) < len(self.ranks):
            self._check(self.clock.run_next(), "nothing is left that could end the step")
        self.in_flight.popleft()
        reports = [report for rank in range(len(self.ranks)) for report in oldest.outputs[rank]]
        self._before_reports(reports)
        self.controller.on_reports(reports, self.clock.now)
        self._after_event()

    def _send(self, *, runs_forward: bool) -> None:
        is_warming_up = self.controller._is_warming_up
        commands = self.controller.commands(runs_forward=runs_forward, now=self.clock.now)
        step = SentStep(self.num_sent, commands, runs_forward)
        self.num_sent += 1
        self._check_commands(commands)
        if runs_forward and not is_warming_up:
            self.forwards.append(np.zeros((self.num_layers, NUM_EXPERTS), dtype=np.int64))
        step_counts = self.forwards[-1] if runs_forward and not is_warming_up else None
        self.in_flight.append(step)
        for rank in range(len(self.ranks)):
            self._start(rank, step, step_counts)
        self._after_event()

    def _start(self, rank: int, step: SentStep, counts: np.ndarray | None) -> None:
        """The rank begins its next plan as soon as it is free; each at its own pace."""
        draws = (self.rng.random(), int(self.rng.random() * self.num_layers), int(self.rng.random() * NUM_EXPERTS))
        recorded = int(draws[0] * 5)  # of 0 to 4: 0 is what the phase filter leaves out
        if counts is not None:
            counts[draws[1], draws[2]] += recorded
        pace = 0.3 if rank == self.slow_rank else 0.1
        begin = max(self.clock.now, self.free_at[rank]) + draws[0] * 0.02
        end = begin + self.rng.random() * pace
        self.free_at[rank] = end
        worker = self.ranks[rank]

        def execute() -> None:
            worker.execute(step.step, step.commands)
            self._check_same_placement(step.step, worker)
            if counts is not None:
                worker.record(draws[1], draws[2], recorded)

        def finish() -> None:
            step.outputs[rank] = worker.end_step()

        self.clock.after(begin - self.clock.now, execute)
        self.clock.after(end - self.clock.now, finish)

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _check(self, holds: bool, rule: str) -> None:
        if not holds:
            raise ViolationError(rule)

    def _check_commands(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Plan(transaction=transaction):
                    self._check(transaction > self.open_transaction, "a transaction's id is used twice")
                    self.open_transaction = transaction
                    self.progress_at = self.clock.now
                    self.coverage["plans"] += 1
                case Commit(transaction=transaction, layer=layer):
                    self._check_commit_is_due(transaction, layer)
                    self.progress_at = self.clock.now
                    self.coverage["commits"] += 1
                    self.coverage["commits beside stages"] += any(isinstance(c, Stage) for c in commands)
                case Abort():
                    self.progress_at = self.clock.now
                case Refit():
                    self._check(not isinstance(self.controller.state, OpenState), "weights change in a transaction")
                    self.version += 1
                    self.coverage["refits"] += 1

    def _check_commit_is_due(self, transaction: int, layer: int) -> None:
        """Every rank that has something to stage said so, and the controller has heard it."""
        delta = self.ranks[0].deltas.get(layer)
        if delta is None or not delta.transfers:
            self.coverage["commits of shares"] += 1
            return
        for rank in range(len(self.ranks)):
            self._check(
                (transaction, layer, rank) in self.staged, f"commit of layer {layer}, which rank {rank} has not staged"
            )

    def _before_reports(self, reports: list[Report]) -> None:
        for report in reports:
            if isinstance(report, Staged) and report.transaction == self.open_transaction:
                key = (report.transaction, report.layer, report.rank)
                if key not in self.staged:
                    self.staged.add(key)
                    self.progress_at = self.clock.now
            elif isinstance(report, Quiescent) and (report.transaction, report.rank) not in self.resting:
                self.resting.add((report.transaction, report.rank))
                self.progress_at = self.clock.now

    def _check_same_placement(self, step: int, worker: SimulatedRank) -> None:
        """All ranks compute a step with one placement: layers are committed in the same step on all of them."""
        if self.digests.setdefault(step, worker.digest) != worker.digest:
            raise ViolationError(f"step {step}: rank {worker.rank} computes with another placement")

    def _after_event(self) -> None:
        controller = self.controller
        stats_clock = controller.trigger.clock
        self._check(stats_clock == len(self.forwards), "the clock is not the number of steps with a forward")
        self._check(controller.trigger.steps_to_next >= 0, "steps to the next decision are below 0")
        if isinstance(controller.state, OpenState) and self.open_transaction:
            waited_s = self.clock.now - self.progress_at
            self._check(waited_s <= STALL_TIMEOUT_S + SLACK_S, "a transaction makes no progress and does not end")

    def check_load(self, load: ExpertLoad) -> None:
        """The policy is asked about exactly the last `window_size` steps, or about one whole bucket that is longer."""
        end = self.controller.window.last_end  # the bucket ended when the decision was due; later steps are not in it
        recent = self.forwards[end - load.num_steps : end]
        expected = np.sum(recent, axis=0) if recent else np.zeros((self.num_layers, NUM_EXPERTS))
        self._check(bool(np.array_equal(load.counts, expected)), "the window's load is not that of its steps")
        self.coverage["loads"] += 1
        self.coverage["windows of full size"] += load.num_steps == self.config.window_size

    def _check_rest(self) -> None:
        controller = self.controller
        self._check(controller.is_at_rest or controller._is_warming_up, "not at rest")
        for rank in self.ranks:
            self._check(rank.placement == controller.placement, "a rank's placement is not the controller's")
            self._check(rank.mover.is_resting and rank.transaction is None, "a mover does not rest")
            self._check(rank.mover.homecoming is None, "a kernel still reads staging")
            self.coverage["stages held"] += rank.mover.num_held
            self._check(rank.commits == self.ranks[0].commits, "layers were committed in different steps")
            if not controller.unhealthy_reason:
                self._check(rank.version == controller.weights_version, "a rank has other weights")
        moved = sum(len(rank.commits) for rank in self.ranks)
        self.coverage["mixed steps"] += controller.tally.num_mixed_steps
        self.coverage["moved"] += bool(moved)
        if not self.faults_were_drawn and not self.coverage["drained"]:
            self.coverage["undisturbed"] += 1


def run_schedule(seed: int, mutation: Mutation | None = None, num_steps: int = 12) -> Counter[str]:
    """What came about. Raises ViolationError naming the rule and the seed."""
    engine = SimulatedEngine(seed, mutation or Mutation())
    try:
        engine.run(num_steps)
    except AssertionError as violation:
        raise ViolationError(f"{violation} (seed {seed})") from violation
    return engine.coverage
