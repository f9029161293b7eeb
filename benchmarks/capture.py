"""What routed-experts capture costs: its own seconds within decode steps, throughput on and off, and one array.

    python benchmarks/capture.py MODEL_DIR [--batch 32] [--new-tokens 48] [--reps 5] [--threads 2] [--json]

1. instrumented: every call of capture, in worker and engine, is timed while a batch decodes; the timers' own cost is
   measured and taken off. Median call times number of calls, as a share of the median step.
2. end to end: two engines of one process, capture off and on, take turns on the same prompts; ratio of medians.
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
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - start)

        return timed

    def net(self) -> dict[str, float]:
        """Median seconds of one call, without what an empty call costs."""
        empty = Meter()
        nothing = empty.wrap("nothing", lambda *args: None)
        for _ in range(20_000):
            nothing(0, 0)
        each = statistics.median(empty.seconds["nothing"])
        return {name: max(statistics.median(calls) - each, 0.0) for name, calls in self.seconds.items()}


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


def decode(llm: LLM, prompts: list[list[int]], new_tokens: int, meter: Meter | None = None) -> list[Any]:
    """Outputs. `meter` is cleared when all prompts are computed, and takes the time of each step from then on."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, params)
    (rank,) = llm.engine.scheduler.ranks
    step, decoding, outputs = llm.engine.step, False, []
    while llm.engine.has_unfinished:
        if meter is not None and not decoding and all(request.num_output_tokens for request in rank.running):
            decoding = not rank.waiting and len(rank.running) == len(prompts)
            if decoding:
                meter.seconds.clear()
                step = meter.wrap("step", llm.engine.step)
        outputs += [output for output in step() if output.finished]
    assert len(outputs) == len(prompts) and all(output.error is None for output in outputs)
    return outputs


def instrument(llm: LLM, meter: Meter) -> None:
    capturer = llm.engine.executor.worker.runner.capturer  # type: ignore[attr-defined]
    for name in ("record", "get_routed_experts"):
        setattr(capturer, name, meter.wrap(f"worker: {name}", getattr(capturer, name)))
    for name in ("to", "report"):
        setattr(RoutedExpertsRecord, name, meter.wrap(f"worker: {name}", getattr(RoutedExpertsRecord, name)))
    (rank,) = llm.engine.scheduler.ranks
    for name in ("launch", "store", "freeze"):
        setattr(rank.row_store, name, meter.wrap(f"engine: {name}", getattr(rank.row_store, name)))


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
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    vocab_size = min(json.loads((args.model / "config.json").read_text())["vocab_size"], 8000)
    rng = random.Random(0)
    sides = {"off": open_llm(args, capture=False), "on": open_llm(args, capture=True)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    outputs: list[Any] = []
    for rep in range(args.reps + 1):  # the first round warms up
        prompts = [[rng.randrange(5, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.batch)]
        for side, llm in sides.items():
            start = time.perf_counter()
            outputs = decode(llm, prompts, args.new_tokens)
            if rep:
                seconds[side].append(time.perf_counter() - start)

    meter = Meter()
    instrument(sides["on"], meter)
    shares, steps, costs = [], [], {}
    for _ in range(args.reps):
        decode(sides["on"], prompts, args.new_tokens, meter)
        costs = meter.net()
        step_s, num_steps = costs.pop("step"), len(meter.seconds["step"])
        per_step = sum(cost * len(meter.seconds[name]) for name, cost in costs.items()) / num_steps
        shares.append(per_step / step_s)
        steps.append(step_s)
    share, step_s = statistics.median(shares), statistics.median(steps)
    completion = outputs[0].outputs[0]
    report = {
        "model": args.model.name,
        "batch": args.batch,
        "capture_share_of_decode": share,
        "decode_step_ms": step_s * 1e3,
        "capture_us_per_call": {name: 1e6 * cost for name, cost in costs.items()},
        "throughput_on_over_off": statistics.median(seconds["off"]) / statistics.median(seconds["on"]),
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
    print(f"throughput on / off: {report['throughput_on_over_off']:.3f}")
    print(f"bytes per token: {report['bytes_per_token']:.0f} (layers x top-k x itemsize)")
    print(f"array of 32,768 tokens, 61 layers x 8: {report['materialise_32k_ms']:.1f} ms")


if __name__ == "__main__":
    main()
