"""An engine that is shut down lets its movers come to rest before their ranks end, from every state and by any door."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from eplb_watch import (
    FEW_PROMPTS,
    FEW_TOKENS,
    Traffic,
    balanced,
    rank_balancers,
    reasons,
)

from trimtab import LLM
from trimtab.engine import engine as engine_module
from trimtab.experts.movement.faults import Point
from trimtab.experts.movement.mover import BackgroundMover
from trimtab.outputs import RequestOutput
from trimtab.testing.movement import ScriptedFaults, never_ready, raises

pytestmark = pytest.mark.usefixtures("leaves_nothing")
STATES = ("IDLE", "WAITING_FOR_POLICY", "STAGING", "READY", "COMMITTING", "ABORTING", "ABORTED", "DONE")
HELD = {"STAGING": never_ready, "ABORTING": raises("no"), "ABORTED": raises("no")}


class Ends:
    """What each rank had open when its mover was told to end: 0 where it rested."""

    def __init__(self, llm: LLM) -> None:
        self.open: list[int] = []
        self._lock = threading.Lock()
        for rank in rank_balancers(llm):
            assert isinstance(rank.mover, BackgroundMover)
            close = rank.mover.close

            def watched(rank: Any = rank, close: Any = close) -> None:
                with self._lock:
                    self.open.append(rank._transaction)
                close()

            rank.mover.close = watched  # type: ignore[method-assign]


def bring_to(state: str, traffic: Traffic) -> None:
    """Steps until a rearrangement is in that state between two steps, requests under way."""
    llm = traffic.llm
    if state in HELD:
        for rank in rank_balancers(llm):
            rank.mover._faults = ScriptedFaults({Point.STAGED: HELD[state]})  # type: ignore[attr-defined]
    traffic.until(lambda: llm.eplb_stats()["state"].startswith(state) and llm.engine.num_unfinished == 4)


@pytest.mark.parametrize("state", STATES)
def test_rule_18_movers_rest_before_their_ranks_end_from_every_state(
    checkpoint: Path, expected: list[RequestOutput], state: str
) -> None:
    eplb = {"step_interval": 10**6, "window_size": 100} if state == "IDLE" else {}
    depth = 2 if state == "COMMITTING" else 1
    with balanced(checkpoint, eplb, data_parallel_size=2, async_depth=depth) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        bring_to(state, traffic)
        ends, controller = Ends(llm), llm._controller()
        llm.shutdown()
        assert ends.open == [0, 0] and controller.is_at_rest
        # A commit that was sent is executed whole: ranks and controller have one placement.
        assert {rank.placement.digest() for rank in rank_balancers(llm)} == {controller.placement.digest()}
        if state == "STAGING":
            assert reasons(llm, "aborted")[-1] == "drain"
        llm.shutdown()
        assert len(ends.open) == 2, "the second one does nothing"


def test_rule_18_without_draining_ranks_end_while_movers_work(
    checkpoint: Path, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    with balanced(checkpoint, data_parallel_size=2) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        bring_to("STAGING", traffic)
        ends = Ends(llm)
        monkeypatch.setattr(llm.engine, "_drain", lambda: None)
        llm.shutdown()
        assert all(ends.open) and len(ends.open) == 2


def test_rule_18_a_mover_that_does_not_come_to_rest_is_waited_for_no_longer_than_that(
    checkpoint: Path,
    expected: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_module, "DRAIN_TIMEOUT_S", 0.2)
    with balanced(checkpoint, data_parallel_size=2) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        bring_to("STAGING", traffic)
        for rank in rank_balancers(llm):
            monkeypatch.setattr(rank.mover, "poll", list)  # nobody hears that it rests
        ends = Ends(llm)
        llm.shutdown()
        assert len(ends.open) == 2 and all(ends.open), "the ranks have ended all the same"
    assert "did not come to rest in 0.2 s" in caplog.text


def test_rule_18_a_rank_that_is_held_up_in_its_step_is_waited_for_no_longer_than_that(
    checkpoint: Path, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "DRAIN_TIMEOUT_S", 0.2)
    with balanced(checkpoint, data_parallel_size=2) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        bring_to("STAGING", traffic)
        goes_on = threading.Event()
        rank = rank_balancers(llm)[1]
        execute = rank.execute

        def held_up(commands: Any) -> None:
            goes_on.wait()
            execute(commands)

        monkeypatch.setattr(rank, "execute", held_up)
        close, closed = llm.engine.balancer.close, threading.Event()
        monkeypatch.setattr(llm.engine.balancer, "close", lambda: (closed.set(), goes_on.set(), close()))
        llm.shutdown()  # would not come back if it waited for the step
        assert closed.is_set()
    assert "did not come to rest in 0.2 s" in caplog.text


def test_rule_18_ctrl_c_out_of_a_block_lets_movers_come_to_rest(
    checkpoint: Path, expected: list[RequestOutput]
) -> None:
    ends = None
    with pytest.raises(KeyboardInterrupt), balanced(checkpoint, data_parallel_size=2) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        bring_to("STAGING", traffic)
        ends = Ends(llm)
        os.kill(os.getpid(), signal.SIGINT)
        llm.generate(FEW_PROMPTS, FEW_TOKENS, use_tqdm=False)
    assert ends is not None and ends.open == [0, 0]
    assert reasons(llm, "aborted")[-1] == "drain"


def test_rule_18_an_engine_that_met_a_fault_is_not_asked_to_come_to_rest(
    checkpoint: Path, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    with balanced(checkpoint, data_parallel_size=2) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        bring_to("STAGING", traffic)

        def fail(commands: Any) -> None:
            raise MemoryError("no page left")

        monkeypatch.setattr(rank_balancers(llm)[1], "execute", fail)
        while not traffic.failures:
            traffic.step(may_fail=True)
        monkeypatch.setattr(llm.engine.balancer, "drain", lambda: pytest.fail("nobody can answer"))
        llm.shutdown()


def test_rule_09_warm_up_ends_with_clock_and_window_reset(checkpoint: Path, expected: list[RequestOutput]) -> None:
    """B26: at start, and again between real requests; also one that fails. What it served counts as no load."""
    with balanced(checkpoint, {"window_size": 10**4, "step_interval": 10**4}, data_parallel_size=2) as llm:
        controller = llm._controller()
        with llm.engine.warm_up():
            llm.generate(FEW_PROMPTS, FEW_TOKENS, use_tqdm=False)
        assert controller.trigger.clock == 0 and controller.stats()["steps_to_next"] == 10**4
        assert controller.window.load().num_pairs == 0
        llm.generate(FEW_PROMPTS[:3], FEW_TOKENS, use_tqdm=False)
        clock = controller.trigger.clock
        assert clock > 0
        with pytest.raises(ZeroDivisionError), llm.engine.warm_up():
            llm.generate(FEW_PROMPTS, FEW_TOKENS, use_tqdm=False)
            raise ZeroDivisionError
        assert controller.trigger.clock == clock
        llm.generate(FEW_PROMPTS[3:6], FEW_TOKENS, use_tqdm=False)
        assert controller.trigger.clock > clock
        llm.rearrange_experts()  # closes the bucket
        tokens = sum(len(prompt) + 12 - 1 for prompt in FEW_PROMPTS[:6])
        model = llm._parts.models[0]
        assert controller.window.load().num_pairs == tokens * sum(layer.top_k for layer in model.moe_layers)
