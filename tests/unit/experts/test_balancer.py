"""A rank's balancer over fakes of its rooms: what a commit does, in which order, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from trimtab.experts.balancer import RankBalancer
from trimtab.experts.data.dispatch.base import DispatchTimes
from trimtab.experts.delta import LayerDelta
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import (
    Abort,
    CheckWeights,
    Collect,
    Command,
    Commit,
    Committed,
    Failed,
    LoadReport,
    MoverReport,
    Plan,
    Quiescent,
    Refit,
    Refitted,
    Stage,
    Staged,
    WeightsChecked,
)

TOPOLOGY = Topology(4, 2, 2)
OLD = Placement.initial(TOPOLOGY, 3)  # [0 1 2 | 2 3 0]
# Layer 0 swaps experts between ranks, layer 1 changes shares alone, layer 2 stays.
NEW = Placement(
    TOPOLOGY, [[0, 1, 3, 2, 3, 1], *OLD.slot_to_expert[1:].tolist()], [[1] * 6, [1, 1, 2, 1, 1, 1], [1] * 6]
)


class FakeRank:
    """All doors of one rank; what happens at them is written to `journal`."""

    num_slots, slot_nbytes, layout = 3, 8, "fake"

    def __init__(self, rank: int = 0, phase: str = "all") -> None:
        self.journal: list[tuple[Any, ...]] = []
        self.mover_reports: list[MoverReport] = []
        self.counted = False
        self.slots_counted = np.zeros((3, 6), dtype=np.int64)
        self.refit_error: Exception | None = None
        self.install_error: Exception | None = None
        self.loan: Any = None  # what a slot gives that is read in staging
        layers = [FakeLayer(self, layer) for layer in range(3)]
        self.balancer = RankBalancer(rank, OLD, layers, self, self, DispatchTimes(), self, phase)

    # load counts
    def begin_step(self, counted: bool) -> None:
        self.counted = counted

    def count(self, layer: int, slots: Sequence[int]) -> None:
        if self.counted:
            np.add.at(self.slots_counted[layer], slots, 1)

    def fold(self, placement: Placement) -> np.ndarray:
        folded = np.zeros((3, 4), dtype=np.int64)
        for layer in range(3):
            np.add.at(folded[layer], placement.slot_to_expert[layer], self.slots_counted[layer])
        self.slots_counted[:] = 0
        return folded

    # mover
    staging_nbytes = 24

    def begin(self, transaction: int, placement: Placement, deltas: Sequence[LayerDelta]) -> None:
        self.journal.append(("begin", transaction, placement.digest(), [delta.layer for delta in deltas]))

    def stage(self, layer: int) -> None:
        self.journal.append(("stage", layer))

    def poll(self) -> list[MoverReport]:
        reports, self.mover_reports = self.mover_reports, []
        return reports

    def take(self, layer: int) -> list[tuple[int, Any]]:
        return [(2, f"expert of layer {layer}")]

    def installed(self, layer: int, loans: Mapping[int, Any]) -> None:
        self.journal.append(("installed", layer, *loans.items()))

    def finish(self) -> None:
        self.journal.append(("finish",))

    def abort(self) -> None:
        self.journal.append(("abort",))

    def close(self) -> None:
        self.journal.append(("close",))

    # weights
    def check(self, path: str) -> str:
        if path == "strange":
            raise AttributeError("no attribute 'items'")
        return "" if path == "good" else "no such file"

    def refit(self, path: str, placement: Placement, weights_version: int, timeout_s: float) -> None:
        self.journal.append(("refit", path, placement.digest(), weights_version, timeout_s))
        if self.refit_error is not None:
            raise self.refit_error

    def step(self, *commands: Command, is_prefill: bool = False, slots: Sequence[int] = ()) -> list[Any]:
        self.balancer.execute(commands)
        self.balancer.begin_forward(is_prefill=is_prefill)
        self.count(0, slots)
        return self.balancer.end_step()


class FakeLayer:
    def __init__(self, rank: FakeRank, layer: int) -> None:
        self.rank = rank
        self.layer = layer

    num_slots, slot_nbytes, layout = 3, 8, "fake"

    @property
    def storage(self) -> FakeLayer:
        return self

    def export_slot(self, slot: int, out: Any) -> None: ...

    def prepare(self, data: Any) -> Any: ...

    def install(self, slot: int, prepared: Any) -> Any:
        if self.rank.install_error is not None:
            raise self.rank.install_error
        self.rank.journal.append(("install", self.layer, slot, prepared))
        return self.rank.loan

    def refresh(self, placement: Placement) -> None:
        self.rank.journal.append(("refresh", self.layer, placement.digest()))


def plan(transaction: int = 1, placement: Placement = NEW, start: Placement = OLD) -> Plan:
    return Plan(transaction, placement.slot_to_expert, placement.shares, start.digest())


def test_a_commit_installs_then_sets_the_placement_then_the_lookup_then_answers_the_mover() -> None:
    rank = FakeRank()
    assert rank.step(plan(), Stage(1, 0)) == []
    rank.mover_reports = [Staged(0, 1, 0, 8)]
    assert rank.step() == [Staged(0, 1, 0, 8)]
    after = OLD.with_layer(0, NEW)
    (committed,) = rank.step(Commit(1, 0))
    assert isinstance(committed, Committed) and (committed.layer, committed.digest) == (0, after.digest())
    assert rank.journal == [
        ("begin", 1, OLD.digest(), [0, 1]),
        ("stage", 0),
        ("install", 0, 2, "expert of layer 0"),
        ("refresh", 0, after.digest()),
        ("installed", 0),
    ]
    assert rank.balancer.placement == after


def test_the_mover_is_told_what_is_read_in_staging() -> None:
    rank = FakeRank()
    rank.step(plan(), Stage(1, 0))
    rank.loan = object()
    rank.step(Commit(1, 0))
    assert rank.journal[-1] == ("installed", 0, (2, rank.loan))


def test_a_layer_whose_shares_alone_change_is_committed_without_a_byte_and_the_last_layer_ends_the_transaction() -> (
    None
):
    rank = FakeRank()
    rank.step(plan(), Stage(1, 0))
    rank.step(Commit(1, 0))
    (committed,) = rank.step(Commit(1, 1))
    assert committed.digest == NEW.digest() == rank.balancer.placement.digest()
    assert rank.journal[-2:] == [("refresh", 1, NEW.digest()), ("finish",)]
    with pytest.raises(AssertionError, match="transaction 2 begins and 1 is open"):
        rank.step(plan(2, OLD, NEW))  # staging may still be read
    with pytest.raises(AssertionError, match="staged bytes are of old weights"):
        rank.step(Refit("good", 3, 60.0))
    rank.mover_reports = [Quiescent(0, 1)]
    assert rank.step() == [Quiescent(0, 1)]
    assert rank.step(plan(2, OLD, NEW)) == []


def test_an_abort_after_the_last_commit_is_answered_when_the_mover_rests() -> None:
    rank = FakeRank()
    rank.step(plan(), Stage(1, 0))
    rank.step(Commit(1, 0))
    rank.step(Commit(1, 1))
    assert rank.step(Abort(1, "it takes too long")) == [] and rank.journal[-1] == ("abort",)
    rank.mover_reports = [Quiescent(0, 1)]
    assert rank.step() == [Quiescent(0, 1)]
    assert rank.step(Abort(1, "again")) == [Quiescent(0, 1)]
    assert rank.balancer.placement == NEW


def test_load_is_folded_to_logical_experts_with_the_placement_it_was_counted_under() -> None:
    rank = FakeRank()
    rank.step(Collect(True), plan(), Stage(1, 0), slots=[2, 2, 5])  # slot 2 holds expert 2, slot 5 expert 0
    rank.step(Commit(1, 0), slots=[2, 5, -2])  # now experts 3 and 1; slot 4 (-2) holds 3 as before
    reports = rank.step(Collect(False), slots=[0])
    (load,) = reports
    assert isinstance(load, LoadReport) and load.num_steps == load.num_recorded_steps == 2
    assert load.counts[0].tolist() == [1, 1, 2, 2] and load.counts[1:].sum() == 0
    assert load.step_s > 0
    assert rank.step(Collect(False), slots=[0]) == []


def test_what_the_phase_filter_leaves_out_counts_as_steps_without_load() -> None:
    for phase, expected in (("all", (3, 3)), ("prefill", (1, 1)), ("decode", (2, 2))):
        rank = FakeRank(phase=phase)
        rank.step(Collect(True), is_prefill=True, slots=[0])
        rank.step(slots=[1])
        rank.step(slots=[1])
        (load,) = rank.step(Collect(True), slots=[3])
        assert (load.num_steps, load.num_recorded_steps, int(load.counts.sum())) == (3, *expected)


def test_a_plan_is_checked_whole_before_any_byte_moves() -> None:
    incomplete = np.zeros_like(NEW.slot_to_expert)
    for wrong, reason in (
        (plan(start=NEW), "not the one in force"),
        (Plan(1, incomplete, NEW.shares, OLD.digest()), "no slot for expert"),
        (Plan(1, NEW.slot_to_expert[:2], NEW.shares[:2], OLD.digest()), "layers"),
    ):
        rank = FakeRank()
        (failed,) = rank.step(wrong, Stage(1, 0))
        assert isinstance(failed, Failed) and failed.transaction == 1 and reason in failed.reason
        assert rank.journal == [] and rank.balancer.placement == OLD
        assert rank.step(Abort(1, "a rank refused the plan")) == [Quiescent(0, 1)]
        assert rank.step(plan(2)) == []  # the next plan is taken


def test_an_abort_keeps_committed_layers_and_ends_when_the_mover_rests() -> None:
    rank = FakeRank()
    rank.step(plan(), Stage(1, 0))
    rank.step(Commit(1, 0))
    assert rank.step(Abort(1, "why")) == []
    rank.mover_reports = [Staged(0, 1, 1), Quiescent(0, 1)]
    assert rank.step()[-1] == Quiescent(0, 1)
    after = OLD.with_layer(0, NEW)
    assert rank.balancer.placement == after
    assert rank.step(plan(2, NEW, after)) == []


def test_reports_and_stages_of_another_transaction_are_dropped() -> None:
    rank = FakeRank()
    rank.step(plan(7))
    rank.mover_reports = [Staged(0, 6, 0), Failed(0, 6, 0, "late"), Quiescent(0, 6)]
    assert rank.step(Stage(6, 0)) == []
    assert ("stage", 0) not in rank.journal
    assert rank.step(Abort(6, "late")) == [Quiescent(0, 6)]


def test_a_commit_that_fails_halfway_ends_the_rank() -> None:
    rank = FakeRank()
    rank.step(plan(), Stage(1, 0))
    rank.install_error = OSError("broken memory")
    with pytest.raises(OSError, match="broken memory"):
        rank.balancer.execute([Commit(1, 0)])
    with pytest.raises(AssertionError, match="cannot be committed"):
        FakeRank().balancer.execute([Commit(1, 0)])


def test_new_weights_are_checked_first_and_a_failure_after_the_first_byte_is_told() -> None:
    rank = FakeRank(rank=1)
    assert rank.step(CheckWeights("bad", 3, 60.0)) == [WeightsChecked(1, 3, "no such file")]
    assert rank.step(CheckWeights("strange", 3, 60.0)) == [WeightsChecked(1, 3, "AttributeError: no attribute 'items'")]
    assert rank.step(CheckWeights("good", 3, 60.0)) == [WeightsChecked(1, 3, "")]
    assert rank.step(Refit("good", 3, 60.0)) == [Refitted(1, 3, "")]
    assert rank.journal == [("refit", "good", OLD.digest(), 3, 60.0)]
    rank.refit_error = ValueError("shape")
    assert rank.step(Refit("good", 4, 60.0)) == [Refitted(1, 4, "ValueError: shape")]
    rank.balancer.close()
    assert rank.journal[-1] == ("close",)
