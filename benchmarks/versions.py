"""This checkout's engine and another one's on one checkpoint, as two processes that take turns; ratios of medians.

    git worktree add ../before COMMIT
    python benchmarks/versions.py MODEL_DIR --before ../before [--batches 8,32] [--prefills 1,4] [--reps 3]

Both sides run in the same environment, so the other checkout must know the libraries of this one; where it lacks a
native core of its own, build one there first or see what it does without. The side that waits sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from side_by_side import Run, add_options, compare, trimtab_run

HERE = Path(__file__).resolve()


def serve(model: Path, dtype: str) -> None:
    """Answers each line of prompts with the seconds they took."""
    run = trimtab_run(model, dtype)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"seconds": run(request["prompts"], request["new_tokens"])}), flush=True)


def start(checkout: Path, args: argparse.Namespace) -> tuple[subprocess.Popen[str], Run]:
    process = subprocess.Popen(
        [sys.executable, str(HERE), str(args.model), "--serve", "--threads", str(args.threads), "--dtype", args.dtype],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    requests, answers = process.stdin, process.stdout
    assert requests is not None and answers is not None

    def run(prompts: list[list[int]], new_tokens: int) -> float:
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=requests, flush=True)
        answer = answers.readline()
        if not answer:
            raise SystemExit(f"the engine of {checkout} has ended with {process.wait()}; see its error above")
        return float(json.loads(answer)["seconds"])

    return process, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        torch.set_num_threads(args.threads)
        serve(args.model, args.dtype)
        return
    if args.before is None or not (args.before / "src" / "trimtab").is_dir():
        parser.error(f"--before ({args.before}) must be a checkout with src/trimtab")
    processes, sides = {}, {}
    try:
        for side, checkout in {"now": HERE.parents[1], "before": args.before.resolve()}.items():
            processes[side], sides[side] = start(checkout, args)
        compare(sides, args)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
