"""The executor in this process: the runner's two calls, in order."""

from __future__ import annotations

from trimtab.engine.executor.inline import InlineExecutor
from trimtab.engine.executor.worker import Worker
from trimtab.plan import StepOutput, StepPlan


class RecordingRunner:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def execute(self, plan: StepPlan) -> None:
        self.calls.append(f"execute {plan.step_id}")

    def sample(self) -> RecordingRunner:
        self.calls.append("sample")
        return self

    def get(self) -> StepOutput:
        self.calls.append("get")
        return StepOutput(4)


def test_step_is_launched_and_sampled_before_its_output_is_asked_for() -> None:
    runner = RecordingRunner()
    executor = InlineExecutor(Worker(runner, close=lambda: runner.calls.append("close")))
    pending = executor.execute([StepPlan(4)])
    assert runner.calls == ["execute 4", "sample"]
    assert [output.step_id for output in pending.get()] == [4]
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    assert runner.calls[-2:] == ["get", "close"]
