"""The protocol's transitions, one by one; tests/simulation runs them in all orders."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol_steps import (
    MOVED,
    SHARED,
    START,
    TARGET,
    TRANSACTION,
    Protocol,
    committed,
    quiescent,
    staged,
)

from trimtab.experts.control.transaction import (
    Aborted,
    Aborting,
    Broken,
    Cancel,
    ChangedLayer,
    CommittedLayer,
    Committing,
    Done,
    Planned,
    Ready,
    SentCommit,
    Staging,
    Tick,
    Work,
    placement_of,
    state_name,
)
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Abort, Commit, Failed, Plan, Stage

LAST = ChangedLayer(2, True)
AFTER_0 = START.with_layer(0, TARGET)
AFTER_1 = AFTER_0.with_layer(1, TARGET)


def test_a_rearrangement_walks_through_its_states() -> None:
    protocol = Protocol().begin(MOVED, SHARED, LAST)
    assert isinstance(protocol.state, Planned)
    plan, stage = protocol.next()
    assert isinstance(plan, Plan) and plan.start_digest == START.digest() and plan.transaction == TRANSACTION
    assert stage == Stage(TRANSACTION, 0)
    assert state_name(protocol.state) == "STAGING(0)"
    protocol.done(staged(0))
    assert state_name(protocol.state) == "READY(0)"
    assert protocol.next() == [Commit(TRANSACTION, 0)]  # layer 1 changes its shares alone: nothing to stage
    assert state_name(protocol.state) == "COMMITTING(0)"
    protocol.done(committed(0, AFTER_0))
    assert state_name(protocol.state) == "COMMITTED(0)" and placement_of(protocol.state) == AFTER_0
    assert protocol.next() == [Commit(TRANSACTION, 1), Stage(TRANSACTION, 2)]
    protocol.done([*committed(1, AFTER_1), *staged(2)])
    assert state_name(protocol.state) == "READY(2)"
    assert protocol.next() == [Commit(TRANSACTION, 2)]
    protocol.done(committed(2, TARGET))
    assert state_name(protocol.state) == "FINISHING" and placement_of(protocol.state) == TARGET
    assert protocol.next() == []
    assert protocol.done(quiescent()) == Done(TARGET, TRANSACTION)
    assert protocol.next() == []


def test_a_transaction_ends_when_every_ranks_experts_are_home() -> None:
    """Kernels may read staging until then: nothing that needs it, or slots, may begin."""
    protocol = Protocol().begin(MOVED)
    protocol.next()
    protocol.done(staged(0))
    protocol.next()
    protocol.done([*committed(0, AFTER_0), *quiescent(1)])  # home within the commit's own step
    assert state_name(protocol.state) == "FINISHING"
    assert protocol.done(quiescent(1)) == protocol.state  # a duplicate is harmless
    assert protocol.send(Cancel("new weights")) == [] and state_name(protocol.state) == "FINISHING"
    with pytest.raises(AssertionError, match="cannot begin in FINISHING"):
        protocol.begin(MOVED)
    assert protocol.next() == []
    assert protocol.done(quiescent(0)) == Done(AFTER_0, TRANSACTION)


def test_ranks_that_are_home_with_the_last_commit_end_the_transaction_with_its_step() -> None:
    protocol = Protocol().begin(SHARED)
    protocol.next()
    protocol.done()
    protocol.next()
    after = START.with_layer(1, TARGET)
    assert protocol.done([*committed(1, after), *quiescent()]) == Done(after, TRANSACTION)


def test_experts_that_do_not_come_home_are_told_of_and_nothing_follows_them() -> None:
    protocol = Protocol().begin(MOVED, stall_timeout_s=10.0)
    protocol.next()
    protocol.done(staged(0))
    protocol.next()
    protocol.done(committed(0, AFTER_0))
    protocol.send(Tick(4.9))
    protocol.done(quiescent(0))
    protocol.send(Tick(4.9))
    assert state_name(protocol.state) == "FINISHING"
    protocol.send(Tick(0.2))
    reason = "rank 1: not at rest after 5.1 s without progress"
    assert protocol.next() == [Abort(TRANSACTION, reason)]  # rests are cut short
    protocol.done(quiescent(0))
    protocol.send(Tick(5.1))
    assert protocol.state.is_overdue  # type: ignore[union-attr]
    assert protocol.done(quiescent(1)) == Aborted(AFTER_0, TRANSACTION, reason, rank=1)


def test_a_layer_is_committed_only_when_all_ranks_have_staged_it() -> None:
    """B48: readiness is said after the last byte, and one rank's word is not all ranks'."""
    protocol = Protocol().begin(MOVED)
    protocol.next()
    protocol.done(staged(0, 1))
    assert protocol.next() == [] and isinstance(protocol.state, Staging)
    protocol.done(staged(0, 1))  # a duplicate is harmless
    assert protocol.next() == []
    protocol.done(staged(0, 0))
    assert protocol.next() == [Commit(TRANSACTION, 0)]


def test_a_commit_waits_for_word_that_no_rank_objects_to_the_plan() -> None:
    protocol = Protocol().begin(SHARED)
    assert [type(command) for command in protocol.next()] == [Plan]
    assert protocol.next() == []  # two steps in flight
    protocol.done(step=1)
    assert isinstance(protocol.state, Ready) and protocol.next() == [Commit(TRANSACTION, 1)]
    objecting = Protocol().begin(SHARED)
    objecting.next()
    objecting.done([Failed(1, TRANSACTION, -1, "another digest")])
    assert objecting.state == Aborting(objecting.state.work, "rank 1: another digest", rank=1)  # type: ignore[union-attr]


def test_reports_of_another_transaction_are_dropped() -> None:
    protocol = Protocol().begin(MOVED)
    protocol.next()
    before = protocol.state
    assert protocol.done(staged(0, transaction=6)) == before
    assert protocol.done([Failed(0, 6, 0, "late")]) == before
    assert protocol.done(quiescent(transaction=6)) == before
    assert protocol.done(staged(2)) == before  # nor is a layer's word another layer's


def test_a_decided_commit_is_mandatory() -> None:
    """B03: once all ranks are ready, the commit is of all or the engine ends."""
    protocol = Protocol().begin(MOVED)
    protocol.next()
    protocol.done(staged(0))
    protocol.next()
    waiting = protocol.state
    assert protocol.done(committed(0, AFTER_0, 1), step=1) == waiting  # another step's output: too early to judge
    state = protocol.done(committed(0, AFTER_0, 1))
    assert state == Broken(START, "rank 0 did not commit layer 0, and must")
    assert protocol.next() == [] and protocol.send(Cancel("drain")) == [] and protocol.state == state


def test_all_ranks_digests_must_be_the_controllers() -> None:
    protocol = Protocol(Committing(Protocol().begin(MOVED).state.work, SentCommit(0, step=3)))  # type: ignore[union-attr]
    reports = [*committed(0, AFTER_0, 0), *committed(0, START, 1)]
    assert protocol.done(reports, step=3) == Broken(START, "rank 1 has another placement after the commit of layer 0")


def test_an_abort_ends_when_every_mover_rests() -> None:
    protocol = Protocol().begin(MOVED)
    protocol.next()
    protocol.done([*staged(0, 0), Failed(1, TRANSACTION, 0, "a bad checksum")])
    assert state_name(protocol.state) == "ABORTING(layer 0, rank 1: a bad checksum)"
    protocol.done(quiescent())  # before the Abort: not the answer to it
    assert protocol.next() == [Abort(TRANSACTION, "layer 0, rank 1: a bad checksum")]
    assert protocol.next() == []
    protocol.done(quiescent(), step=1)
    protocol.done(quiescent(0), step=2)
    assert isinstance(protocol.state, Aborting)
    reason = "layer 0, rank 1: a bad checksum"
    assert protocol.done(quiescent(1), step=3) == Aborted(START, TRANSACTION, reason, layer=0, rank=1)


def test_a_plan_that_was_sent_is_executed_whole_when_draining() -> None:
    protocol = Protocol().begin(MOVED, LAST)
    protocol.next()
    protocol.done(staged(0))
    assert protocol.next() == [Commit(TRANSACTION, 0), Stage(TRANSACTION, 2)]
    protocol.send(Cancel("drain"))
    assert protocol.next() == [Abort(TRANSACTION, "drain")]
    protocol.done([*committed(0, AFTER_0), *staged(2)], step=2)
    assert placement_of(protocol.state) == AFTER_0
    assert protocol.done(quiescent(), step=3) == Aborted(AFTER_0, TRANSACTION, "drain")


def test_a_commit_that_fails_while_draining_still_breaks() -> None:
    protocol = Protocol().begin(MOVED, LAST)
    protocol.next()
    protocol.done(staged(0))
    protocol.next()
    protocol.send(Cancel("drain"))
    assert protocol.done(committed(0, AFTER_0, 0)) == Broken(START, "rank 1 did not commit layer 0, and must")


def test_what_no_rank_has_heard_of_needs_no_abort() -> None:
    protocol = Protocol().begin(MOVED)
    protocol.send(Cancel("drain"))
    assert protocol.state == Aborted(START, TRANSACTION, "drain") and protocol.next() == []


def test_a_last_commit_under_way_ends_a_transaction_well() -> None:
    protocol = Protocol().begin(MOVED)
    protocol.next()
    protocol.done(staged(0))
    protocol.next()
    protocol.send(Cancel("drain"))
    protocol.done(committed(0, AFTER_0))
    assert state_name(protocol.state) == "FINISHING" and protocol.next() == []
    assert protocol.done(quiescent()) == Done(AFTER_0, TRANSACTION)


def test_without_progress_a_transaction_is_aborted() -> None:
    protocol = Protocol().begin(MOVED, stall_timeout_s=10.0)
    protocol.send(Tick(100.0))  # nothing was sent: nobody is late
    protocol.next()
    protocol.send(Tick(4.9))
    protocol.done(staged(0, 0))
    assert isinstance(protocol.state, Staging)
    protocol.send(Tick(4.9))
    protocol.done(staged(0, 0))  # said again: no progress
    protocol.send(Tick(0.2))
    assert state_name(protocol.state) == "ABORTING(layer 0, rank 1: not staged after 5.1 s without progress)"
    protocol.next()
    protocol.send(Tick(4.9))
    assert not protocol.state.is_overdue  # type: ignore[union-attr]
    protocol.send(Tick(0.2))
    assert protocol.state.is_overdue  # type: ignore[union-attr]
    protocol.done(quiescent())
    assert isinstance(protocol.state, Aborted)


def test_a_layer_is_not_given_up_while_one_rank_after_the_other_has_it() -> None:
    """Three times the deadline over all, and each rank in its time."""
    topology = Topology(num_experts=4, num_ranks=4)
    start = Placement(topology, [[0, 1, 2, 3]] * 2)
    target = Placement(topology, [[1, 0, 2, 3]] * 2)
    layers = (ChangedLayer(0, True), ChangedLayer(1, True))
    protocol = Protocol(Planned(Work(TRANSACTION, target, layers, 10.0, start)))
    protocol.next()
    for rank in range(4):
        protocol.send(Tick(4.9))
        protocol.done(staged(0, rank))
    assert isinstance(protocol.state, Ready)
    protocol.next()
    protocol.done([*committed(0, start.with_layer(0, target), 0, 1, 2, 3), *staged(1, 2)])
    for rank in (1, 0):
        protocol.send(Tick(4.9))
        protocol.done(staged(1, rank))
    protocol.send(Tick(5.1))
    assert state_name(protocol.state) == "ABORTING(layer 1, rank 3: not staged after 5.1 s without progress)"


def test_progress_restarts_the_clock() -> None:
    protocol = Protocol().begin(MOVED, LAST, stall_timeout_s=10.0)
    protocol.next()
    placement = START
    for layer in (0, 2):
        protocol.send(Tick(4.0))
        protocol.done(staged(layer))
        protocol.send(Tick(4.0))
        protocol.next()
        protocol.send(Tick(40.0))  # a commit ends with its step, however long that is
        placement = placement.with_layer(layer, TARGET)
        protocol.done(committed(layer, placement))
    protocol.send(Tick(4.0))
    assert isinstance(protocol.done(quiescent()), Done)


def test_time_in_which_nobody_steps_the_engine_does_not_count() -> None:
    protocol = Protocol().begin(MOVED, stall_timeout_s=10.0)
    protocol.next()
    for _ in range(4):
        protocol.send(Tick(3600.0, is_idle=True))
    assert isinstance(protocol.state, Staging)
    protocol.send(Tick(1.0, is_idle=True))
    assert isinstance(protocol.state, Aborting)


def test_a_transaction_begins_only_from_a_closed_state() -> None:
    protocol = Protocol().begin(MOVED)
    with pytest.raises(AssertionError, match="cannot begin in PLANNED"):
        protocol.begin(MOVED)
    with pytest.raises(AssertionError, match="changes nothing"):
        Protocol().begin()
    done = Protocol(Done(START, 6))
    assert isinstance(done.begin(MOVED).state, Planned)


def test_ready_after_a_failure_is_not_committed() -> None:
    protocol = Protocol().begin(MOVED)
    protocol.next()
    protocol.done([*staged(0), Failed(0, TRANSACTION, 0, "late")])
    assert [type(command) for command in protocol.next()] == [Abort]
    committed_layer = CommittedLayer(replace(Protocol().begin(MOVED, SHARED).state.work, num_committed=1), 0)  # type: ignore[union-attr]
    assert state_name(Protocol(committed_layer).state) == "COMMITTED(0)"


def test_a_long_step_that_brings_progress_aborts_nothing() -> None:
    """Its time is told after its output: what is decided by then waits for no rank."""
    protocol = Protocol().begin(MOVED, SHARED, stall_timeout_s=10.0)
    protocol.next()
    protocol.done(staged(0))
    protocol.send(Tick(40.0))
    assert protocol.next() == [Commit(TRANSACTION, 0)]
    protocol.done(committed(0, AFTER_0))
    protocol.send(Tick(40.0))
    assert protocol.next() == [Commit(TRANSACTION, 1)]


def test_the_rank_that_is_blamed_is_the_one_that_failed_first_of_all() -> None:
    """Rule 15: those that waited for it fail too, in the same step or the one before, and know less."""
    waited = Failed(0, TRANSACTION, 0, "rank 1 cannot take experts", is_consequence=True)
    cause = Failed(1, TRANSACTION, 0, "no page left")
    together = Protocol().begin(MOVED)
    together.next()
    together.done([waited, cause])
    assert state_name(together.state) == "ABORTING(layer 0, rank 1: no page left)"
    apart = Protocol().begin(MOVED)
    apart.next()
    apart.done([waited])
    apart.next()
    apart.done([cause, *quiescent()])
    reason = "layer 0, rank 1: no page left; layer 0, rank 0: rank 1 cannot take experts"
    assert apart.state == Aborted(START, TRANSACTION, reason, 0, 1)
