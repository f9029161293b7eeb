"""Structured events: what happened, with its numbers, kept for programs and said in the log for people."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("trimtab.events")

_LEVELS = {
    "aborted": logging.WARNING,
    "aborting": logging.WARNING,
    "abort_overdue": logging.WARNING,
    "policy_failed": logging.WARNING,
    "committed": logging.DEBUG,
}


class EventLog:
    """Keeps the last `capacity` events. Of an event's values, lists are lines of text and logged as such.

    Called on: the engine's thread.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=capacity)

    def __call__(self, event: str, numbers: Mapping[str, Any]) -> None:
        self._events.append({"event": event, "time_s": time.monotonic(), **numbers})
        level = logging.WARNING if numbers.get("problem") else _LEVELS.get(event, logging.INFO)
        if logger.isEnabledFor(level):
            words = [f"{name} {_text(value)}" for name, value in numbers.items() if not isinstance(value, list)]
            lines = [line for value in numbers.values() if isinstance(value, list) for line in value]
            logger.log(level, "%s", "\n    ".join([f"{event}: {', '.join(words)}", *lines]))

    def recent(self) -> list[dict[str, Any]]:
        """Oldest first; each has "event" and "time_s" (monotonic clock) beside its numbers."""
        return [dict(event) for event in self._events]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
