"""Many schedules of the balancing protocol: `python tests/simulation/run_schedules.py --schedules 1000000 --seed 0`.

A seed that fails is printed with the command that replays it alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from simulated_engine import run_schedule
from simulated_rank import ViolationError

_CHUNK = 500


def run_many(seeds: range) -> tuple[Counter[str], list[str]]:
    """What came about over all seeds, and the violations."""
    coverage: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        try:
            coverage += run_schedule(seed)
        except ViolationError as violation:
            violations.append(f"{violation}\n  replay: {replay_command(seed)}")
    return coverage, violations


def replay_command(seed: int) -> str:
    return f"python tests/simulation/run_schedules.py --schedules 1 --seed {seed}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulates schedules of the balancing protocol and checks its rules.")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others count up")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.schedules == 1:
        print(dict(run_schedule(arguments.seed)))
        return 0
    end = arguments.seed + arguments.schedules
    chunks = [range(start, min(start + _CHUNK, end)) for start in range(arguments.seed, end, _CHUNK)]
    started, coverage, num_violations, num_run = time.monotonic(), Counter[str](), 0, 0
    with ProcessPoolExecutor(arguments.processes) as pool:
        for chunk, (found, violations) in zip(chunks, pool.map(run_many, chunks), strict=True):
            coverage += found
            num_run += len(chunk)
            num_violations += len(violations)
            for violation in violations:
                print(violation, flush=True)
            if num_run % (20 * _CHUNK) == 0:
                print(f"{num_run} schedules, {num_violations} violations", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    print(f"{num_run} schedules in {seconds:.0f} s, {num_violations} violations")
    print(", ".join(f"{what} {count}" for what, count in sorted(coverage.items())))
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
