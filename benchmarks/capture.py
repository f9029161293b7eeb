"""What routed-experts capture costs: its own seconds within decode steps, throughput on and off, and one array.

    python benchmarks/capture.py MODEL_DIR [--batch 32] [--steps 12] [--rounds 2] [--threads 2] [--json]

Two engines of one process, capture off and on, decode the same batch and take turns after every step, so that what
else the machine does meets both.

1. end to end: the median over pairs of neighbouring steps of (step with capture off) / (step with capture on).
2. instrumented, in rounds of their own: every call of capture, in worker and engine, is timed. What the timer costs is
   taken off: it is measured around the call that does nothing, in the same layers of the engine with capture off,
   where caches are as cold. Median call times number of calls, as a share of the median step.
3. the array of a request of 32,768 tokens, 61 layers, 8 experts per token: from KV blocks in random order to numpy.
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

from trimtab import LLM, SamplingParams
from trimtab.engine.block_pool import BlockPool
from trimtab.engine.request import Request
from trimtab.engine.routed_experts import FrozenRows, RoutedExpertsStore
from trimtab.engine.scheduler import Part
from trimtab.experts.data.capturer import RoutedExpertsRecord
from trimtab.experts.routed_experts import RoutedExpertsLayout
from trimtab.plan import KVCacheConfig, KVCacheGroupSpec, RoutedRows, ScheduledRow


class Meter:
    """Durations of each call of the functions it wraps. Medians count: these machines take the CPU away at times."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = self.seconds.setdefault(name, [])

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                calls.append(time.perf_counter() - start)

        return timed

    def clear(self) -> None:
        for calls in self.seconds.values():
            calls.clear()


def open_llm(args: argparse.Namespace, capture: bool) -> LLM:
    return LLM(
        str(args.model),
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=max(args.batch, 1),
        enable_prefix_caching=False,
        kv_cache_memory_bytes="512MiB",
        num_threads=args.threads,
        enable_return_routed_experts=capture,
    )


def start(llm: LLM, prompts: list[list[int]], num_steps: int) -> None:
    """Computes the prompts: what follows are `num_steps` steps of nothing but decoding, of the whole batch."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 16, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, params)
    (rank,) = llm.engine.scheduler.ranks
    while rank.waiting or not all(request.num_output_tokens for request in rank.running):
        llm.engine.step()
    assert len(rank.running) == len(prompts), "the batch does not fit"


def finish(llm: LLM, batch: int) -> list[Any]:
    outputs = [output for index in range(batch) if (output := llm.engine.abort(str(index))) is not None]
    assert len(outputs) == batch and all(output.error is None for output in outputs)
    return outputs


def decode(sides: dict[str, LLM], prompts: list[list[int]], num_steps: int) -> tuple[dict[str, list[float]], list[Any]]:
    """Seconds of each side's steps, and the outputs of the last side."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for llm in sides.values():
        start(llm, prompts, num_steps)
    for turn in range(num_steps):
        for side in list(sides)[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            sides[side].engine.step()
            seconds[side].append(time.perf_counter() - started)
    return seconds, [finish(llm, len(prompts)) for llm in sides.values()][-1]


def instrument(sides: dict[str, LLM], meter: Meter) -> None:
    for layer in sides["off"]._parts.models[0].moe_layers:
        layer.capture.record = meter.wrap("timer", layer.capture.record)
    llm = sides["on"]
    capturer = llm.engine.executor.worker.runner.capturer  # type: ignore[attr-defined]
    for name in ("record", "get_routed_experts"):
        setattr(capturer, name, meter.wrap(f"worker: {name}", getattr(capturer, name)))
    for name in ("to", "report"):
        setattr(RoutedExpertsRecord, name, meter.wrap(f"worker: {name}", getattr(RoutedExpertsRecord, name)))
    (rank,) = llm.engine.scheduler.ranks
    for name in ("launch", "store", "freeze"):
        setattr(rank.row_store, name, meter.wrap(f"engine: {name}", getattr(rank.row_store, name)))


def costs_per_call(meter: Meter) -> dict[str, float]:
    """Median seconds of a call, without the timer's own."""
    timer = statistics.median(meter.seconds["timer"])
    return {
        name: max(statistics.median(calls) - timer, 0.0)
        for name, calls in meter.seconds.items()
        if calls and name != "timer"
    }


def materialise_s(num_tokens: int, reps: int) -> float:
    """Median seconds from the store to the request's own array."""
    size, layout = 32, RoutedExpertsLayout(tuple(range(61)), 256, 8)
    num_blocks = num_tokens // size + 1
    kv_cache = KVCacheConfig(size, num_blocks, (KVCacheGroupSpec((0,), None, 8),))
    pool = BlockPool(num_blocks)
    store = RoutedExpertsStore(layout, kv_cache, pool)
    blocks = pool.allocate(num_blocks - 1)
    random.Random(0).shuffle(blocks)
    request = Request("r", [0], SamplingParams(), seed=0)
    request.block_tables = [blocks]
    slots = (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)
    store.launch(0, [Part(request, ScheduledRow(0, 0, num_tokens, False, ([],)))])
    experts = np.random.default_rng(0).integers(0, 256, (num_tokens, 61, 8)).astype(np.uint8)
    store.store(0, RoutedRows(experts, slots))
    request.num_computed = num_tokens
    times = []
    for _ in range(reps):
        request.routed_rows = FrozenRows(layout)
        start = time.perf_counter()
        store.freeze(request)
        rows, _ = request.routed_rows.output(writable=True)
        times.append(time.perf_counter() - start)
        assert np.array_equal(rows[-1], experts[-1]) and len(rows) == num_tokens
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="of each side in a round")
    parser.add_argument("--rounds", type=int, default=2, help="of either kind, after one to warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    vocab_size = min(json.loads((args.model / "config.json").read_text())["vocab_size"], 8000)
    rng = random.Random(0)
    sides = {"off": open_llm(args, capture=False), "on": open_llm(args, capture=True)}
    prompts = [[rng.randrange(5, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.batch)]
    decode(sides, prompts, 3)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    outputs: list[Any] = []
    for _ in range(args.rounds):
        found, outputs = decode(sides, prompts, args.steps)
        for side in sides:
            seconds[side] += found[side]
    ratios = [off / on for off, on in zip(seconds["off"], seconds["on"], strict=True)]

    meter = Meter()
    instrument(sides, meter)
    steps: list[float] = []
    spent: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for llm in sides.values():
            start(llm, prompts, args.steps)
        meter.clear()
        for _ in range(args.steps):
            sides["off"].engine.step()
            started = time.perf_counter()
            sides["on"].engine.step()
            steps.append(time.perf_counter() - started)
        for name, cost in costs_per_call(meter).items():
            spent.setdefault(name, []).append(cost)
            spent.setdefault(f"{name} a step", []).append(cost * len(meter.seconds[name]) / args.steps)
        for llm in sides.values():
            finish(llm, args.batch)
    costs = {name: statistics.median(each) for name, each in spent.items()}
    per_step_s = sum(cost for name, cost in costs.items() if name.endswith("a step"))
    step_s = statistics.median(steps)
    share = per_step_s / step_s
    completion = outputs[0].outputs[0]
    report = {
        "model": args.model.name,
        "batch": args.batch,
        "capture_share_of_decode": share,
        "decode_step_ms": step_s * 1e3,
        "capture_us_per_step": per_step_s * 1e6,
        "capture_us_per_call": {name: 1e6 * cost for name, cost in costs.items() if not name.endswith("a step")},
        "throughput_on_over_off": statistics.median(ratios),
        "throughput_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "bytes_per_token": completion.routed_experts.nbytes / len(completion.routed_experts),
        "layout_bytes_per_token": sides["on"].engine.routed_experts.row_bytes,
        "materialise_32k_ms": materialise_s(32_768, 9) * 1e3,
        "threads": args.threads,
        "dtype": args.dtype,
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(f"decode step of {args.batch}: {step_s * 1e3:.2f} ms, capture {share:.2%} of it")
    for name, us in report["capture_us_per_call"].items():  # type: ignore[attr-defined]
        print(f"  {name:28} {us:8.1f} us a call")
    low, high = report["throughput_quartiles"]  # type: ignore[misc]
    print(f"throughput on / off: {report['throughput_on_over_off']:.3f} (half of the pairs: {low:.3f} to {high:.3f})")
    print(f"bytes per token: {report['bytes_per_token']:.0f} (layers x top-k x itemsize)")
    print(f"array of 32,768 tokens, 61 layers x 8: {report['materialise_32k_ms']:.1f} ms")


if __name__ == "__main__":
    main()
