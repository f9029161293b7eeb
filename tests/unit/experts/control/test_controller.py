"""The controller as the engine drives it; orders of events in all variety are tests/simulation's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obedient_ranks import Obedient, ScriptedPolicy

from trimtab.experts.control.controller import RankProtocolError
from trimtab.experts.control.load_trace import LoadTrace, TraceMetadata, read_load_trace
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import (
    Abort,
    CheckWeights,
    Collect,
    Commit,
    Committed,
    Plan,
    Quiescent,
    Refit,
    Refitted,
    Stage,
    Staged,
)

TOPOLOGY = Topology(4, 0, 2)
START = Placement(TOPOLOGY, [[0, 1, 2, 3]] * 2)
TARGET = Placement(TOPOLOGY, [[0, 2, 1, 3], [0, 3, 2, 1]])
SKEWED = np.array([[8, 6, 1, 1], [9, 9, 1, 1]])
SETTINGS: dict[str, Any] = {"window_size": 4, "step_interval": 6, "min_gain": 0, "stall_timeout_s": 10.0}


def engine(*answers: Placement | str, **settings: Any) -> Obedient:
    made = Obedient(SETTINGS | settings, START, ScriptedPolicy(*answers))
    made.counts = SKEWED
    return made


def policy(made: Obedient) -> ScriptedPolicy:
    assert isinstance(made.controller.policy, ScriptedPolicy)
    return made.controller.policy


def kinds(made: Obedient) -> list[str]:
    return [type(command).__name__ for commands in made.commands for command in commands]


def test_a_rearrangement_from_the_trigger_to_its_end() -> None:
    """B17: placements have changed on all ranks, and in one order: table and weights together."""
    made = engine(TARGET)
    made.steps(11)
    assert [kind for kind in kinds(made) if kind != "Collect"] == ["Plan", "Stage", "Commit", "Stage", "Commit"]
    collected = [index for index, commands in enumerate(made.commands) if Collect(True) in commands]
    assert collected == [0, 2, 6, 8]  # opened, then cut where windows begin and end: 4 steps before 6 and before 12
    assert made.names() == ["began", "committed", "committed", "done"]
    assert made.placement == made.controller.placement == TARGET
    stages = [command.layer for commands in made.commands for command in commands if isinstance(command, Stage)]
    assert stages == [1, 0]  # the worst balanced layer first
    stats = made.controller.stats()
    assert stats["state"] == "DONE" and stats["rearrangements"]["done"] == 1
    assert (stats["moves"], stats["bytes"], stats["mixed_layer_steps"]) == (4, 4000, 1)
    assert stats["bandwidth"] == 500_000.0 and stats["staging_s"] == pytest.approx(0.002)
    assert (
        made.last("began")["changes"]
        == made.last("done")["changes"]
        == [
            "4 slots get another expert in 2 layers; most replicas of one expert: 1",
            "layer 0: expert 2 moves to rank 0 (slot 1, was expert 1)",
            "layer 0: expert 1 moves to rank 1 (slot 2, was expert 2)",
            "layer 1: expert 3 moves to rank 0 (slot 1, was expert 1)",
            "layer 1: expert 1 moves to rank 1 (slot 3, was expert 3)",
        ]
    )


def test_moves_are_told_apart_by_where_the_expert_came_from() -> None:
    """Slot 1 of rank 0 takes over an expert of its own rank, slot 2 of rank 1 one of the other rank."""
    topology = Topology(2, 2, 2)
    made = Obedient(
        SETTINGS,
        Placement(topology, [[0, 1, 1, 1]]),
        ScriptedPolicy(Placement(topology, [[0, 0, 0, 1]])),
    )
    made.counts = np.array([[9, 1]])
    made.steps(11)
    stats = made.controller.stats()
    assert stats["moves_by_kind"] == {"received": 1, "copied": 1} and stats["moves"] == 2
    assert stats["bytes_by_kind"] == {"received": 1000, "copied": 1000} and stats["bytes"] == 1000


def test_balance_is_told_by_layer() -> None:
    """Loads of the ranks: (14, 2) and (18, 2)."""
    made = engine("no idea", TARGET)
    made.steps(9)
    assert made.controller.stats()["max_over_mean_by_layer"] == [1.0, 1.0]  # a policy without an answer
    made.steps(6)
    stats = made.controller.stats()
    assert stats["max_over_mean_by_layer"] == pytest.approx([14 / 8, 18 / 10])
    assert stats["balancedness"] == pytest.approx((8 / 14 + 10 / 18) / 2)


def test_step_times_are_told_apart_by_whether_experts_were_moving() -> None:
    made = engine(TARGET)
    made.steps(11, seconds=0.003)
    made.steps(3, seconds=0.003, runs_forward=False)  # plans of commands alone are no steps of traffic
    times = made.controller.stats()["step_times"]
    moving, at_rest = times["rearranging"], times["at_rest"]
    assert moving["num"] + at_rest["num"] == 11 and moving["num"] >= 2
    total = moving["total_s"] + at_rest["total_s"]
    assert total == pytest.approx(0.033) and sum(moving["counts"]) == moving["num"]
    assert moving["counts"][moving["bounds_s"].index(0.005)] == moving["num"]  # above 2 ms and at most 5


def test_the_policy_is_asked_about_the_last_window() -> None:
    made = engine(TARGET)
    made.steps(8)
    (load,) = policy(made).asked
    assert load.num_steps == 4 and load.counts.tolist() == (SKEWED * 4).tolist()


def test_steps_without_a_forward_do_not_count() -> None:
    made = engine(TARGET)
    made.steps(50, runs_forward=False)
    assert made.controller.trigger.clock == 0 and made.controller.stats()["steps_to_next"] == 6


def test_rule_10_a_period_without_fresh_load_starts_no_rearrangement_and_the_clock_resets() -> None:
    """Rule 10."""
    made = engine(TARGET)
    made.records = False
    made.steps(7)
    made.steps(1)
    assert made.names() == ["declined"] and "no load was recorded" in made.last("declined")["reason"]
    assert made.controller.stats()["steps_to_next"] == 4 and policy(made).asked == []
    made.records = True
    made.steps(8)
    assert "began" in made.names()


def test_rule_10_one_fresh_rank_is_enough_and_the_clock_resets() -> None:
    """Of two ranks one alone recorded, in one step of the period: rank 0's reports hold all there is."""
    made = engine(TARGET)
    made.records = False
    made.steps(5)
    made.records = True
    made.steps(1)
    made.records = False
    made.steps(3)
    assert "began" in made.names() and len(policy(made).asked) == 1
    assert policy(made).asked[0].counts.tolist() == SKEWED.tolist()
    assert made.controller.stats()["steps_to_next"] == 12 - 9


def test_rule_10_old_load_alone_starts_nothing() -> None:
    """Rule 10: the window still holds load of the period before, none of it fresh."""
    made = engine(START, TARGET, window_size=100)
    made.steps(6)
    made.records = False
    made.steps(9)
    assert len(policy(made).asked) == 1
    assert [numbers["reason"] for _, numbers in made.events] == [
        "no better placement was found",
        "no load was recorded since the last decision",
    ]


def test_rule_12_a_due_trigger_during_an_open_transaction_is_deferred() -> None:
    """Rule 12."""
    made = engine(TARGET, TARGET)
    made.silent = {Staged}
    made.steps(20)
    assert kinds(made).count("Plan") == 1 and made.controller.stats()["steps_to_next"] == 0
    assert made.controller.stats()["state"] == "STAGING(1)"
    made.silent = set()
    made.steps(1, seconds=6.0)
    made.steps(5)
    assert made.names()[:4] == ["began", "aborting", "aborted", "began"] and kinds(made).count("Plan") == 2


def test_gain_below_the_bound_is_declined_with_its_numbers() -> None:
    made = engine(TARGET, min_gain=0.9)
    made.steps(10)
    numbers = made.last("declined")
    assert numbers["reason"] == "the gain is not worth the moves" and numbers["num_moves"] == 4
    assert 0 < numbers["gain"] < 0.9 and numbers["min_gain"] == 0.9
    stats = made.controller.stats()
    assert stats["rearrangements"]["declined"] == 1 and stats["last_decision"]["num_bytes"] == 4000
    assert made.controller.placement == START


def test_a_request_rearranges_an_idle_engine_whatever_its_gain() -> None:
    made = engine(TARGET, min_gain=0.9)
    made.steps(3)
    assert not made.controller.wants_step
    made.controller.request_rearrangement()
    while made.controller.wants_step:
        made.step(runs_forward=False)
        assert len(made.commands) < 20
    assert made.placement == TARGET and made.names()[-1] == "done"


def test_a_failing_policy_changes_nothing_and_the_next_interval_tries_again() -> None:
    """B13, rule 15."""
    made = engine("the policy raised RuntimeError: no idea", TARGET)
    made.steps(10)
    assert made.last("policy_failed") == {"reason": "the policy raised RuntimeError: no idea"}
    assert made.placement == START and made.controller.stats()["rearrangements"]["failed"] == 1
    made.steps(9)
    assert made.placement == TARGET


def test_rule_15_a_stalled_rank_ends_in_an_abort_within_the_timeout_and_the_next_interval_tries_again() -> None:
    """Rule 15: the words name layer and rank; layers are wholly old or new; running requests are not asked."""
    made = engine(TARGET, TARGET, TARGET, TARGET)
    made.silent = {Staged}
    made.steps(9)
    opened_at = made.now
    while "aborted" not in made.names():
        made.step(seconds=0.1)
    assert made.now - opened_at <= 10.0
    aborted = made.last("aborted")
    assert aborted["reason"].startswith("layer 1, rank 1: not staged after 5")
    assert (aborted["layer"], aborted["rank"], aborted["changes"]) == (1, 1, ["nothing changes"])
    assert made.controller.placement == START and made.controller.is_at_rest
    made.silent = set()
    made.steps(14)
    rearrangements = made.controller.stats()["rearrangements"]
    assert made.placement == TARGET and (rearrangements["done"], rearrangements["aborted"]) == (1, 1)


def test_a_mover_that_does_not_come_to_rest_is_told_once_and_nothing_starts_before_it_does() -> None:
    made = engine(TARGET)
    made.silent = {Staged, Quiescent}
    made.steps(9)
    made.steps(300, seconds=0.1)
    assert made.names() == ["began", "aborting", "abort_overdue"] and kinds(made).count("Plan") == 1
    assert made.controller.overdue_reason and made.controller.wants_step


def test_a_rank_that_does_not_commit_ends_the_engine() -> None:
    """B03: a decided commit is mandatory."""
    made = engine(TARGET)
    made.silent = {Committed}
    with pytest.raises(RankProtocolError, match="rank 1 did not commit layer 1, and must"):
        made.steps(12)


def test_a_report_of_load_that_nobody_asked_for_ends_the_engine() -> None:
    made = engine(TARGET)
    made.step()
    made._obey(Collect(True))
    unasked = made._obey(Collect(True))
    made.controller.commands(runs_forward=True, now=made.now)
    with pytest.raises(RankProtocolError, match="rank 0 reported a load that nobody asked for"):
        made.controller.on_reports(unasked, made.now)


def test_rule_09_warm_up_leaves_clock_and_window_as_they_were() -> None:
    """B26, rule 9: at start both are empty at its end; a re-warm between real steps changes neither."""
    made = engine(TARGET, TARGET)
    made.controller.begin_warm_up()
    made.steps(9)
    assert kinds(made) == [] and made.controller.trigger.clock == 0
    made.controller.end_warm_up()
    made.steps(3)
    made.controller.begin_warm_up()
    made.counts = SKEWED * 1000
    made.steps(20)
    made.counts = SKEWED
    made.controller.end_warm_up()
    assert made.controller.trigger.clock == 3
    made.steps(5)
    (load,) = policy(made).asked
    assert load.counts.tolist() == (SKEWED * load.num_steps).tolist()


def test_rule_18_draining_aborts_with_the_next_plan_and_comes_to_rest() -> None:
    """Rule 18."""
    made = engine(TARGET)
    made.silent = {Staged}
    made.steps(9)
    made.controller.drain()
    assert [type(command) for command in made.step(runs_forward=False)] == [Abort]
    assert made.controller.is_at_rest and made.last("aborted")["reason"] == "drain"
    made.steps(30)
    assert kinds(made).count("Plan") == 1
    made.controller.close()
    made.controller.close()
    assert policy(made).is_closed


def test_draining_while_the_policy_thinks_ends_the_question() -> None:
    made = engine(TARGET)
    policy(made).is_ready = False
    made.steps(8)
    assert made.controller.stats()["state"] == "WAITING_FOR_POLICY" and made.controller.wants_step
    made.controller.drain()
    assert policy(made).is_closed and made.controller.is_at_rest and not made.controller.wants_step


def test_new_weights_wait_for_the_open_transaction_to_be_aborted() -> None:
    """B23."""
    made = engine(TARGET)
    made.silent = {Staged}
    made.steps(9)
    made.controller.request_refit("/new", 1, 60.0)
    with pytest.raises(ValueError, match="while others are being loaded"):
        made.controller.request_refit("/newer", 2, 60.0)
    made.steps(4, runs_forward=False)
    sent = [command for commands in made.commands[9:] for command in commands]
    assert [type(command) for command in sent] == [CheckWeights, Abort, Refit]
    assert made.controller.refit_result is not None and made.controller.refit_result.problem == ""
    assert made.controller.weights_version == 1 and not made.controller.unhealthy_reason


def test_weights_that_cannot_be_loaded_leave_the_transaction_alone() -> None:
    made = engine(TARGET)
    made.silent = {Staged}
    made.steps(9)
    made.problem = "a shape differs"
    made.controller.request_refit("/bad", 1, 60.0)
    made.steps(3)
    assert made.controller.refit_result is not None
    assert made.controller.refit_result.problem == "rank 1: a shape differs"
    assert made.controller.stats()["state"] == "STAGING(1)" and made.controller.weights_version == 0
    assert not made.controller.unhealthy_reason


def test_a_refit_that_fails_halfway_leaves_the_engine_unhealthy_until_one_succeeds() -> None:
    made = engine(TARGET, TARGET)
    made.silent = {Refitted}
    made.controller.request_refit("/new", 1, 60.0)
    made.steps(3)
    assert "rank 1" in made.controller.unhealthy_reason and made.controller.weights_version == 0
    made.steps(20)
    assert "Plan" not in kinds(made)  # nothing moves on mixed weights
    made.silent = set()
    made.controller.request_refit("/new", 1, 60.0)
    made.steps(3)
    assert not made.controller.unhealthy_reason and made.controller.weights_version == 1
    made.steps(10)
    assert made.placement == TARGET


def test_balancedness_is_told_at_its_interval() -> None:
    """B29."""
    made = engine(START, START, log_balancedness=True, log_balancedness_interval=3, step_interval=100)
    made.steps(10)
    told = [numbers for event, numbers in made.events if event == "balancedness"]
    assert [numbers["step"] for numbers in told] == [3, 6, 9]
    assert told[0]["balancedness"] == pytest.approx((16 / 2 / 14 + 20 / 2 / 18) / 2)


def test_recorded_windows_are_those_decisions_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    trace = LoadTrace(str(path), TraceMetadata("tiny", 2, 4, "all", 4, START.digest()))
    made = Obedient(SETTINGS, START, ScriptedPolicy(TARGET, START), trace=trace)
    made.counts = SKEWED
    made.steps(16)
    made.controller.close()
    _, loads, facts = read_load_trace(path)
    assert [load.counts.tolist() for load in loads] == [(SKEWED * 4).tolist()] * 2
    assert facts[:, 0].tolist() == [6, 12]


def test_commands_of_one_transaction_never_overlap_with_another() -> None:
    made = engine(*[TARGET, START] * 20, step_interval=2, window_size=2)
    made.steps(200)
    open_transactions: set[int] = set()
    num_commits = 0
    for commands in made.commands:
        for command in commands:
            if isinstance(command, Plan):
                assert not open_transactions or num_commits == 2
                open_transactions, num_commits = {command.transaction}, 0
            elif isinstance(command, Stage | Commit):
                assert command.transaction in open_transactions
                num_commits += isinstance(command, Commit)
    assert made.controller.tally.num_done >= 20


def test_a_controller_keeps_two_placements_at_most() -> None:
    """B53: plans are let go after their end."""
    import gc

    made = engine(*[TARGET, START] * 100, step_interval=2, window_size=2)
    policy(made).answers = [Placement(TOPOLOGY, p.slot_to_expert) for p in [TARGET, START] * 100]
    made.steps(300)
    made.steps(100)
    policy(made).answers.clear()
    made.commands.clear()
    made.events.clear()
    made.target = made.placement
    gc.collect()
    kept = [p for p in gc.get_objects() if isinstance(p, Placement) and p.topology is TOPOLOGY]
    assert len({id(placement) for placement in kept} - {id(START), id(TARGET)}) <= 3  # two, and the ranks' own
