"""New weights while serving: check, halt, write; and what each failure leaves behind."""

from __future__ import annotations

from trimtab.experts.control.refit import (
    Checking,
    Halting,
    NoRefit,
    RefitResult,
    RefitState,
    Writing,
    advance_refit,
)
from trimtab.experts.control.refit_only import RefitOnly
from trimtab.experts.control.transaction import NextStep, StepDone, Tick
from trimtab.experts.ports import CheckWeights, Command, Refit, Refitted, Report, WeightsChecked

START = Checking("/new", 5, step_timeout_s=60.0, timeout_s=10.0)
NUM_RANKS = 2


def on(
    state: RefitState, event: NextStep | StepDone | Tick, *, is_at_rest: bool = True
) -> tuple[RefitState, list[Command]]:
    return advance_refit(state, event, num_ranks=NUM_RANKS, is_at_rest=is_at_rest)


def done(state: RefitState, *reports: Report, step: int = 1) -> RefitState:
    after, commands = on(state, StepDone(step, reports))
    assert commands == []
    return after


def test_files_are_checked_then_the_transaction_rests_then_all_ranks_write_in_one_step() -> None:
    """B23: an update and a transfer never interleave."""
    state, commands = on(START, NextStep(1))
    assert commands == [CheckWeights("/new", 5, 60.0)]
    assert on(state, NextStep(2)) == (state, [])
    state = done(state, WeightsChecked(0, 5, ""))
    assert isinstance(state, Checking)
    state = done(state, WeightsChecked(1, 5, ""))
    state, commands = on(state, NextStep(3), is_at_rest=False)
    assert isinstance(state, Halting) and commands == []
    state, commands = on(state, NextStep(4))
    assert commands == [Refit("/new", 5, 60.0)] and state == Writing(5, 4)
    answers = (Refitted(0, 5, ""), Refitted(1, 5, ""))
    assert done(state, *answers, step=3) == state
    assert done(state, *answers, step=4) == NoRefit(RefitResult(5))


def test_files_that_a_rank_cannot_load_harm_nothing() -> None:
    state, _ = on(START, NextStep(1))
    after = done(state, WeightsChecked(0, 5, ""), WeightsChecked(1, 5, "lm_head.weight has another shape"))
    assert after == NoRefit(RefitResult(5, "rank 1: lm_head.weight has another shape"))


def test_a_failure_after_the_first_byte_leaves_mixed_weights() -> None:
    state = Writing(5, 4)
    assert done(state, Refitted(0, 5, ""), Refitted(1, 5, "read error"), step=4) == NoRefit(
        RefitResult(5, "rank 1: read error", is_harmed=True)
    )
    silent = done(state, Refitted(0, 5, ""), step=4)
    assert silent == NoRefit(RefitResult(5, "rank 1: did not say whether it has the new weights", is_harmed=True))


def test_answers_of_another_version_are_dropped() -> None:
    state, _ = on(START, NextStep(1))
    assert done(state, WeightsChecked(0, 4, "bad"), WeightsChecked(1, 4, "")) == state


def test_waiting_for_answers_or_for_rest_is_bounded() -> None:
    for state, what in ((START, "checked the files"), (Halting("/new", 5, 60.0, 10.0), "come to rest")):
        sent, _ = on(state, NextStep(1), is_at_rest=False)
        waiting, _ = on(sent, Tick(9.0))
        waiting, _ = on(waiting, Tick(0.4, is_idle=True))  # the pause between plans of commands alone
        assert not isinstance(waiting, NoRefit)
        after, _ = on(waiting, Tick(0.7))
        assert isinstance(after, NoRefit) and after.result is not None
        assert what in after.result.problem and not after.result.is_harmed


def test_the_time_that_the_check_of_large_files_took_refuses_nothing() -> None:
    """Its step's output comes first, then the time of that step: the wait that follows begins anew."""
    sent, _ = on(START, NextStep(1))
    halting, _ = on(done(sent, WeightsChecked(0, 5, ""), WeightsChecked(1, 5, "")), Tick(100.0))
    assert on(halting, NextStep(2)) == (Writing(5, 2), [Refit("/new", 5, 60.0)])


def test_an_engine_that_was_idle_for_long_is_not_late_at_once() -> None:
    state, _ = on(START, Tick(3600.0))
    assert isinstance(state, Checking) and on(state, NextStep(1))[1] == [CheckWeights("/new", 5, 60.0)]


def test_what_mixed_the_weights_is_told_until_a_refit_succeeds() -> None:
    """Without balancing too: files that are refused afterwards are another matter."""
    made = RefitOnly(1, 10.0)

    def run(*answers: Report) -> str:
        made.request_refit("/new", 1, 60.0)
        for answer in answers:
            made.commands(runs_forward=False, now=0.0)
            made.on_reports([answer], 0.0)
        return made.unhealthy_reason

    checked = WeightsChecked(0, 1, "")
    assert run(checked, Refitted(0, 1, "disk gone")) == "rank 0: disk gone"
    assert run(WeightsChecked(0, 1, "no such file")) == "rank 0: disk gone" and made.holds_requests
    assert run(checked, Refitted(0, 1, "")) == "" and not made.holds_requests
