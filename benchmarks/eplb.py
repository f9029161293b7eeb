"""What expert balancing costs and what it brings, each goal measured by itself; both sides take turns in one run.

    python benchmarks/eplb.py share|quiet|moving|memory|gain [--model demo]
    python benchmarks/eplb.py skewed --model MODEL_DIR       # a Qwen3-MoE checkpoint in one safetensors file

share: look-up, record and reports as part of a step. quiet: on against off while nothing moves. moving: steps during
rearrangements that never end against steps of the same engine at rest. memory: what it takes beside the formula. gain:
natural placement against a balanced one, one domain at a time. skewed: the same with a router that prefers rank 0's
experts. Two ranks of one thread each, bfloat16. Only ratios count, and only on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from step_lines import Stopwatch, read_lines, watched_workers

from trimtab import LLM, SamplingParams
from trimtab.cli.bench import machine, percentile, random_prompts
from trimtab.cli.bench_eplb import make_traffic, predicted_ratio, run_rounds, serve
from trimtab.testing.skewed_router import write_skewed_checkpoint

NUM_RANKS = 2
NEVER = 2**30  # steps
QUIET = {"window_size": 100, "step_interval": 100, "min_gain": 1.0}  # decides, and never finds it worth the moves
AT_REST = {"window_size": 100, "step_interval": NEVER}
MOVING = {"window_size": 1, "step_interval": 1, "min_gain": 0, "policy": "eplb_policies:QuarterPolicy"}
Report = dict[str, Any]


# -- engines and their steps -------------------------------------------------------------------------------------------


@contextmanager
def engines(model: str, *sides: dict[str, Any] | None, **options: Any) -> Iterator[list[LLM]]:
    """One engine per side: its eplb_config, or None where balancing is off."""
    opened: list[LLM] = []
    defaults: dict[str, Any] = {
        "data_parallel_size": NUM_RANKS, "enable_expert_parallel": True, "distributed_executor_backend": "mp",
        "enable_prefix_caching": False, "max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory_bytes": "256MiB",
    }  # fmt: skip
    try:
        for eplb in sides:
            balancing = {} if eplb is None else {"enable_eplb": True, "eplb_config": eplb}
            opened.append(LLM(model, progress=False, **{**defaults, **options}, **balancing))
        yield opened
    finally:
        for llm in opened:
            llm.shutdown()


def decode_steps(llm: LLM, prompts: list[list[int]], new_tokens: int, on_step: Callable[[], None]) -> list[float]:
    """Seconds of the steps that give every prompt a token; `on_step` is called after each step, untimed."""
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, sampling)
    seconds = []
    while llm.engine.has_unfinished:
        start = time.perf_counter()
        outputs = llm.engine.step()
        taken = time.perf_counter() - start
        assert not any(output.error for output in outputs), outputs[0].error
        if len(outputs) == len(prompts) and len(outputs[0].outputs[0].token_ids) > 1:
            seconds.append(taken)
        on_step()
    return seconds


def prompts_of(llm: LLM, rng: random.Random, count: int, length: int) -> list[list[int]]:
    return random_prompts(rng, count, length, min(llm.vocab_size, 8000))


# -- cost --------------------------------------------------------------------------------------------------------------


def measure_share(options: argparse.Namespace) -> Report:
    report: Report = {}
    rng = random.Random(0)
    with watched_workers("eplb_worker") as folder, engines(options.model, QUIET) as (llm,):
        controller = Stopwatch()  # the controller runs between the steps
        for name in ("commands", "on_reports"):
            setattr(llm.engine.balancer, name, controller.around(getattr(llm.engine.balancer, name)))
        for batch, goal in ((32, 0.01), (1, 0.03)):
            decode_steps(llm, prompts_of(llm, rng, batch, 32), 16, lambda: None)
            read_lines(folder, NUM_RANKS)
            controller.take()
            steps = decode_steps(llm, prompts_of(llm, rng, batch, 32), options.steps, lambda: None)
            by_rank = [[line for line in lines if "step_s" in line] for lines in read_lines(folder, NUM_RANKS)]
            report[f"batch {batch}"] = {"goal": goal, **share_of_steps(by_rank, controller.take(), steps)}
    return report


def share_of_steps(
    by_rank: Sequence[Sequence[dict[str, float]]], controller_s: float, steps: Sequence[float]
) -> dict[str, float]:
    """Of the mean step: the busier rank's look-ups, its other work for balancing, the controller's.

    A rank's lines are of prefill steps too; they do the same work for balancing.
    """
    step_s = statistics.fmean(steps)
    look_up_s, balancing_s = max(
        (
            [statistics.fmean(line[part] for line in lines) for part in ("look_up_s", "balancing_s")]
            for lines in by_rank
        ),
        key=sum,
    )
    controller_s /= len(by_rank[0])
    share = (look_up_s + balancing_s + controller_s) / step_s
    return {
        "share": share, "step_ms": 1e3 * step_s, "look_up_us": 1e6 * look_up_s, "fold_and_report_us": 1e6 * balancing_s,
        "controller_us": 1e6 * controller_s, "num_steps": len(steps),
    }  # fmt: skip


def measure_quiet(options: argparse.Namespace) -> Report:
    report: Report = {}
    rng = random.Random(0)
    with engines(options.model, None, QUIET) as (off, on):
        for batch in (32, 1):
            seconds: dict[str, list[float]] = {"off": [], "on": []}
            ratios = []
            for repetition in range(options.reps + 1):
                prompts = prompts_of(off, rng, batch, 32)
                pair = (("off", off), ("on", on)) if repetition % 2 else (("on", on), ("off", off))
                steps = {side: decode_steps(llm, prompts, options.steps, lambda: None) for side, llm in pair}
                if repetition:  # the first one warms up
                    ratios.append(statistics.median(steps["off"]) / statistics.median(steps["on"]))
                    for side, found in steps.items():
                        seconds[side] += found
            rates = {side: batch / statistics.median(found) for side, found in seconds.items()}
            report[f"batch {batch}"] = {"goal": 0.97, "tokens_per_s": rates, "ratio": statistics.median(ratios)}
        assert on.eplb_stats()["moves"] == 0, "nothing may move here"
        report["decisions"] = on.eplb_stats()["rearrangements"]["declined"]
    return report


class TransactionSteps:
    """How many steps each rearrangement took, and what part of all slots it moved."""

    def __init__(self, controller: Any) -> None:
        self.step = 0
        self.lengths: list[int] = []
        self.shares: list[float] = []
        self._began = 0
        self._num_slots = controller.placement.slot_to_expert.size
        self._observer, controller.observer = controller.observer, self._observe

    def count(self) -> None:
        self.step += 1

    def _observe(self, event: str, numbers: Any) -> None:
        if event == "began":
            self._began = self.step
            self.shares.append(numbers["num_moves"] / self._num_slots)
        elif event == "done":
            self.lengths.append(self.step - self._began)
        self._observer(event, numbers)


def measure_moving(options: argparse.Namespace) -> Report:
    rng = random.Random(0)
    redundant = {"num_redundant_experts": options.redundant}
    steps: dict[str, list[float]] = {"rest": [], "moving": []}
    with (
        watched_workers("eplb_worker") as folder,
        engines(options.model, {**AT_REST, **redundant}, {**MOVING, **redundant}) as sides,
    ):
        rest, moving = sides
        counted = TransactionSteps(moving.engine.balancer)
        for llm in sides:
            decode_steps(llm, prompts_of(llm, rng, options.batch, 16), 16, counted.count if llm is moving else _nothing)
        while len(steps["moving"]) < options.steps:
            prompts = prompts_of(rest, rng, options.batch, 16)
            steps["rest"] += decode_steps(rest, prompts, options.block, _nothing)
            steps["moving"] += decode_steps(moving, prompts, options.block, counted.count)
            show(f"{len(steps['moving'])} of {options.steps} steps")
        stats = moving.eplb_stats()
        num_layers = moving.engine.balancer.placement.num_layers  # type: ignore[attr-defined]
        commits = [
            1e3 * line["commit_s"] for lines in read_lines(folder, NUM_RANKS) for line in lines if "commit_s" in line
        ]
    return {
        **compare_steps(steps["rest"], steps["moving"]),
        "rearrangements": stats["rearrangements"],
        "moved_share": {"value": statistics.fmean(counted.shares), "goal": "at least 0.25"},
        "steps_per_rearrangement": {"value": statistics.median(counted.lengths), "goal": f"at most {10 * num_layers}"},
        "commit_ms": {"p50": percentile(commits, 50), "p95": percentile(commits, 95), "max": max(commits), "goal": 1.0},
        "staging_s": stats["staging_s"],
        "bytes": stats["bytes"],
    }


def compare_steps(rest: Sequence[float], moving: Sequence[float]) -> Report:
    """Ratios of moving to rest; a gap is one step's time, over the median of the steps at rest."""
    middle = statistics.median(rest)

    def ratio(of: Callable[[Sequence[float]], float], goal: float) -> Report:
        found = of(moving), of(rest)
        return {"rest_ms": 1e3 * found[1], "moving_ms": 1e3 * found[0], "ratio": found[0] / found[1], "goal": goal}

    return {
        "num_steps": len(moving),
        "p50": ratio(statistics.median, 1.1),
        "p95": ratio(lambda steps: percentile(list(steps), 95), 1.3),
        "mean": ratio(statistics.fmean, 1.1),
        "longest_gap": {"rest": max(rest) / middle, "moving": max(moving) / middle, "goal": 3.0},
    }


def _nothing() -> None:
    return None


# -- memory ------------------------------------------------------------------------------------------------------------


def measure_memory(options: argparse.Namespace) -> Report:
    """Memory of the workers' own: anonymous, and their parts of what they share. Files that are mapped do not count."""
    # Workers inherit it: what is freed goes back at once. What malloc keeps instead, up to 25 MiB here, is chance.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    rng = random.Random(0)
    taken: dict[str, int] = {}
    expected: Report = {}
    moved = {
        **AT_REST,
        "num_redundant_experts": options.redundant,
        "policy": "trimtab.testing.policies:ShufflingPolicy",
    }
    for side, eplb in (("off", None), ("on", moved)):
        before = children()
        with watched_workers("eplb_worker"), engines(options.model, eplb, kv_cache_memory_bytes="64MiB") as (llm,):
            workers = children() - before
            decode_steps(llm, prompts_of(llm, rng, 8, 64), 16, _nothing)
            if eplb is not None:
                llm.rearrange_experts()  # staging takes memory once it was written
                decode_steps(llm, prompts_of(llm, rng, 8, 64), 16, _nothing)
                expected = balancing_bytes(llm)
            taken[side] = sum(map(own_bytes, workers))
    extra, formula = taken["on"] - taken["off"], sum(expected.values())
    return {
        "measured_bytes": extra,
        "formula_bytes": formula,
        "formula": expected,
        "ratio": extra / formula,
        "goal": "0.95 to 1.05",
    }


def balancing_bytes(llm: LLM) -> dict[str, int]:
    """The formula: redundant slots, one layer of staging, tables."""
    held, controller = llm.stats()["memory_bytes"], llm.engine.balancer
    placement = controller.placement  # type: ignore[attr-defined]
    topology, period = placement.topology, 60 if placement.topology.num_redundant else 1
    entries = placement.num_layers * (topology.num_experts * period + topology.num_slots)
    return {
        "redundant_slots": held.get("redundant_experts", 0), "staging": held["staging"],
        "tables": topology.num_ranks * 8 * entries,
    }  # fmt: skip


def children() -> set[int]:
    """Process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def own_bytes(pid: int) -> int:
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(1024 * int(field[1]) for field in fields if field[0] in ("Pss_Anon:", "Pss_Shmem:"))


# -- gain --------------------------------------------------------------------------------------------------------------


def measure_gain(options: argparse.Namespace) -> Report:
    return gain_of(options, options.model, lambda llm: by_domain(llm, options))


def measure_skewed(options: argparse.Namespace) -> Report:
    source = Path(options.model)
    config = json.loads((source / "config.json").read_text())
    num_experts = config.get("num_experts") or config["num_local_experts"]

    def random_traffic(llm: LLM) -> dict[str, list[list[list[int]]]]:
        rng = random.Random(0)
        rounds = [prompts_of(llm, rng, options.batch, options.input_len) for _ in range(options.reps)]
        return {"skewed": rounds}

    with tempfile.TemporaryDirectory(prefix="trimtab-") as folder:
        hot = range(num_experts // NUM_RANKS)  # rank 0's, as long as nothing moves
        path = write_skewed_checkpoint(source, Path(folder) / source.name, hot, factor=options.factor)
        return gain_of(options, str(path), random_traffic, goal=1.25)


def by_domain(llm: LLM, options: argparse.Namespace) -> dict[str, list[list[list[int]]]]:
    domains = options.domains.split(",")
    traffic = make_traffic(llm, domains, options.reps, options.batch, options.input_len)
    return {domain: [prompts for name, prompts in traffic if name == domain] for domain in domains}


def gain_of(
    options: argparse.Namespace,
    model: str,
    traffic_for: Callable[[LLM], dict[str, list[list[list[int]]]]],
    goal: float | None = None,
) -> Report:
    """Prompts are read, one token each: experts compute, and do not wait for weights."""
    report: Report = {}
    # The newest bucket of load is one domain's: it begins where the last decision was.
    eplb = {"window_size": 1, "step_interval": NEVER, "num_redundant_experts": options.redundant}
    with engines(
        model, None, eplb, enable_return_routed_experts=True, max_num_batched_tokens=options.step_tokens
    ) as sides:
        off, on = sides
        controller: Any = on.engine.balancer
        for name, rounds in traffic_for(off).items():
            for prompts in rounds:
                serve(on, prompts, 1, lambda: controller.placement)
            on.rearrange_experts()
            found = run_rounds(off, on, [(name, prompts) for prompts in rounds], 1)
            on.rearrange_experts()  # tells the experts' share of the balanced steps
            share = on.eplb_stats()["last_decision"]["experts_share"]
            uneven = {
                side: statistics.median(getattr(part, side).max_over_mean for part in found) for side in ("off", "on")
            }
            ratio = statistics.median(part.off.seconds / part.on.seconds for part in found)
            predicted = predicted_ratio(share, uneven["off"])
            report[name] = {
                "off_tokens_per_s": statistics.median(part.off.tokens_per_s for part in found),
                "on_tokens_per_s": statistics.median(part.on.tokens_per_s for part in found),
                "max_over_mean": uneven, "experts_share": share, "ratio": ratio, "predicted": predicted,
                "ratio_over_predicted": ratio / predicted, "goal": goal or 0.9,
                "tokens_are_equal": all(part.is_equal for part in found),
            }  # fmt: skip
            show(f"{name}: {ratio:.2f}")
    return report


# -- the program -------------------------------------------------------------------------------------------------------

MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "share": measure_share, "quiet": measure_quiet, "moving": measure_moving, "memory": measure_memory,
    "gain": measure_gain, "skewed": measure_skewed,
}  # fmt: skip


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def lines_of(report: Report, indent: int = 2) -> Iterator[str]:
    """The report for people: a mapping in a line where it holds numbers alone."""
    for name, value in report.items():
        if isinstance(value, dict) and any(isinstance(part, dict) for part in value.values()):
            yield f"{' ' * indent}{name}"
            yield from lines_of(value, indent + 2)
        else:
            parts = value.items() if isinstance(value, dict) else [("", value)]
            words = ", ".join(
                f"{key} {part:,.4g}".strip() if isinstance(part, float) else f"{key} {part}".strip()
                for key, part in parts
            )
            yield f"{' ' * indent}{name}: {words}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time (moving, gain, skewed)")
    parser.add_argument("--steps", type=int, help="2000 for moving; per batch for share and quiet 64")
    parser.add_argument("--block", type=int, default=50, help="steps of one side before the other's (moving)")
    parser.add_argument("--reps", type=int, default=6, help="turns of each side (quiet, gain, skewed)")
    parser.add_argument("--redundant", type=int, default=2)
    parser.add_argument("--domains", default="code,german,maths")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=512, help="max_num_batched_tokens (gain, skewed)")
    parser.add_argument("--factor", type=float, default=4.0, help="of the router's rows for rank 0's experts (skewed)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 2000 if options.what == "moving" else 64
    if len(os.sched_getaffinity(0)) < NUM_RANKS:
        print(f"warning: {NUM_RANKS} ranks on fewer cores measure the scheduler", file=sys.stderr)
    report = {
        "what": options.what,
        **MEASUREMENTS[options.what](options),
        "machine": {**machine(), "command": " ".join(sys.argv)},
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(lines_of(report, 0)))


if __name__ == "__main__":
    main()
