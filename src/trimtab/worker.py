"""The program of a worker process: one rank of an engine. Started by the controller, never by hand."""

from __future__ import annotations

import sys

from trimtab.engine.executor.worker_loop import serve
from trimtab.ranks import build_in_process


def main() -> int:
    return serve(build_in_process)


if __name__ == "__main__":
    sys.exit(main())
