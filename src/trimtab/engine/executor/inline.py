"""Runs the step plans on a model runner in this process."""

from __future__ import annotations

from typing import Protocol

from trimtab.plan import PendingStep, StepPlan


class Runner(Protocol):
    """What the executor asks of a model runner: launch a step, then launch its sampling."""

    def execute(self, plan: StepPlan) -> None: ...

    def sample(self) -> PendingStep: ...


class InlineExecutor:
    """An `Executor` without processes: the runner's two calls, one after the other."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def execute(self, plan: StepPlan) -> PendingStep:
        self.runner.execute(plan)
        return self.runner.sample()

    def shutdown(self) -> None:
        """Nothing was started, so nothing is to end."""
