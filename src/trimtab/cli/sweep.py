"""`trimtab sweep`: every architecture of the installed transformers, tried with a tiny random checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.observability.progress import progress_bar

if TYPE_CHECKING:
    from trimtab.models.sweep import SweepRow


def sweep(*model_types: str, markdown: Path | None = None) -> int:
    """Try every architecture of the installed transformers that has experts, and say which run and why others do not.

    Each gets a tiny random checkpoint in a process of its own, and must give transformers' own float32 logits on a
    packed, chunked batch. Takes a few minutes.

    Exit code: 0 when each one works or is refused by name, 1 when one gave other logits or broke.

    Parameters
    ----------
    model_types
        Only these, as in "mixtral"; all when none is given.
    markdown
        Write the table of the documentation to this file.
    """
    from trimtab.models.sweep import run_sweep, sweep_names, to_markdown

    if model_types and (unknown := set(model_types) - set(sweep_names())):
        known = ", ".join(sweep_names())
        raise ValueError(f"model type ({sorted(unknown)[0]}) has no experts plug point; there are {known}")
    with progress_bar("sweep") as progress:

        def show(done: int, total: int, row: SweepRow) -> None:
            print(f"{row.model_type}: {row.status} {row.reason}".rstrip(), flush=True)
            progress(row.model_type, done, total)

        rows = run_sweep(model_types or None, show)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(to_markdown(rows), encoding="utf-8")
        print(f"table: {markdown}")
    counts = Counter(row.status for row in rows)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    return 1 if counts["differs"] or counts["broken"] else 0
