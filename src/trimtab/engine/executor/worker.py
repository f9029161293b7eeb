"""What an executor runs per rank, however it runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.plan import Runner


@dataclass(slots=True)
class Worker:
    """A rank's runner, what it measured of itself at its start, and how it lets go of what it holds.

    `abort` makes ranks that wait for this one fail at once: it was ended between two exchanges, where nobody would
    tell them.
    """

    runner: Runner
    facts: dict[str, int] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    abort: Callable[[], None] = lambda: None
