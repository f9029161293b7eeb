"""Dispatch and combine of one MoE layer between processes: shared memory and Gloo side by side.

    python benchmarks/dispatch.py --ranks 2 --tokens 1,8,64,512 --hidden 1024 --top-k 4 --json dispatch.json

Experts cost nothing here, so what is timed is all a layer spends on being spread over ranks: packing, moving, waiting
for the messages and the sum over k. Sides take turns round by round in the same processes; compare the ratios of one
run, never microseconds of two. Give every rank a core of its own, or what is measured is the scheduler.
"""

# T tokens  K top-k  N token-expert pairs  H hidden size

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from trimtab.experts.data.dispatch.base import Dispatcher
from trimtab.experts.data.dispatch.choice import DispatchPlan, choose_dispatcher, create_resources, open_dispatcher
from trimtab.kernels.native import exchange

BACKENDS = ("shared_memory", "gloo")
BASELINE = "gloo"


class NoExperts:
    """A kernel whose experts do nothing; the sum over k is the native one."""

    name = "none"
    in_place_dtypes = frozenset({torch.float32, torch.bfloat16})

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        return torch.empty(rows.shape)

    def experts_in_place(
        self, dtype: torch.dtype, row_addresses: Tensor, slot_ids: Tensor, output_addresses: Tensor
    ) -> None:
        return None

    def combine(self, outputs: Tensor, slot_ids: Tensor, gate_weights: Tensor, out: Tensor) -> None:
        exchange.combine(outputs, slot_ids, gate_weights, out)


@dataclass(frozen=True)
class Result:
    tokens_per_rank: int
    side: str
    median_us: float
    p10_us: float  # what it takes when nothing else runs on the cores
    over_baseline: float  # the baseline's median / this one's: above 1 is faster
    p10_over_baseline: float
    waited_us: float  # of it, waiting for other ranks, where the side can tell


def time_round(dispatcher: Dispatcher, arguments: tuple[Any, ...], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        dispatcher.run_experts(*arguments)
        times.append((time.perf_counter() - started) * 1e6)
    return times


def run_rank(plans: dict[str, DispatchPlan], rank: int, options: argparse.Namespace, connection: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dispatchers = {side: open_dispatcher(plan, rank) for side, plan in plans.items()}
    num_ranks = options.ranks
    generator = torch.Generator().manual_seed(rank)
    for tokens in options.tokens:
        hidden = torch.randn(tokens, options.hidden, generator=generator).bfloat16()
        num_slots = options.experts
        slot_ids = torch.rand(tokens, num_slots, generator=generator).argsort(dim=1)[:, : options.top_k].contiguous()
        kernel = NoExperts(num_slots // num_ranks)
        arguments = (kernel, hidden, slot_ids, torch.rand(tokens, options.top_k, generator=generator))
        times: dict[str, list[float]] = {side: [] for side in dispatchers}
        for number in range(options.rounds + 1):
            for side, dispatcher in dispatchers.items():
                found = time_round(dispatcher, arguments, options.calls)
                if number == 0:
                    dispatcher.times.take()  # the first round warms up
                else:
                    times[side] += found
        waited = {side: dispatcher.times.take() for side, dispatcher in dispatchers.items()}
        connection.send(
            {
                side: (
                    statistics.median(found),
                    statistics.quantiles(found, n=10)[0],
                    waited[side].wait_s * 1e6 / len(found),
                )
                for side, found in times.items()
            }
        )


def measure(options: argparse.Namespace) -> list[Result]:
    sizes = {"max_tokens": max(options.tokens), "max_top_k": options.top_k, "max_hidden_size": options.hidden}
    plans = {
        side: choose_dispatcher(num_ranks=options.ranks, num_sharing=1, backend=side, **sizes) for side in BACKENDS
    }
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        resources = {side: create_resources(plan, folder) for side, plan in plans.items()}
        pipes = []
        ranks = []
        for rank in range(options.ranks):
            ours, theirs = context.Pipe()
            opened = {side: held.plan for side, held in resources.items()}
            process = context.Process(target=run_rank, args=(opened, rank, options, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        results = []
        for tokens in options.tokens:
            by_rank = [pipe.recv() for pipe in pipes]
            # A layer ends when its slowest rank does.
            slowest = {side: max(rank[side] for rank in by_rank) for side in BACKENDS}
            base_median, base_p10, _ = slowest[BASELINE]
            for side, (median, p10, waited) in slowest.items():
                results.append(Result(tokens, side, median, p10, base_median / median, base_p10 / p10, waited))
        for process in ranks:
            process.join()
        for held in resources.values():
            held.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 64, 512])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=50, help="calls of one side before the other takes its turn")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < options.ranks:
        print(f"warning: {options.ranks} ranks on {len(os.sched_getaffinity(0))} cores measure the scheduler")
    results = measure(options)
    print(f"{options.ranks} ranks, bf16, hidden {options.hidden}, top-{options.top_k}, us per layer (slowest rank)")
    print(f"{'tokens/rank':>11} {'side':>14} {'median':>9} {'x gloo':>7} {'p10':>9} {'x gloo':>7} {'waited':>8}")
    for result in results:
        waited = f"{result.waited_us:8.1f}" if result.side == "shared_memory" else f"{'-':>8}"
        print(
            f"{result.tokens_per_rank:>11} {result.side:>14} {result.median_us:9.1f} {result.over_baseline:7.1f} "
            f"{result.p10_us:9.1f} {result.p10_over_baseline:7.1f} {waited}"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
            options_used = {key: value for key, value in vars(options).items() if key != "json"}
            json.dump(machine | options_used | {"results": [asdict(result) for result in results]}, file, indent=1)


if __name__ == "__main__":
    main()
