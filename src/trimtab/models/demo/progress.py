"""Progress of the demo build: the caller's own callback, else a bar on a terminal, else silence."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BuildProgress = Callable[[str, int, int], None]  # called as progress(stage, done, total)


@contextmanager
def progress_bar(progress: BuildProgress | None) -> Iterator[BuildProgress]:
    """What to report progress to for the length of the block."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("demo model: {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
