"""A step's output on its way to the host."""

import pytest

from trimtab.plan import StepOutput
from trimtab.runner.async_output import AsyncOutput


class LoggedEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("waited")


def test_the_event_is_waited_for_before_the_output_is_read() -> None:
    log: list[str] = []
    output = AsyncOutput(LoggedEvent(log), lambda: log.append("read") or StepOutput(3))
    assert log == []
    assert output.get().step_id == 3
    assert log == ["waited", "read"]


def test_an_output_is_taken_exactly_once() -> None:
    output = AsyncOutput(LoggedEvent([]), lambda: StepOutput(0))
    output.get()
    with pytest.raises(AssertionError, match="exactly once"):
        output.get()
