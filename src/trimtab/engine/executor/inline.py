"""Runs the step plans of one rank on a model runner in this process and thread."""

from __future__ import annotations

from trimtab.plan import PendingOutput, PendingStep, Runner, StepOutput, StepPlan


class InlineExecutor:
    """An `Executor` without processes: the runner's two calls, one after the other."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def execute(self, plans: list[StepPlan]) -> PendingStep:
        (plan,) = plans  # more ranks would wait for one another in this one thread
        self.runner.execute(plan)
        return _InlineStep(self.runner.sample())

    def check_health(self) -> None:
        """There is no worker beside the caller."""

    def shutdown(self) -> None:
        """Nothing was started, so nothing is to end."""


class _InlineStep:
    def __init__(self, pending: PendingOutput) -> None:
        self._pending = pending

    def get(self) -> list[StepOutput]:
        return [self._pending.get()]
