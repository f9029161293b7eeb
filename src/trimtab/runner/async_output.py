"""A step's result on its way to the host: launched at once, waited for once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trimtab.plan import StepOutput


class Event(Protocol):
    """A point on the device's stream that the host can wait for."""

    def synchronize(self) -> None: ...


class NullEvent:
    """The CPU's: whatever was launched is done."""

    def synchronize(self) -> None:
        pass


def record_event(device: torch.device) -> Event:
    """Marks the present end of the device's stream."""
    if device.type == "cpu":
        return NullEvent()
    event = torch.Event(device)
    event.record()
    return event


class AsyncOutput:
    """1. Made by `sample`, with host copies under way and the event that ends them.
    2. `get()` waits for the event and assembles the `StepOutput`; exactly once, in launch order.

    Holds its tensors until then, so that no buffer is reused under a copy in flight.
    """

    def __init__(self, event: Event, assemble: Callable[[], StepOutput]) -> None:
        self._event = event
        self._assemble: Callable[[], StepOutput] | None = assemble

    def get(self) -> StepOutput:
        assert self._assemble is not None, "a step's output is taken exactly once"
        assemble, self._assemble = self._assemble, None
        self._event.synchronize()
        return assemble()
