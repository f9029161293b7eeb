"""A progress bar for long work: drawn on stderr when that is a terminal, nothing otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What long work reports: (stage, done, total). Called on: the thread that works.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nothing: the null object."""


def stderr_is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(title: str, *, shown: bool | None = None) -> Iterator[Progress]:
    """Gives a `Progress` that draws one bar and is cleared away at the end.

    `shown=None` shows it when stderr is a terminal, so that logs and pipes stay clean.
    """
    if not (stderr_is_terminal() if shown is None else shown):
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    detail = TextColumn("[dim]{task.fields[stage]}")
    with Bars(*columns, detail, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None, stage="")

        def report(stage: str, done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, stage=stage)

        yield report
