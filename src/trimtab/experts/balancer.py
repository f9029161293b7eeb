"""Expert balancing put together: the one place where what is decided, what moves and what computes meet.

The controller's commands come with a step plan and are executed here, on the runner's thread: it alone writes what the
forward reads. The mover works beside it on what it is given, and is asked once per step what has come about.
"""

# L MoE layers  E experts  P slots

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, assert_never

import numpy as np
import torch

from trimtab.experts.control.config import EplbConfig
from trimtab.experts.control.controller import Controller, Observer
from trimtab.experts.control.load_trace import LoadTrace, TraceMetadata
from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.control.policy.process import PolicyProcess
from trimtab.experts.control.policy.registry import make_policy
from trimtab.experts.control.support import ExecutionFacts, unsupported
from trimtab.experts.data.dispatch.base import Dispatcher, DispatchTimes
from trimtab.experts.data.kernels import plan_slots
from trimtab.experts.data.kernels.movable import slot_storage
from trimtab.experts.data.load_recorder import SlotLoadRecorder
from trimtab.experts.data.moe_layer import MoELayer
from trimtab.experts.delta import LayerDelta, diff
from trimtab.experts.formats.base import ExpertShape
from trimtab.experts.movement.choice import MovementPlan, choose_communicator
from trimtab.experts.movement.communicator.base import Communicator
from trimtab.experts.movement.faults import Faults
from trimtab.experts.movement.mover import BackgroundMover
from trimtab.experts.placement import Placement
from trimtab.experts.ports import (
    Abort,
    CheckWeights,
    Collect,
    Command,
    Commit,
    Committed,
    Failed,
    LoadReport,
    Loan,
    Mover,
    Plan,
    Quiescent,
    Refit,
    Report,
    SlotStorage,
    Stage,
    Weights,
    answer_weights,
)

logger = logging.getLogger(__name__)


# Ranks come to the first exchange when they have loaded, at different speeds.
FIRST_EXCHANGE_TIMEOUT_S = 300.0


class BalancedLayer(Protocol):
    """What a commit writes of one MoE layer."""

    @property
    def storage(self) -> SlotStorage: ...

    def refresh(self, placement: Placement) -> None:
        """The lookup follows this placement from now on. In place: who holds the lookup's tensor sees it."""
        ...


class LoadCounts(Protocol):
    """Tokens counted per slot by the forwards of one rank."""

    def begin_step(self, counted: bool) -> None:
        """Whether the forward that follows is counted."""
        ...

    def fold(self, placement: Placement) -> np.ndarray:
        """int64 [L, E]: what was counted since the last fold, under the placement it was counted with."""
        ...


class RankBalancer:
    """1. `execute` a plan's commands, 2. `begin_forward`, 3. `end_step`: its reports. One per rank.

    `phase` is the kind of batch whose load counts: "all", "prefill" or "decode". Called on: the runner's thread.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        layers: Sequence[BalancedLayer],
        load: LoadCounts,
        mover: Mover,
        times: DispatchTimes,
        weights: Weights,
        phase: str = "all",
    ) -> None:
        self.rank = rank
        self.placement = placement
        self._layers = layers
        self._load = load
        self.mover = mover
        self._weights = weights
        self._phase = phase
        self._bucket: LoadBucket | None = None
        self._times = times
        self._transaction = 0
        self._next: Placement | None = None  # the open transaction's
        self._deltas: dict[int, LayerDelta] = {}  # of its layers that are not committed yet
        self._reports: list[Report] = []

    # -- a step --------------------------------------------------------------------------------------------------------

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Collect(on):
                    self._collect(on)
                case Plan():
                    self._plan(command)
                case Stage(transaction, layer):
                    if transaction == self._transaction and layer in self._deltas:
                        self.mover.stage(layer)
                case Commit(transaction, layer):
                    self._commit(transaction, layer)
                case Abort(transaction, reason):
                    self._abort(transaction, reason)
                case CheckWeights() | Refit():
                    assert isinstance(command, CheckWeights) or self._transaction == 0, (
                        "staged bytes are of old weights"
                    )
                    self._reports.append(answer_weights(command, self._weights, self.rank, self.placement))
                case _:
                    assert_never(command)

    def begin_forward(self, *, is_prefill: bool) -> None:
        counted = self._bucket is not None and self._phase in ("all", "prefill" if is_prefill else "decode")
        self._load.begin_step(counted)
        if self._bucket is not None:
            self._bucket.begin_step(counted)

    def end_step(self) -> list[Report]:
        if self._bucket is not None:
            self._bucket.end_step()
        for found in self.mover.poll():
            if found.transaction != self._transaction:
                continue  # of one that is over
            if isinstance(found, Quiescent):
                self._transaction, self._next = 0, None
            self._reports.append(found)
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        self.mover.close()

    # -- load ----------------------------------------------------------------------------------------------------------

    def _collect(self, on: bool) -> None:
        if self._bucket is not None:
            self._bucket.counts += self._load.fold(self.placement)
            self._reports.append(self._bucket.report(self.rank))
            self._bucket = None
        if on:
            self._load.fold(self.placement)  # what was counted before belongs to no bucket
            shape = (self.placement.num_layers, self.placement.topology.num_experts)
            self._bucket = LoadBucket(np.zeros(shape, dtype=np.int64), self._times)

    # -- a transaction -------------------------------------------------------------------------------------------------

    def _plan(self, plan: Plan) -> None:
        """A plan that does not follow from what this rank has is refused whole, before a byte moves."""
        assert self._transaction == 0, f"transaction {plan.transaction} begins and {self._transaction} is open"
        self._transaction = plan.transaction
        try:
            placement = Placement(self.placement.topology, plan.slot_to_expert, plan.shares)
            if plan.start_digest != self.placement.digest():
                raise ValueError("the placement it starts from is not the one in force on this rank")
            deltas = diff(self.placement, placement)
        except ValueError as error:
            self._fail(-1, str(error))
            return
        self._next = placement
        self._deltas = {delta.layer: delta for delta in deltas}
        self.mover.begin(plan.transaction, self.placement, deltas)

    def _commit(self, transaction: int, layer: int) -> None:
        """Nothing is caught here: a rank that cannot finish a decided commit must not compute again."""
        assert self._next is not None and transaction == self._transaction and layer in self._deltas, (
            f"layer {layer} of transaction {transaction} cannot be committed: {self._transaction} is open"
        )
        started = time.perf_counter()
        if self._bucket is not None:
            self._bucket.counts += self._load.fold(self.placement)  # counted under the placement that ends here
        delta = self._deltas.pop(layer)
        storage, loans = self._layers[layer].storage, dict[int, Loan]()
        if delta.transfers:
            for slot, prepared in self.mover.take(layer):
                if (loan := storage.install(slot, prepared)) is not None:
                    loans[slot] = loan
        self.placement = self.placement.with_layer(layer, self._next)
        self._layers[layer].refresh(self.placement)
        if delta.transfers:
            self.mover.installed(layer, loans)
        digest = self.placement.digest()
        self._reports.append(Committed(self.rank, transaction, layer, digest, time.perf_counter() - started))
        if not self._deltas:
            self.mover.finish()  # the transaction is over when it says that it rests

    def _abort(self, transaction: int, reason: str) -> None:
        """Layers committed so far stay. Of a transaction that is not open here nothing is left to end."""
        if transaction != self._transaction:
            self._reports.append(Quiescent(self.rank, transaction))
            return
        logger.debug("rank %d ends transaction %d: %s", self.rank, transaction, reason)
        if self._next is None:  # refused here: the mover never heard of it
            self._transaction = 0
            self._reports.append(Quiescent(self.rank, transaction))
            return
        self._next, self._deltas = None, {}
        self.mover.abort()

    def _fail(self, layer: int, reason: str) -> None:
        self._reports.append(Failed(self.rank, self._transaction, layer, reason))


def plan_rank_movement(
    config: EplbConfig,
    placement: Placement,
    shapes: Sequence[ExpertShape],
    dtype: torch.dtype,
    quantization: str | None,
    facts: ExecutionFacts,
) -> MovementPlan:
    """How experts of these `shapes` (of the MoE layers) move, and what staging that takes. `facts` need not know how
    experts are stored and travel.

    Raises ValueError with all reasons why they cannot be balanced, before anything is started or allocated.
    """
    sizes = {plan_slots(shape, dtype, quantization=quantization) for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(f"MoE layers keep experts in {len(sizes)} ways and must agree to have them moved: {sizes}")
    ((stored, slot_nbytes),) = sizes
    plan = choose_communicator(
        num_ranks=placement.topology.num_ranks,
        slots_per_rank=placement.topology.slots_per_rank,
        slot_nbytes=slot_nbytes,
        communicator=config.communicator,
        timeout_s=config.stall_timeout_s / 2,  # the other half is for coming to rest
    )
    facts = replace(facts, expert_format=stored.format, kernel=stored.kernel, communicator=plan.communicator)
    if reasons := unsupported(facts):
        raise ValueError("; ".join(reasons))
    return plan


def build_rank_balancer(
    config: EplbConfig,
    placement: Placement,
    layers: Sequence[MoELayer],
    dispatcher: Dispatcher,
    communicator: Communicator,
    weights: Weights,
    *,
    weights_version: Callable[[], int] = lambda: 0,
    faults: Faults | None = None,
) -> RankBalancer:
    """The worker's side; `layers` by ordinal. Collective: every rank, at start. It closes `communicator`.

    Raises ValueError for experts that cannot be moved, SlotMismatchError where ranks hold different ones.
    """
    doors = [_LayerDoor(layer) for layer in layers]
    recorder = SlotLoadRecorder(placement, dispatcher.place)
    mover = BackgroundMover(
        [door.storage for door in doors],
        communicator.rank,
        communicator,
        weights_version=weights_version,
        faults=faults,
    )
    try:
        mover.exchange(placement, FIRST_EXCHANGE_TIMEOUT_S)
    except BaseException:
        mover.close()
        raise
    recorder.attach(layers)
    return RankBalancer(
        communicator.rank,
        placement,
        doors,
        recorder,
        mover,
        dispatcher.times,
        weights,
        config.load_collection_phase,
    )


class _LayerDoor:
    """A MoE layer as a commit sees it. Raises ValueError where its experts were never proven to move."""

    def __init__(self, layer: MoELayer) -> None:
        self.storage = slot_storage(layer.kernel)
        self.refresh = layer.refresh


def build_controller(
    config: EplbConfig, placement: Placement, *, slot_nbytes: int, model_name: str, observer: Observer
) -> Controller:
    """The engine's side. Starts nothing yet; raises ValueError for a policy or a trace file that cannot be used."""
    settings = PolicySettings(max_moves_per_layer=config.max_moves_per_layer)
    make_policy(config.policy, settings)  # what is wrong with it is said here, not at the first rearrangement
    trace = None
    if config.record_load is not None:
        layers, experts = placement.num_layers, placement.topology.num_experts
        metadata = TraceMetadata(
            model_name, layers, experts, config.load_collection_phase, config.window_size, placement.digest()
        )
        trace = LoadTrace(config.record_load, metadata)
    policy = PolicyProcess(config.policy, settings, config.stall_timeout_s)
    return Controller(config, placement, slot_nbytes=slot_nbytes, policy=policy, observer=observer, trace=trace)


class LoadBucket:
    """What one rank counted and how its time went, from one `Collect` to the next."""

    def __init__(self, counts: np.ndarray, times: DispatchTimes) -> None:
        self.counts = counts  # int64 [L, E]
        self.num_steps = 0
        self.num_recorded_steps = 0
        self.step_s = 0.0
        self._times = times
        self._experts_s, self._wait_s = times.experts_s, times.wait_s
        self._started: float | None = None

    def begin_step(self, counted: bool) -> None:
        self.num_steps += 1
        self.num_recorded_steps += counted
        self._started = time.perf_counter()

    def end_step(self) -> None:
        if self._started is not None:  # else a plan of commands alone
            self.step_s += time.perf_counter() - self._started
            self._started = None

    def report(self, rank: int) -> LoadReport:
        return LoadReport(
            rank,
            self.counts,
            self.num_steps,
            self.num_recorded_steps,
            self.step_s,
            self._times.experts_s - self._experts_s,
            self._times.wait_s - self._wait_s,
        )
