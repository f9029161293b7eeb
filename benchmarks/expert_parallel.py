"""Experts over two ranks of one thread against one rank of two threads, taking turns; and where the ranks' time goes.

    python benchmarks/expert_parallel.py MODEL_DIR [MODEL_DIR ...] [--ranks 2] [--batch 32] [--balanced] [--json]

Both sides serve the same random prompts in bfloat16, greedy, no prefix caching: the ranks as processes that share the
batch, the one rank in this process. Sides alternate within each measurement; only ratios count, and only on an
otherwise idle machine: a rank that loses its core holds up the other one in every layer.
The table is over the ranks' decode and prefill steps, waiting for the slower rank apart from the exchange itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import random_prompts
from step_lines import read_lines, watched_workers

from trimtab import LLM, SamplingParams
from trimtab.experts.control.gain import balancedness
from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.control.policy.registry import make_policy
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.placement_file import write_placement

DECODE_GOAL, PREFILL_GOAL, EXCHANGE_GOAL = 0.88, 0.92, 0.08
PROMPT_TOKENS, PREFILL_TOKENS = 32, 512
PARTS = ("experts_s", "exchange_s", "wait_s")
Steps = list[list[dict[str, Any]]]  # per rank


def balanced_placement(model: Path, num_ranks: int, vocab_size: int, file: Path) -> str:
    """Experts over ranks by their load on other random prompts, without replicas, and what is to be had from that."""
    llm = LLM(
        str(model), dtype="bfloat16", max_model_len=1024, max_num_batched_tokens=1024, enable_prefix_caching=False,
        kv_cache_memory_bytes="512MiB", num_threads=num_ranks, enable_return_routed_experts=True,
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        prompts = random_prompts(random.Random(1), 4, PREFILL_TOKENS, vocab_size)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    finally:
        llm.shutdown()
    config = json.loads((model / "config.json").read_text())
    topology = Topology(config.get("num_experts") or config["num_local_experts"], num_ranks=num_ranks)
    rows = np.concatenate([output.outputs[0].routed_experts for output in outputs])  # [tokens, L, K]
    counts = np.stack([np.bincount(layer.ravel(), minlength=topology.num_experts) for layer in rows.swapaxes(0, 1)])
    load, start = ExpertLoad(counts, num_steps=1), Placement.initial(topology, len(counts))
    placement = make_policy("default", PolicySettings()).rebalance(load, start)
    write_placement(placement, file)
    before, after = (float(np.mean(1 / balancedness(load, p))) for p in (start, placement))
    print(f"{model.name}: most loaded rank over the mean one, mean of layers: {before:.3f} -> {after:.3f}")
    return str(file)


def open_sides(model: Path, num_ranks: int, batch: int, placement: str | None) -> dict[str, LLM]:
    """One process after the other: the first side's weights are read twice from a warm page cache."""
    options: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": batch, "enable_prefix_caching": False,
        "kv_cache_memory_bytes": "512MiB",
    }  # fmt: skip
    ranked = LLM(
        str(model), **options, max_num_batched_tokens=1024, data_parallel_size=num_ranks, enable_expert_parallel=True,
        distributed_executor_backend="mp", num_threads=1, initial_placement=placement,
    )  # fmt: skip
    single = LLM(str(model), **options, max_num_batched_tokens=1024 * num_ranks, num_threads=num_ranks)
    return {"ranks": ranked, "threads": single}


def seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    taken = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs), outputs[0].error
    return taken


def decode_rate(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second beyond a run of one token."""
    first_s = seconds(llm, prompts, 1)
    return len(prompts) * (new_tokens - 1) / (seconds(llm, prompts, new_tokens) - first_s)


def prefill_rate(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    return sum(map(len, prompts)) / seconds(llm, prompts, 1)


def time_table(steps: Steps) -> list[dict[str, float]]:
    """Per rank: seconds of a step, medians over steps, and the share of the exchange in the summed time."""
    rows = []
    for lines in steps:
        row = {part: statistics.median(line[part] for line in lines) for part in (*PARTS, "step_s", "between_s")}
        row["rest_s"] = statistics.median(line["step_s"] - sum(line[part] for part in PARTS) for line in lines)
        row["exchange_share"] = sum(line["exchange_s"] for line in lines) / sum(line["step_s"] for line in lines)
        row["peak_bytes"] = max(line["peak_bytes"] for line in lines)
        rows.append(row)
    return rows


def print_table(what: str, rows: list[dict[str, float]]) -> None:
    print(f"  {what} steps, ms:    experts  dispatch + combine  waiting  attention and rest    step  between steps")
    for rank, row in enumerate(rows):
        experts, exchange, wait, rest, step, between = (
            row[part] * 1e3 for part in (*PARTS, "rest_s", "step_s", "between_s")
        )
        print(
            f"    rank {rank}{experts:>21.2f}{exchange:>13.2f} ({row['exchange_share']:.1%}){wait:>9.2f}{rest:>20.2f}"
            f"{step:>8.2f}{between:>15.2f}"
        )


def measure(model: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    vocab_size = min(json.loads((model / "config.json").read_text())["vocab_size"], 8000)
    rng = random.Random(0)
    report: dict[str, Any] = {"model": model.name, "balanced": arguments.balanced}
    placement = None
    if arguments.balanced:
        placement = balanced_placement(model, arguments.ranks, vocab_size, folder / "placement.json")
    sides = open_sides(model, arguments.ranks, arguments.batch, placement)
    try:
        for llm in sides.values():
            seconds(llm, random_prompts(rng, 4, 40, vocab_size), 3)
        print(f"{model.name}: {arguments.ranks} ranks x 1 thread against 1 rank x {arguments.ranks} threads")
        cases: list[tuple[str, Callable[..., float], int, int, float]] = [
            ("decode", decode_rate, arguments.batch, PROMPT_TOKENS, DECODE_GOAL),
            ("prefill", prefill_rate, 2 * arguments.ranks, PREFILL_TOKENS, PREFILL_GOAL),
        ]
        for what, rate, count, length, goal in cases:
            read_lines(folder, arguments.ranks)
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(arguments.reps):
                batch = random_prompts(rng, count, length, vocab_size)
                for side, llm in sides.items():
                    rates[side].append(rate(llm, batch, arguments.new_tokens))
            ratios = [ours / theirs for ours, theirs in zip(rates["ranks"], rates["threads"], strict=True)]
            steps = [
                [line for line in lines if line["tokens"] and line["is_decode"] == (what == "decode")]
                for lines in read_lines(folder, arguments.ranks)
            ]
            table = time_table(steps)
            report[what] = {side: statistics.median(values) for side, values in rates.items()}
            report[what] |= {"ratios": ratios, "ratio": statistics.median(ratios), "table": table}
            print(
                f"  {what} {count} x {length}: {report[what]['ranks']:.1f} against {report[what]['threads']:.1f} tok/s "
                f"= {report[what]['ratio']:.2f} (goal {goal}; {min(ratios):.2f} to {max(ratios):.2f})"
            )
            print_table(what, table)
        worst = max(row["exchange_share"] for row in report["decode"]["table"])
        print(f"  dispatch + combine, share of a decode step: {worst:.1%} (goal {EXCHANGE_GOAL:.0%})")
        peaks = [max(row["peak_bytes"] for row in pair) for pair in zip(
            report["decode"]["table"], report["prefill"]["table"], strict=True)]  # fmt: skip
        print(f"  peak memory of the ranks: {', '.join(f'{peak / 2**20:.0f} MiB' for peak in peaks)}")
    finally:
        for llm in sides.values():
            llm.shutdown()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="requests decoded together, over all ranks")
    parser.add_argument("--new-tokens", type=int, default=25)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument(
        "--balanced",
        action="store_true",
        help="place experts by their load first, so that ranks wait for each other less",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON too")
    arguments = parser.parse_args()
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    reports = []
    for model in arguments.models:
        with watched_workers("timed_worker") as folder:
            reports.append(measure(model, arguments, folder))
    if arguments.json:
        print(json.dumps({**machine, "date": time.strftime("%Y-%m-%d"), "reports": reports}, indent=1))


if __name__ == "__main__":
    main()
