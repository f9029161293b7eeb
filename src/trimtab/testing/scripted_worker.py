"""A worker process around the scripted runner: executors are tested without a network, and with faults on order.

Its setup: one of the faults by name and step or reason, and `abort_file`, written when the worker tells the ranks that
wait for it. Run as a module.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.distributed.errors import RankFailureError
from trimtab.engine.executor.codec import decode_setup, encode_setup
from trimtab.engine.executor.worker import Worker
from trimtab.engine.executor.worker_loop import serve
from trimtab.plan import StepPlan
from trimtab.testing.scheduling import make_kv_cache
from trimtab.testing.scripted_executor import ScriptedRunner

# What a worker can be told to do wrong: when it starts (a reason), or at a step.
FAULTS = (
    "refuse_start",
    "break_start",
    "die_at_start",
    "raise_at_step",
    "die_at_step",
    "hang_at_step",
    "stop_at_step",
    "give_up_at_step",
    "raise_late_at_step",
)


class FaultyRunner(ScriptedRunner):
    """Meets the fault it was ordered at its step: hangs, ends its process, or stops it as SIGSTOP does."""

    def __init__(self, faults: dict[str, Any], **options: Any) -> None:
        super().__init__(raise_at_step=faults.get("raise_at_step"), **options)
        self.faults = faults

    def execute(self, plan: StepPlan) -> None:
        if plan.step_id == self.faults.get("die_at_step"):
            os._exit(3)
        if plan.step_id == self.faults.get("hang_at_step"):
            threading.Event().wait()
        if plan.step_id == self.faults.get("stop_at_step"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if plan.step_id == self.faults.get("give_up_at_step"):
            raise RankFailureError("another rank did not come")
        if plan.step_id == self.faults.get("raise_late_at_step"):
            threading.Event().wait(0.3)
            raise RuntimeError("the cause, heard late")
        super().execute(plan)


def build_runner(faults: dict[str, Any]) -> FaultyRunner:
    """Raises what `faults` orders for the start."""
    if "refuse_start" in faults:
        raise ValueError(faults["refuse_start"])
    if "break_start" in faults:
        raise RuntimeError(faults["break_start"])
    if "die_at_start" in faults:
        os._exit(4)
    return FaultyRunner(faults, kv_cache=make_kv_cache(), vocab_size=97)


def make_setup(**faults: Any) -> bytes:
    assert set(faults) <= {*FAULTS, "abort_file"}, f"faults are {FAULTS}"
    return encode_setup(faults)


def build(rank: int, setup: bytes, report: Callable[[str, int, int], None]) -> Worker:
    report("load", rank, 1)
    faults = decode_setup(setup)
    abort = Path(faults["abort_file"]).touch if "abort_file" in faults else lambda: None
    return Worker(build_runner(faults), {"rank": rank}, abort=abort)


if __name__ == "__main__":
    sys.exit(serve(build))
