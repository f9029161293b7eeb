"""The program of a worker process: one rank of an engine. Started by the controller, never by hand."""

from __future__ import annotations

import sys

from trimtab.engine.executor.worker import Worker
from trimtab.engine.executor.worker_loop import serve
from trimtab.observability.progress import Progress


def build(rank: int, setup: bytes, progress: Progress) -> Worker:
    # Imported when heart and lifeline are at work: torch takes seconds, and the controller may end meanwhile.
    from trimtab.ranks import build_in_process

    return build_in_process(rank, setup, progress)


def main() -> int:
    return serve(build)


if __name__ == "__main__":
    sys.exit(main())
