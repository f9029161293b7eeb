"""trimtab and transformers' own `generate` on one checkpoint, in one process, taking turns; ratios of medians.

    python benchmarks/side_by_side.py MODEL_DIR [--batches 1,8,32] [--reps 3] [--threads 2] [--json]

Both sides get the same random token ids, bfloat16 (or --dtype), greedy, the same threads, no prefix caching. Sides
alternate within each measurement, because these machines change speed from minute to minute: only the ratios count.
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

import torch

Run = Callable[[list[list[int]], int], float]  # prompts, new tokens -> seconds


def trimtab_run(model: Path, dtype: str) -> Run:
    from trimtab import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        kv_cache_memory_bytes="1GiB",
    )

    def run(prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs), "a request failed"
        return seconds

    return run


def transformers_run(model: Path, dtype: str) -> Run:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        answer = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
        assert answer.shape[1] == ids.shape[1] + new_tokens
        return seconds

    return run


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(5, vocab_size) for _ in range(length)] for _ in range(count)]


def tokens_per_s(run: Run, prompts: list[list[int]], new_tokens: int) -> float:
    """Prefill rate for one new token; else decode rate: the seconds beyond those of a one-token run."""
    if new_tokens == 1:
        return len(prompts) * len(prompts[0]) / run(prompts, 1)
    prefill_s = run(prompts, 1)
    return len(prompts) * (new_tokens - 1) / (run(prompts, new_tokens) - prefill_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to run, for `compare`."""
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prefills", default="1,4", help="prompts of 512 tokens")
    parser.add_argument("--new-tokens", type=int, default=17)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")


def compare(sides: dict[str, Run], args: argparse.Namespace) -> None:
    """Prints rates of two sides that take turns, and the first one's ratio to the second."""
    vocab_size = min(json.loads((args.model / "config.json").read_text())["vocab_size"], 8000)
    rng = random.Random(0)
    for run in sides.values():
        run(random_prompts(rng, 2, 32, vocab_size), 3)

    cases = [(f"prefill {n}x512", n, 512, 1) for n in map(int, args.prefills.split(","))]
    cases += [(f"decode b={n}", n, 32, args.new_tokens) for n in map(int, args.batches.split(","))]
    ours, theirs = sides
    rows: list[dict[str, Any]] = []
    for what, count, length, new_tokens in cases:
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.reps):
            prompts = random_prompts(rng, count, length, vocab_size)
            for side, run in sides.items():
                rates[side].append(tokens_per_s(run, prompts, new_tokens))
        medians = {side: statistics.median(values) for side, values in rates.items()}
        rows.append({"what": what, **medians, "ratio": medians[ours] / medians[theirs]})
        if not args.json:
            print(
                f"{what:>15}: {ours} {medians[ours]:8.1f} tok/s, {theirs} {medians[theirs]:8.1f} tok/s, "
                f"ratio {rows[-1]['ratio']:.2f}",
                flush=True,
            )
    if args.json:
        report = {
            "model": args.model.name,
            "threads": args.threads,
            "dtype": args.dtype,
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        print(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    compare(
        {"trimtab": trimtab_run(args.model, args.dtype), "transformers": transformers_run(args.model, args.dtype)}, args
    )


if __name__ == "__main__":
    main()
