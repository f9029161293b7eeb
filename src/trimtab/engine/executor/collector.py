"""Puts the ranks' outputs together to steps, and tells the rank that failed from those that failed with it."""

from __future__ import annotations

import threading
import time

from trimtab.plan import StepOutput

# Ranks that fail because another one did may be the first to say so.
CAUSE_GRACE_S = 1.0


class WorkerFailedError(RuntimeError):
    """A rank met a fault, or its worker ended or fell silent. The message names the rank and the cause."""

    def __init__(self, rank: int, reason: str, *, is_consequence: bool = False) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason
        self.is_consequence = is_consequence


class StepCollector:
    """1. `put` and `fail` as outputs and faults arrive. Called on: any thread.
    2. `take` waits for one step's outputs, in the order of the steps. Called on: the engine's thread.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._changed = threading.Condition()
        self._outputs: dict[int, dict[int, StepOutput]] = {}  # step id -> rank -> output
        self._faults: list[Exception] = []
        self._first_fault_s = 0.0

    def put(self, rank: int, output: StepOutput) -> None:
        with self._changed:
            self._outputs.setdefault(output.step_id, {})[rank] = output
            self._changed.notify_all()

    def fail(self, fault: Exception) -> None:
        with self._changed:
            if not self._faults:
                self._first_fault_s = time.monotonic()
            self._faults.append(fault)
            self._changed.notify_all()

    def wait(self, step_id: int, timeout_s: float) -> bool:
        """Waits no longer than that -> whether `take` would return, or raise a fault whose cause is known, at once."""

        def is_there() -> bool:
            return len(self._outputs.get(step_id, ())) == self.num_ranks or bool(self._faults)

        with self._changed:
            return self._changed.wait_for(is_there, max(timeout_s, 0.0))

    def take(
        self, step_id: int, timeout_s: float | None = None, *, weights_timeout_s: float | None = None
    ) -> list[StepOutput]:
        """All ranks' outputs, indexed by rank. Raises the fault of the rank that failed, or `WorkerFailedError` for one
        that has not answered after `timeout_s`, or `weights_timeout_s` in its place where new weights are read."""
        remedy = ""
        if weights_timeout_s is not None:
            timeout_s = weights_timeout_s
            remedy = "; it was reading new weights: give update_weights a larger timeout_s if that takes longer here"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while len(self._outputs.get(step_id, ())) < self.num_ranks:
                self.check()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._late(step_id, timeout_s, remedy)
                if self._faults:
                    left = CAUSE_GRACE_S / 20
                self._changed.wait(left)
            outputs = self._outputs.pop(step_id)
            return [outputs[rank] for rank in range(self.num_ranks)]

    @property
    def has_failed(self) -> bool:
        with self._changed:
            return bool(self._faults)

    @property
    def knows_cause(self) -> bool:
        """Whether a fault is known that is not the consequence of another rank's."""
        with self._changed:
            return any(not getattr(fault, "is_consequence", False) for fault in self._faults)

    def check(self) -> None:
        """Raises the fault that is known so far, if one is."""
        with self._changed:
            for fault in self._faults:
                if not getattr(fault, "is_consequence", False):
                    raise fault
            if self._faults and time.monotonic() - self._first_fault_s > CAUSE_GRACE_S:
                raise self._faults[0]

    def _late(self, step_id: int, timeout_s: float | None, remedy: str) -> WorkerFailedError:
        answered = self._outputs.get(step_id, {})
        silent = [rank for rank in range(self.num_ranks) if rank not in answered]
        others = f"; so did not ranks {silent[1:]}" if silent[1:] else ""
        return WorkerFailedError(silent[0], f"did not answer step {step_id} within {timeout_s:g} s{others}{remedy}")
