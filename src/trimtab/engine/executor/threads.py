"""Ranks as threads of this process: all of expert parallelism without process start-up, for tests and debugging."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

from trimtab.distributed.errors import RankFailureError
from trimtab.engine.executor.collector import StepCollector, WorkerFailedError
from trimtab.engine.executor.worker import Worker
from trimtab.plan import PendingStep, StepOutput, StepPlan, join_token_groups

_JOIN_S = 3.0

Inbox = queue.SimpleQueue[StepPlan | None]  # None ends the thread


class ThreadsExecutor:
    """An `Executor` whose ranks are threads.

    `build(rank)` runs in the rank's thread; ranks build at the same time and may wait for one another. `abort` is
    called when a rank fails, and makes the others' waits for it raise `RankFailureError`; `release` when all ranks have
    ended.
    """

    def __init__(
        self,
        build: Callable[[int], Worker],
        num_ranks: int,
        *,
        tensor_parallel_size: int = 1,
        abort: Callable[[], None],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.tensor_parallel_size = tensor_parallel_size
        self.collector = StepCollector(num_ranks)
        self._inboxes: list[Inbox] = [queue.SimpleQueue() for _ in range(num_ranks)]
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # A thread that held the executor would keep it from being collected, and so from being shut down.
        threads = [
            threading.Thread(
                target=_run_rank,
                args=(rank, inbox, self.collector, build, abort, ready),
                name=f"trimtab-rank-{rank}",
                daemon=True,  # else the interpreter would wait for it before anyone is asked to end it
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        self._end = weakref.finalize(self, _end, self._inboxes, threads, abort, release)
        for thread in threads:
            thread.start()
        try:
            self._await_ready(ready, num_ranks)
        except BaseException:
            self.shutdown()
            raise

    def execute(self, plans: list[StepPlan]) -> PendingStep:
        self.collector.check()
        for rank, inbox in enumerate(self._inboxes):
            inbox.put(plans[rank // self.tensor_parallel_size])
        return _ThreadsStep(self.collector, plans[0], self.tensor_parallel_size)

    def check_health(self) -> None:
        self.collector.check()

    def shutdown(self) -> None:
        self._end()

    def _await_ready(self, ready: queue.SimpleQueue[BaseException | None], num_ranks: int) -> None:
        failures = [failure for _ in range(num_ranks) if (failure := ready.get()) is not None]
        # Those that gave up because of another rank's failure say less than that rank.
        for failure in sorted(failures, key=lambda failure: getattr(failure, "is_consequence", False)):
            raise failure


class _ThreadsStep:
    def __init__(self, collector: StepCollector, plan: StepPlan, tensor_parallel_size: int) -> None:
        self._collector, self._step_id, self._stride = collector, plan.step_id, tensor_parallel_size
        self._weights_timeout_s = plan.weights_timeout_s

    def get(self) -> list[StepOutput]:
        outputs = self._collector.take(self._step_id, weights_timeout_s=self._weights_timeout_s)
        return join_token_groups(outputs, self._stride)

    def wait(self, timeout_s: float) -> bool:
        return self._collector.wait(self._step_id, timeout_s)


def _run_rank(
    rank: int,
    inbox: Inbox,
    collector: StepCollector,
    build: Callable[[int], Worker],
    abort: Callable[[], None],
    ready: queue.SimpleQueue[BaseException | None],
) -> None:
    """A rank's thread, until its inbox says so or it fails."""
    try:
        worker = build(rank)
    except BaseException as error:
        abort()
        ready.put(ValueError(f"rank {rank}: {error}") if isinstance(error, ValueError) else _fault(rank, error))
        return
    ready.put(None)
    try:
        while (plan := inbox.get()) is not None:
            worker.runner.execute(plan)
            collector.put(rank, worker.runner.sample().get())
    except BaseException as error:
        collector.fail(_fault(rank, error))
        abort()
    finally:
        worker.close()


def _fault(rank: int, error: BaseException) -> WorkerFailedError:
    reason = f"{type(error).__name__}: {error}"
    fault = WorkerFailedError(rank, reason, is_consequence=isinstance(error, RankFailureError))
    fault.__cause__ = error
    return fault


def _end(
    inboxes: list[Inbox], threads: list[threading.Thread], abort: Callable[[], None], release: Callable[[], None]
) -> None:
    """Ends the threads; a step in flight is given up where a rank waits in it for one that has ended."""
    for inbox in inboxes:
        inbox.put(None)
    if not _join(threads):
        abort()
        if not _join(threads):
            return  # one is held up by what `release` would take away; it dies with the process
    release()


def _join(threads: list[threading.Thread]) -> bool:
    """Whether all have ended, after waiting for them for a while."""
    deadline = time.monotonic() + _JOIN_S
    # The collector of garbage may call this from any thread, a rank's included: that one ends afterwards.
    threads = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(deadline - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in threads)
