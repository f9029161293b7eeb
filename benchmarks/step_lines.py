"""What workers write down of their steps, and how a benchmark has it written and reads it.

One JSON line per step in a folder that TRIMTAB_STEP_TIMES names, in a file per rank; ranks' processes run a worker
module of this folder instead of the product's.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_FOLDER_VARIABLE = "TRIMTAB_STEP_TIMES"


@contextmanager
def watched_workers(module: str) -> Iterator[Path]:
    """Workers that are started inside run `module` and write to this folder."""
    from trimtab import ranks

    here, before = str(Path(__file__).resolve().parent), (ranks.WORKER, os.environ.get("PYTHONPATH", ""))
    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        ranks.WORKER = module
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before[1], here]))
        os.environ[_FOLDER_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            ranks.WORKER, os.environ["PYTHONPATH"] = before


def open_lines(rank: int) -> TextIO:
    """A worker's file. Engines of one benchmark that run side by side share it."""
    return (Path(os.environ[_FOLDER_VARIABLE]) / f"rank-{rank}").open("a")


def read_lines(folder: Path, num_ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank's worker wrote since the last call."""
    lines = []
    for rank in range(num_ranks):
        file = folder / f"rank-{rank}"
        lines.append([json.loads(line) for line in file.read_text().splitlines()])
        os.truncate(file, 0)  # opened for appending: the next line begins the file
    return lines


class Stopwatch:
    """Seconds inside the calls that it was wrapped around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds
