"""Ranks as processes of this machine: plans go out and outputs come back over sockets in a private folder."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from trimtab.engine.executor.codec import Step, encode
from trimtab.engine.executor.worker_processes import WorkerProcesses
from trimtab.observability.interrupts import hold_interrupts
from trimtab.observability.progress import no_progress
from trimtab.plan import PendingStep, StepOutput, StepPlan, join_token_groups

# A worker that is killed, stopped or silent fails all requests within 5 s: this much silence, and time to clear up.
MAX_SILENCE_S = 3.5
# Longer than any step: a worker whose heart beats while its step does not end is stuck.
MAX_STEP_S = 600.0


class MultiprocessExecutor:
    """An `Executor` whose ranks are processes, each running the module `entry` (see `worker_loop.serve`).

    `folder` is a `private_folder` to meet in, which goes with the workers.
    `setups` holds one rank's setup each; `environment` is added to the workers' own. Raises the reason of a rank that
    does not start: `ValueError` for a person's mistake, else `WorkerFailedError`. Nothing is left behind then.
    """

    def __init__(
        self,
        entry: str,
        setups: Sequence[bytes],
        *,
        tensor_parallel_size: int = 1,
        environment: Mapping[str, str] | None = None,
        max_silence_s: float = MAX_SILENCE_S,
        max_step_s: float = MAX_STEP_S,
        progress: Callable[[str, int, int], None] = no_progress,
        folder: str | None = None,
    ) -> None:
        self.tensor_parallel_size = tensor_parallel_size
        self.max_step_s = max_step_s
        self.workers = WorkerProcesses(
            entry,
            setups,
            environment=environment or {},
            max_silence_s=max_silence_s,
            progress=progress,
            folder=folder,
        )
        # Also ends them when the executor is collected, or at the interpreter's end.
        self._end = weakref.finalize(self, self.workers.shutdown)
        try:
            self.workers.await_ready()
        except BaseException:
            self.shutdown()
            raise

    def facts(self) -> list[dict[str, int]]:
        """What each rank measured of itself at its start."""
        return [self.workers.facts[rank] for rank in range(self.workers.num_ranks)]

    def execute(self, plans: list[StepPlan]) -> PendingStep:
        self.check_health()
        for index, plan in enumerate(plans):
            message = encode(Step(plan))
            for rank in range(index * self.tensor_parallel_size, (index + 1) * self.tensor_parallel_size):
                self.workers.send(rank, message)
        return _MultiprocessStep(self, plans[0])

    def check_health(self) -> None:
        self.workers.collector.check()

    def shutdown(self) -> None:
        with hold_interrupts():  # an end cut short could not be taken up again
            self._end()


class _MultiprocessStep:
    def __init__(self, executor: MultiprocessExecutor, plan: StepPlan) -> None:
        self._executor, self._step_id = executor, plan.step_id
        self._weights_timeout_s = plan.weights_timeout_s

    def get(self) -> list[StepOutput]:
        executor = self._executor
        try:
            outputs = executor.workers.collector.take(
                self._step_id, executor.max_step_s, weights_timeout_s=self._weights_timeout_s
            )
        except Exception as fault:
            executor.workers.collector.fail(fault)  # a deadline: the watching thread does not know of it
            executor.shutdown()
            raise
        return join_token_groups(outputs, executor.tensor_parallel_size)

    def wait(self, timeout_s: float) -> bool:
        return self._executor.workers.collector.wait(self._step_id, timeout_s)
