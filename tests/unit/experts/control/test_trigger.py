"""When decisions are due."""

from __future__ import annotations

from trimtab.experts.control.trigger import Trigger


def run(trigger: Trigger, num_steps: int) -> list[int]:
    """The clock's steps at which a decision was due and made."""
    due = []
    for _ in range(num_steps):
        if trigger.is_due:
            due.append(trigger.clock)
            trigger.restart()
        trigger.count_step()
    return due


def test_a_decision_is_due_every_interval() -> None:
    assert run(Trigger(step_interval=5, window_size=3), 17) == [5, 10, 15]


def test_a_deferred_decision_is_due_until_it_is_made_and_the_next_counts_from_then() -> None:
    """Rule 12."""
    trigger = Trigger(step_interval=5, window_size=3)
    for _ in range(8):
        trigger.count_step()
        assert trigger.steps_to_next >= 0
    assert trigger.is_due and trigger.steps_to_next == 0
    assert trigger.restart() is False
    assert not trigger.is_due and trigger.steps_to_next == 5


def test_a_request_is_due_at_once() -> None:
    trigger = Trigger(step_interval=5, window_size=3)
    trigger.count_step()
    trigger.request()
    assert trigger.is_due
    assert trigger.restart() is True and not trigger.is_due and trigger.steps_to_next == 5


def test_windows_begin_their_length_before_a_decision() -> None:
    assert _cuts(Trigger(step_interval=5, window_size=3), 11) == [2, 7]
    assert _cuts(Trigger(step_interval=5, window_size=5), 11) == [0, 5, 10]
    assert _cuts(Trigger(step_interval=5, window_size=8), 11) == [2, 7]  # 5 - 8 and 10 - 8, 15 - 8: modulo 5


def _cuts(trigger: Trigger, num_steps: int) -> list[int]:
    cuts = []
    for _ in range(num_steps):
        if trigger.is_due:
            trigger.restart()
        if trigger.is_cut:
            cuts.append(trigger.clock)
        trigger.count_step()
    return cuts
