"""Runs the step plans of one rank on a model runner in this process and thread."""

from __future__ import annotations

import weakref

from trimtab.engine.executor.worker import Worker
from trimtab.plan import PendingOutput, PendingStep, StepOutput, StepPlan


class InlineExecutor:
    """An `Executor` without processes: the runner's two calls, one after the other."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        # Also when the executor is collected: a mover's thread would go on for ever.
        self._end = weakref.finalize(self, worker.close)

    def execute(self, plans: list[StepPlan]) -> PendingStep:
        (plan,) = plans  # more ranks would wait for one another in this one thread
        self.worker.runner.execute(plan)
        return _InlineStep(self.worker.runner.sample())

    def check_health(self) -> None:
        """There is no worker beside the caller."""

    def shutdown(self) -> None:
        self._end()


class _InlineStep:
    def __init__(self, pending: PendingOutput) -> None:
        self._pending = pending

    def get(self) -> list[StepOutput]:
        return [self._pending.get()]

    def wait(self, timeout_s: float) -> bool:
        return True  # computed as it was launched
