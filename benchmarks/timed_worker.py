"""A worker process that writes down where the time of each step went; started by benchmarks/expert_parallel.py.

One line per step: see step_lines.py.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any, TextIO

from step_lines import open_lines

from trimtab.engine.executor.worker import Worker
from trimtab.engine.executor.worker_loop import serve
from trimtab.observability.progress import Progress
from trimtab.plan import PendingOutput, StepOutput, StepPlan


class TimedRunner:
    """The runner itself, and a line per step. One step at a time, as the CPU computes while it launches."""

    def __init__(self, runner: Any, file: TextIO) -> None:
        self._runner = runner
        self._dispatcher = runner.model.moe_layers[0].dispatcher  # one serves all layers
        self._file = file
        self._line: dict[str, Any] = {}
        self._started = self._ended = time.perf_counter()

    def execute(self, plan: StepPlan) -> None:
        self._started = time.perf_counter()
        self._line = {
            "tokens": plan.num_tokens,
            "is_decode": all(row.num_tokens == 1 for row in plan.scheduled),
            "between_s": self._started - self._ended,
        }
        self._runner.execute(plan)

    def sample(self) -> PendingOutput:
        return TimedOutput(self, self._runner.sample())

    def end_step(self) -> None:
        self._ended = time.perf_counter()
        times = self._dispatcher.times.take()
        self._line |= {
            "step_s": self._ended - self._started,
            "experts_s": times.experts_s,
            "exchange_s": times.exchange_s,
            "wait_s": times.wait_s,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(json.dumps(self._line), file=self._file, flush=True)


class TimedOutput:
    def __init__(self, runner: TimedRunner, pending: PendingOutput) -> None:
        self._runner, self._pending = runner, pending

    def get(self) -> StepOutput:
        output = self._pending.get()
        self._runner.end_step()
        return output


def build(rank: int, setup: bytes, progress: Progress) -> Worker:
    from trimtab.ranks import build_in_process

    worker = build_in_process(rank, setup, progress)
    worker.runner = TimedRunner(worker.runner, open_lines(rank))
    return worker


if __name__ == "__main__":
    sys.exit(serve(build))
