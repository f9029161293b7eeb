"""A worker process that writes down what balancing took of each step; started by benchmarks/eplb.py.

One line per step with a forward (see step_lines.py); a commit has a line of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any, TextIO

from step_lines import Stopwatch, open_lines

from trimtab.engine.executor.worker import Worker
from trimtab.engine.executor.worker_loop import serve
from trimtab.observability.progress import Progress
from trimtab.plan import StepPlan


class WatchedRunner:
    """The runner itself; `balancing` is what it does for balancing in a step, look-ups included, commits not."""

    def __init__(self, runner: Any, file: TextIO) -> None:
        self._runner, self._file = runner, file
        self._look_ups, self._balancing, self._commits = Stopwatch(), Stopwatch(), Stopwatch()
        self._times = runner.model.moe_layers[0].dispatcher.times
        self._experts_s = self._wait_s = 0.0
        self._started = 0.0
        for layer in runner.model.moe_layers:
            layer.look_up = self._look_ups.around(layer.look_up)
        balancer = runner.balancer
        for name in ("execute", "begin_forward", "end_step"):
            setattr(balancer, name, self._balancing.around(getattr(balancer, name)))
        if hasattr(balancer, "_commit"):
            balancer._commit = self._commits.around(balancer._commit)

    def execute(self, plan: StepPlan) -> None:
        self._started = time.perf_counter()
        self._experts_s, self._wait_s = self._times.experts_s, self._times.wait_s
        self._runs_forward = plan.runs_forward
        self._num_tokens = plan.num_tokens
        self._runner.execute(plan)

    def sample(self) -> Any:
        pending = self._runner.sample()
        look_up_s, balancing_s, commit_s = self._look_ups.take(), self._balancing.take(), self._commits.take()
        if commit_s:
            self._write({"commit_s": commit_s})
        if self._runs_forward:
            self._write(
                {
                    "step_s": time.perf_counter() - self._started,
                    "tokens": self._num_tokens,
                    "look_up_s": look_up_s,
                    "balancing_s": balancing_s - commit_s,
                    "experts_s": self._times.experts_s - self._experts_s,
                    "wait_s": self._times.wait_s - self._wait_s,
                }
            )
        return pending

    def _write(self, line: dict[str, float]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


def build(rank: int, setup: bytes, progress: Progress) -> Worker:
    from trimtab.ranks import build_in_process

    worker = build_in_process(rank, setup, progress)
    ctypes.CDLL(None).malloc_trim(0)  # what loading has freed, the allocator keeps: tens of MiB, now more, now less
    worker.runner = WatchedRunner(worker.runner, open_lines(rank))
    return worker


if __name__ == "__main__":
    sys.exit(serve(build))
