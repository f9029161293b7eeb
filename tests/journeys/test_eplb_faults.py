"""Whatever fails while experts move, requests come out right to the last bit, and the next interval tries again."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eplb_watch import (
    FEW_PROMPTS,
    FEW_TOKENS,
    Traffic,
    Watch,
    assert_same,
    balanced,
    rank_balancers,
    reasons,
)

from trimtab import LLM
from trimtab.engine.engine import EngineDeadError
from trimtab.experts.control.controller import Controller
from trimtab.experts.control.transaction import Committing
from trimtab.experts.movement import mover as mover_module
from trimtab.experts.movement.faults import Point
from trimtab.experts.movement.mover import BackgroundMover
from trimtab.experts.movement.verify import SlotMismatchError
from trimtab.experts.ports import Loan
from trimtab.outputs import RequestOutput
from trimtab.testing.movement import Action, ScriptedFaults, corrupts, never_ready, raises, waits_for

pytestmark = pytest.mark.usefixtures("leaves_nothing")
DP2: dict[str, Any] = {"data_parallel_size": 2}
every_communicator = pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])


def mover_of(llm: LLM, rank: int) -> BackgroundMover:
    mover = rank_balancers(llm)[rank].mover
    assert isinstance(mover, BackgroundMover)
    return mover


@contextmanager
def fault(llm: LLM, actions: Mapping[Point, Action], rank: int = 1) -> Iterator[ScriptedFaults]:
    mover = mover_of(llm, rank)
    before, mover._faults = mover._faults, ScriptedFaults(actions)
    try:
        yield mover._faults  # type: ignore[misc]
    finally:
        mover._faults = before


@contextmanager
def serving(
    checkpoint: Path, expected: list[RequestOutput], eplb: dict[str, Any] | None = None, **options: Any
) -> Iterator[Traffic]:
    with balanced(checkpoint, eplb, **DP2 | options) as llm:
        yield Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)


def expect_recovery(traffic: Traffic) -> None:
    """The next interval succeeds, every slot holds its expert, and requests of all that time were right."""
    traffic.until_one_more("done")
    traffic.finish()
    watch = Watch(traffic.llm)
    assert len({rank.placement.digest() for rank in watch.ranks}) == 1
    watch.check()
    assert traffic.num_right and not traffic.failures


# -- the mover ---------------------------------------------------------------------------------------------------------


@every_communicator
def test_rule_15_a_mover_that_fails_at_any_point_ends_in_an_abort_and_the_next_interval_tries_again(
    checkpoint: Path, expected: list[RequestOutput], communicator: str
) -> None:
    """B13: of layer and rank, with the mover's own words; one rank's fault, all ranks at rest. Bytes that arrive
    damaged or are damaged in staging are faults too. After the commit there is no way back."""
    faults = [(point, raises(f"at {point.value}")) for point in Point if point is not Point.HOME]
    faults += [(point, corrupts) for point in (Point.SENT, Point.ARRIVED)]
    with serving(checkpoint, expected, {"communicator": communicator}) as traffic:
        traffic.until_one_more("done")
        for point, action in faults:
            with fault(traffic.llm, {point: action}):
                traffic.until_one_more("aborted")
            reason = reasons(traffic.llm, "aborted")[-1]
            assert re.search(r"rank [01]: ", reason) and ("layer" in reason or point is Point.BEGIN), reason
            expect_recovery(traffic)
        assert traffic.outcome("aborted") >= len(faults)
        assert "abort_overdue" not in [entry["event"] for entry in traffic.llm.eplb_stats()["events"]]


@every_communicator
def test_rule_15_a_mover_that_is_never_ready_is_given_up_within_the_timeout(
    checkpoint: Path, expected: list[RequestOutput], communicator: str
) -> None:
    """Its peers' receives stay pending at that: what they were waiting for must not reach the next transaction."""
    stall_timeout_s = 1.0
    with serving(checkpoint, expected, {"communicator": communicator, "stall_timeout_s": stall_timeout_s}) as traffic:
        traffic.until_one_more("done")
        for point in (Point.STAGE, Point.ARRIVED, Point.STAGED):
            traffic.until(lambda: traffic.llm.eplb_stats()["state"] == "DONE")
            longest_s, began = 0.0, traffic.outcome("aborted")
            with fault(traffic.llm, {point: never_ready}) as faults:
                while traffic.outcome("aborted") == began:
                    start = time.monotonic()
                    traffic.step()
                    longest_s = max(longest_s, time.monotonic() - start)
            assert faults.reached
            times = {entry["event"]: entry["time_s"] for entry in traffic.llm.eplb_stats()["events"]}
            assert times["aborted"] - times["began"] < stall_timeout_s + 3 * longest_s
            expect_recovery(traffic)


def test_one_slow_rank_holds_up_a_commit_and_nobodys_tokens(checkpoint: Path, expected: list[RequestOutput]) -> None:
    """B08, B48: experts that are still on their way are not committed, and steps go on meanwhile."""
    with serving(checkpoint, expected) as traffic:
        traffic.until_one_more("done")
        for point in (Point.BEGIN, Point.STAGE, Point.ARRIVED, Point.STAGED):
            last = threading.Event()
            with fault(traffic.llm, {point: waits_for(last)}) as faults:
                traffic.until(lambda: bool([found for found, _ in faults.reached if found is point]))  # noqa: B023
                before = {rank.placement.digest() for rank in rank_balancers(traffic.llm)}
                for _ in range(30):
                    traffic.step()
                assert {rank.placement.digest() for rank in rank_balancers(traffic.llm)} == before and len(before) == 1
                last.set()
                expect_recovery(traffic)
        assert traffic.outcome("aborted") == 0


class AnswersEarly:
    """A mover that breaks rule 7: staging is open again, and written for the next layer, before the installation."""

    def __init__(self, mover: BackgroundMover, controller: Controller) -> None:
        self._mover = mover
        self._controller = controller
        self._staged_early: int | None = None
        self.num_early = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def take(self, layer: int) -> Any:
        prepared = self._mover.take(layer)
        self._mover.installed(layer, {})
        state = self._controller.state
        assert isinstance(state, Committing) and state.commit.layer == layer
        following = state.work.layers[state.work.num_committed + 1 :]
        if following and following[0].has_transfers:
            self._staged_early = following[0].layer
            self._mover.stage(self._staged_early)
            self._mover.settle()
            self.num_early += 1
        return prepared

    def installed(self, layer: int, loans: Mapping[int, Loan]) -> None:
        pass

    def stage(self, layer: int) -> None:
        if layer != self._staged_early:
            self._mover.stage(layer)
        self._staged_early = None


def test_rule_08_answering_early_corrupts_and_is_found(checkpoint: Path, expected: list[RequestOutput]) -> None:
    """Negative control of all tests here: what they compare does show it, and so do checksums."""
    with serving(checkpoint, expected) as traffic:
        ranks = rank_balancers(traffic.llm)
        early = [AnswersEarly(mover_of(traffic.llm, rank), traffic.llm._controller()) for rank in range(2)]
        for rank, mover in zip(ranks, early, strict=True):
            rank.mover = mover  # type: ignore[assignment]
        is_shown = False
        try:
            traffic.until(lambda: early[0].num_early > 0, tops_up=True)
        except AssertionError:  # a request has ended in the very step
            assert any(mover.num_early for mover in early)
            is_shown = True
        with pytest.raises(SlotMismatchError, match=r"rank \d: \d+ slots do not hold the bytes of their expert"):
            for rank in ranks:
                rank.mover.check_slots(rank.placement)  # type: ignore[attr-defined]
        if not is_shown:
            with pytest.raises(AssertionError):
                traffic.until(lambda: False, 300)


@pytest.mark.parametrize("kind", ["damaged in staging", "the mover dies"])
def test_an_expert_that_does_not_come_home_right_ends_the_engine(
    checkpoint: Path, expected: list[RequestOutput], kind: str
) -> None:
    """The kernel has read it in staging since the commit: what was computed with it cannot be taken back."""
    with serving(checkpoint, expected) as traffic:
        traffic.until_one_more("done")
        action, words = {
            "damaged in staging": (corrupts, r"what slot \d+ has read since the commit is not expert \d+ of layer \d"),
            "the mover dies": (raises("no page left"), "no page left"),
        }[kind]
        with fault(traffic.llm, {Point.HOME: action}):
            while not traffic.failures:
                traffic.step(may_fail=True)
        assert len(traffic.failures) == 4
        for why in traffic.failures:
            assert re.search(rf"rank 1: .*the mover's thread has ended: {words}", why), why
        with pytest.raises(EngineDeadError, match="the mover's thread has ended"):
            traffic.llm.engine.add_request("late", [1, 2])


@pytest.mark.parametrize("how", ["serving", "idle", "drain", "refit"])
def test_experts_that_are_on_their_way_home_hold_up_what_needs_them_there_and_nothing_else(
    checkpoint: Path, expected: list[RequestOutput], how: str
) -> None:
    """Rules 8, 18: requests are served right from staging; the transaction, new weights and an engine's end wait."""
    with serving(checkpoint, expected) as traffic:
        llm, go = traffic.llm, threading.Event()
        traffic.until_one_more("done")
        with fault(llm, {Point.HOME: waits_for(go)}) as faults:
            traffic.until(lambda: (Point.HOME, 0) in faults.reached or bool(_reading_staging(llm, 1)))
            done = traffic.outcome("done")
            for _ in range(30):
                traffic.step()
            assert _reading_staging(llm, 1) and traffic.outcome("done") == done
            Watch(llm).check()
            if how == "idle":
                traffic.finish()
                assert llm.engine.balancer.wants_step, "an idle engine has to finish it"
            elif how == "drain":
                llm.engine.balancer.drain()
                for _ in range(10):
                    traffic.step(tops_up=False)
                assert not llm.engine.balancer.is_at_rest
            elif how == "refit":
                llm.engine.balancer.request_refit(str(checkpoint), 1, 60.0)
                for _ in range(10):
                    llm.engine.step()
                assert llm.engine.balancer.refit_result is None
            go.set()
        if how == "serving":
            expect_recovery(traffic)
            return
        while not llm.engine.balancer.is_at_rest:
            traffic.step(tops_up=False)
        traffic.finish()
        assert not any(_reading_staging(llm, rank) for rank in (0, 1))
        Watch(llm).check()
        assert how != "refit" or llm.engine.balancer.refit_result.problem == ""
        assert traffic.num_right and not traffic.failures


def _reading_staging(llm: LLM, rank: int) -> list[int]:
    """Layers of which the rank's kernel reads slots elsewhere than in their own memory."""
    layers = llm._parts.models[rank].moe_layers
    return [layer.ordinal for layer in layers if getattr(layer.kernel, "_layer")._redirected]  # noqa: B009


@pytest.mark.parametrize("where", ["install", "refresh"])
def test_rule_07_a_commit_that_fails_on_a_rank_ends_the_engine_and_is_never_answered(
    checkpoint: Path, expected: list[RequestOutput], where: str
) -> None:
    """Half a layer must not compute: the rank ends before its forward, requests fail by its words."""
    with serving(checkpoint, expected) as traffic:
        traffic.until_one_more("done")
        rank = rank_balancers(traffic.llm)[1]
        story: list[str] = []
        begin_forward = rank.begin_forward

        def forward(**kind: bool) -> None:
            story.append("forward")
            begin_forward(**kind)

        def fail(*args: object) -> None:
            story.append("failed")
            raise MemoryError("no page left")

        mover = mover_of(traffic.llm, 1)
        answer = mover.installed

        def installed(layer: int, loans: Mapping[int, Loan]) -> None:
            story.append("answered")
            answer(layer, loans)

        rank.begin_forward = forward  # type: ignore[method-assign]
        mover.installed = installed  # type: ignore[method-assign]
        for layer in rank._layers:
            setattr(layer.storage if where == "install" else layer, where, fail)
        while not traffic.failures:
            traffic.step(may_fail=True)
        assert len(traffic.failures) == 4
        assert all("rank 1: MemoryError: no page left" in why for why in traffic.failures)
        assert story[-1] == "failed" and "answered" not in story
        with pytest.raises(EngineDeadError, match="rank 1: MemoryError"):
            traffic.llm.engine.add_request("late", [1, 2])
        assert not traffic.llm.engine.has_unfinished


def test_staging_that_is_too_small_is_said_with_both_sizes(checkpoint: Path, expected: list[RequestOutput]) -> None:
    with serving(checkpoint, expected) as traffic:
        traffic.until_one_more("done")
        communicator = mover_of(traffic.llm, 1)._communicator
        whole = communicator.staging
        traffic.until(lambda: traffic.llm.eplb_stats()["state"] == "DONE")
        communicator.staging = whole[:0]
        traffic.until_one_more("aborted")
        assert re.search(
            r"layer \d, rank 1: staging of 0 rows .* is too small for", reasons(traffic.llm, "aborted")[-1]
        )
        communicator.staging = whole
        expect_recovery(traffic)


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("RaisingPolicy", "the policy raised ZeroDivisionError: no load to divide by"),
        ("CrashingPolicy", "the policy's process ended with status 9"),
        ("HangingPolicy", "the policy did not answer within 0.5 s"),
    ],
)
def test_rule_15_a_policy_that_gives_nothing_changes_nothing_and_is_asked_again(
    checkpoint: Path, expected: list[RequestOutput], policy: str, reason: str
) -> None:
    """B13."""
    eplb = {"policy": f"trimtab.testing.policies:{policy}", "stall_timeout_s": 0.5 if "Hang" in policy else 60}
    with serving(checkpoint, expected, eplb) as traffic:
        before = rank_balancers(traffic.llm)[0].placement.digest()
        for _ in range(2):
            traffic.until_one_more("failed")
        traffic.finish()
        assert reasons(traffic.llm, "policy_failed")[-1] == reason
        assert {rank.placement.digest() for rank in rank_balancers(traffic.llm)} == {before}
        assert traffic.num_right and traffic.llm.eplb_stats()["moves"] == 0


def test_rule_16_eight_kinds_of_invalid_plans_change_nothing_and_a_valid_one_follows(
    checkpoint: Path, expected: list[RequestOutput]
) -> None:
    with serving(checkpoint, expected, {"policy": "trimtab.testing.policies:InvalidPlansPolicy"}) as traffic:
        before = rank_balancers(traffic.llm)[0].placement.digest()
        traffic.until(lambda: traffic.outcome("failed") == 8)
        assert {rank.placement.digest() for rank in rank_balancers(traffic.llm)} == {before}
        found = reasons(traffic.llm, "policy_failed")
        assert len(set(found)) == 8, found
        expect_recovery(traffic)
        assert traffic.outcome("failed") == 8


# -- engines that do nothing, end, or are interrupted ------------------------------------------------------------------


def test_an_idle_engine_finishes_a_rearrangement_or_gives_it_up(
    checkpoint: Path, expected: list[RequestOutput]
) -> None:
    """B06: without a request, plans of commands alone carry a transaction to its end."""
    with serving(checkpoint, expected, {"step_interval": 10**6, "window_size": 100, "stall_timeout_s": 1.0}) as traffic:
        llm = traffic.llm
        for _ in range(3):
            traffic.until(lambda: traffic.num_right >= 2)
            traffic.finish()
            num_forwards = llm.eplb_stats()["clock"]
            stats = llm.rearrange_experts()
            assert stats["state"] == "DONE" and not llm.engine.has_work and stats["clock"] == num_forwards
        assert stats["rearrangements"]["done"] == 3
        for action in (raises("no"), never_ready):
            with fault(llm, {Point.STAGED: action}):
                assert llm.rearrange_experts()["state"] == "ABORTED" and not llm.engine.has_work
        assert llm.rearrange_experts()["state"] == "DONE"
        Watch(llm).check()


STATES = ("WAITING_FOR_POLICY", "STAGING", "READY", "COMMITTING", "ABORTING", "ABORTED", "DONE")


def bring_to(state: str, traffic: Traffic) -> None:
    """Steps until a rearrangement is in that state between two steps, requests under way."""
    llm = traffic.llm

    def is_there() -> bool:
        return llm.eplb_stats()["state"].startswith(state) and llm.engine.num_unfinished == 4

    held = {"STAGING": never_ready, "ABORTING": raises("no"), "ABORTED": raises("no")}
    if state in held:
        with fault(llm, {Point.STAGED: held[state]}):
            traffic.until(is_there)
    else:
        traffic.until(is_there)


@pytest.mark.parametrize("state", STATES)
def test_rule_18_drain_aborts_in_the_next_plan_and_all_come_to_rest(
    checkpoint: Path, expected: list[RequestOutput], state: str
) -> None:
    with serving(checkpoint, expected, async_depth=2 if state == "COMMITTING" else 1) as traffic:
        bring_to(state, traffic)
        controller = traffic.llm._controller()
        controller.drain()
        num_transactions = controller._num_transactions
        traffic.until(lambda: controller.is_at_rest)
        for _ in range(10):
            traffic.step()
        traffic.finish()
        assert controller.is_at_rest and controller._num_transactions == num_transactions
        watch = Watch(traffic.llm)
        assert {rank.placement.digest() for rank in watch.ranks} == {controller.placement.digest()}
        watch.check()
        assert traffic.num_right


@every_communicator
@pytest.mark.parametrize("state", STATES)
def test_rule_18_shutdown_is_clean_from_every_state(
    checkpoint: Path, expected: list[RequestOutput], state: str, communicator: str
) -> None:
    depth = 2 if state == "COMMITTING" else 1
    with serving(checkpoint, expected, {"communicator": communicator}, async_depth=depth) as traffic:
        bring_to(state, traffic)
        began = time.monotonic()
        traffic.llm.shutdown()
        assert time.monotonic() - began < 10
        traffic.llm.shutdown()


def test_rule_18_shutdown_ends_a_mover_that_waits(checkpoint: Path, expected: list[RequestOutput]) -> None:
    with serving(checkpoint, expected) as traffic, fault(traffic.llm, {Point.ARRIVED: never_ready}) as faults:
        traffic.until(lambda: bool([point for point, _ in faults.reached if point is Point.ARRIVED]))
        traffic.llm.shutdown()


def test_ctrl_c_during_a_rearrangement_waits_for_the_step_and_harms_nothing(
    checkpoint: Path, expected: list[RequestOutput]
) -> None:
    with serving(checkpoint, expected, {"step_interval": 10**6, "window_size": 100}) as traffic:
        llm = traffic.llm
        traffic.until(lambda: traffic.num_right >= 2)
        traffic.finish()

        def interrupt(layer: int, data: object, aborted: threading.Event) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        with fault(llm, {Point.STAGE: interrupt}), pytest.raises(KeyboardInterrupt):
            llm.rearrange_experts()
        assert llm.eplb_stats()["state"] not in ("DONE", "IDLE")
        assert_same(llm.generate(FEW_PROMPTS, FEW_TOKENS, use_tqdm=False), expected)
        while llm.engine.has_work:
            llm.engine.step()
        assert llm.eplb_stats()["rearrangements"]["done"] == 1
        Watch(llm).check()


# -- starting ----------------------------------------------------------------------------------------------------------


@every_communicator
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_in_the_midst_of_the_exchange_ends_the_start_by_its_words(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, communicator: str, victim: int
) -> None:
    """B09: the others wait for it at a meeting of their own, outside of Gloo, and are told."""
    exchange_slots = mover_module.exchange_slots

    def exchange(storages: Any, placement: Any, communicator: Any, timeout_s: float) -> np.ndarray:
        if communicator.rank == victim:
            raise MemoryError("no page left")
        return exchange_slots(storages, placement, communicator, timeout_s)

    monkeypatch.setattr(mover_module, "exchange_slots", exchange)
    began = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=f"rank {victim}: MemoryError: no page left"),
        balanced(checkpoint, {"communicator": communicator}, **DP2),
    ):
        pass
    assert time.monotonic() - began < 60, "the others did not wait for their deadline"
