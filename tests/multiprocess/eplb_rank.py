"""A worker process whose mover does not come back while the file that EPLB_HOLD names is there. Run as a module."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from trimtab.engine.executor.worker import Worker
from trimtab.engine.executor.worker_loop import serve
from trimtab.observability.progress import Progress


class Held:
    """Meets no fault, and waits with what has arrived until it may go on."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def reach(self, point: Any, layer: int, data: Any, aborted: threading.Event) -> None:
        if point.value == "arrived":
            while self._file.exists() and not aborted.wait(0.01):
                pass


def build(rank: int, setup: bytes, progress: Progress) -> Worker:
    from trimtab.ranks import build_in_process

    worker = build_in_process(rank, setup, progress)
    worker.runner.balancer.mover._faults = Held(Path(os.environ["EPLB_HOLD"]))  # type: ignore[attr-defined]
    return worker


if __name__ == "__main__":
    sys.exit(serve(build))
