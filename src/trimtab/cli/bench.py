"""`trimtab bench`: how fast this machine serves a checkpoint, with the warm-up kept apart from what is measured."""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from cyclopts import App, Parameter

from trimtab.cli.generate import open_llm
from trimtab.cli.layout import format_bytes
from trimtab.cli.options import EngineOptions, engine_config, given
from trimtab.observability.machine import (
    cpu_model,
    peak_memory_bytes,
    peak_memory_of_children_bytes,
    process_age_s,
)
from trimtab.observability.progress import Progress, no_progress, progress_bar
from trimtab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimtab.outputs import RequestOutput

app = App(name="bench", help="Measure speed, start-up time and memory.")
app.command("trimtab.cli.bench_eplb:eplb", name="eplb")

PERCENTILES = (50, 95, 99)
_FIRST_TOKEN_ID = 5  # below lie special tokens in most vocabularies
_WARM_UP_TOKENS = 4  # per answer: by then prompts have been read and some full steps decoded


class SteppingEngine(Protocol):
    """What is measured: the engine's own loop, so that each step can be timed."""

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def warm_up(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch size. Rates are medians over repetitions; step times are of every measured decode step."""

    batch_size: int
    input_len: int
    output_len: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    time_to_first_token_s: float
    step_ms: dict[str, float]
    num_steps: int


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank)."""
    assert values, "percentile of nothing"
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    low = min(_FIRST_TOKEN_ID, vocab_size - 1)
    return [[rng.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)]


@dataclass(slots=True)
class _Run:
    """One batch, timed: prefill until every prompt has its first token; decode steps, those of the full batch."""

    first_token_s: float
    prefill_s: float
    decode_step_s: list[float]


def timed_run(engine: SteppingEngine, prompts: list[list[int]], output_len: int, label: str) -> _Run:
    """Runs `prompts` to `output_len` tokens each and times every step. Raises `ValueError` when a request fails."""
    params = SamplingParams(
        temperature=0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{label}-{index}", prompt, params)
    num_tokens = dict.fromkeys((f"{label}-{index}" for index in range(len(prompts))), 0)
    start = before = time.perf_counter()
    run = _Run(first_token_s=0.0, prefill_s=0.0, decode_step_s=[])
    while engine.has_unfinished:
        reading_done = all(num_tokens.values())
        num_before = sum(num_tokens.values())
        for output in engine.step():
            if output.error:
                raise ValueError(f"the benchmark's request {output.request_id} failed: {output.error}")
            num_tokens[output.request_id] = len(output.outputs[0].token_ids)
        now = time.perf_counter()
        if not run.first_token_s and any(num_tokens.values()):
            run.first_token_s = now - start
        if not reading_done:
            run.prefill_s = now - start
        elif sum(num_tokens.values()) - num_before == len(prompts):
            run.decode_step_s.append(now - before)
        before = now
    return run


def measure(
    engine: SteppingEngine,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    repetitions: int,
    vocab_size: int,
    progress: Progress = no_progress,
) -> BatchResult:
    """One warm-up run of short answers, then `repetitions` measured ones with fresh prompts."""
    rng = random.Random(batch_size)
    runs = []

    def prompts() -> list[list[int]]:
        return random_prompts(rng, batch_size, input_len, vocab_size)

    progress(f"batch {batch_size}, warming up", 0, repetitions + 1)
    with engine.warm_up():
        timed_run(engine, prompts(), min(output_len, _WARM_UP_TOKENS), f"bench-{batch_size}-0")
    for repetition in range(1, repetitions + 1):
        progress(f"batch {batch_size}, run {repetition} of {repetitions}", repetition, repetitions + 1)
        runs.append(timed_run(engine, prompts(), output_len, f"bench-{batch_size}-{repetition}"))
    step_s = [seconds for run in runs for seconds in run.decode_step_s]
    if any(not run.decode_step_s for run in runs):
        raise ValueError(
            f"output_len ({output_len}) ends answers before the last of {batch_size} prompts is read; "
            "raise output_len or max_num_batched_tokens"
        )
    decode_rates = [batch_size * len(run.decode_step_s) / sum(run.decode_step_s) for run in runs]
    return BatchResult(
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        prefill_tokens_per_s=percentile([batch_size * input_len / run.prefill_s for run in runs], 50),
        decode_tokens_per_s=percentile(decode_rates, 50),
        time_to_first_token_s=percentile([run.first_token_s for run in runs], 50),
        step_ms={f"p{percent}": 1000 * percentile(step_s, percent) for percent in PERCENTILES},
        num_steps=len(step_s),
    )


def first_token(engine: SteppingEngine) -> float:
    """Runs a one-token request. Returns the age of the process at its token, seconds."""
    with engine.warm_up():
        engine.add_request("first", [_FIRST_TOKEN_ID], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False))
        while engine.has_unfinished:
            engine.step()
    return process_age_s()


def machine() -> dict[str, Any]:
    import torch

    from trimtab.kernels.features import usable_cores

    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["trimtab", *sys.argv[1:]]),
    }


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ValueError(f"batch_sizes ({text!r}) must be whole numbers of at least 1, as in 1,8,32")
    return sizes


@app.command
def offline(
    *,
    model: str = "demo",
    batch_sizes: str = "1,8,32",
    input_len: int = 64,
    output_len: int = 32,
    repetitions: int = 2,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    engine: Annotated[EngineOptions | None, Parameter(name="*")] = None,
) -> int:
    """Measure prefill and decode in one process, without a server: random prompts, greedy, prefix caching off.

    Prefill is timed until every prompt has its first token; decode steps are those that give all prompts a token.
    A warm-up run per batch size is not counted, nor is it load where experts are balanced. Start-up ends with the
    first token of the process. The defaults give a first picture of a small model in a minute or two.

    Parameters
    ----------
    model
        A folder with a Hugging Face MoE checkpoint, or demo.
    batch_sizes
        Prompts that run together, one measurement each.
    input_len
        Tokens per prompt.
    output_len
        Tokens per answer, at least 2.
    repetitions
        Measured runs per batch size; rates are their median (of two, the slower).
    json_output
        Print one JSON object, with the machine and the command.
    """
    sizes = _batch_sizes(batch_sizes)
    for name, value, low in (
        ("input_len", input_len, 1),
        ("output_len", output_len, 2),
        ("repetitions", repetitions, 1),
    ):
        if value < low:
            raise ValueError(f"{name} ({value}) must be at least {low}; leave it out for the default")
    room = {"max_num_seqs": max(sizes), "max_num_batched_tokens": max(2048, *sizes)}
    options = EngineOptions(**{"enable_prefix_caching": False, **room, **given(engine)})
    config = engine_config(model, options)
    if config.max_num_seqs < max(sizes):
        raise ValueError(
            f"max_num_seqs ({config.max_num_seqs}) must be at least {max(sizes)}, the largest of batch_sizes; "
            "raise it or leave it out"
        )
    llm = open_llm(model, options)
    report: dict[str, Any] = {"model": model, "start_up_s": first_token(llm.engine), "results": []}
    with progress_bar("bench") as progress:
        for position, size in enumerate(sizes):

            def report_run(stage: str, done: int, total: int, position: int = position) -> None:
                progress(stage, position * total + done, len(sizes) * total)

            result = measure(
                llm.engine,
                batch_size=size,
                input_len=input_len,
                output_len=output_len,
                repetitions=repetitions,
                vocab_size=llm.vocab_size,
                progress=report_run,
            )
            report["results"].append(asdict(result))
    report |= {
        "peak_memory_bytes": peak_memory_bytes(),
        "workers_peak_memory_bytes": peak_memory_of_children_bytes(),
        "stats": llm.stats(),
        "machine": machine(),
    }
    if llm.config.enable_eplb:
        report["eplb"] = {name: value for name, value in llm.eplb_stats().items() if name != "events"}
    if json_output:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0


def balancing_line(stats: dict[str, Any]) -> str:
    """`LLM.eplb_stats` in a line."""
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in stats["rearrangements"].items())
    moved = f"{stats['moves']:,} slots moved, {format_bytes(stats['bytes'])} between ranks"
    seconds = ", ".join(f"{name} {stats[f'{name}_s']:.2f} s" for name in ("planning", "staging", "committing"))
    return f"rearrangements: {outcomes}; balancedness {stats['balancedness']:.2f}; {moved}; {seconds}"


def print_report(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['model']}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("batch", "prefill tok/s", "decode tok/s", "first token ms"):
        table.add_column(heading, justify="right")
    for percent in PERCENTILES:
        table.add_column(f"step p{percent} ms", justify="right")
    for result in report["results"]:
        steps = [f"{result['step_ms'][f'p{percent}']:.1f}" for percent in PERCENTILES]
        rates = [f"{result[name]:,.1f}" for name in ("prefill_tokens_per_s", "decode_tokens_per_s")]
        table.add_row(str(result["batch_size"]), *rates, f"{1000 * result['time_to_first_token_s']:.1f}", *steps)
    console = Console()
    console.print(table)
    here = report["machine"]
    sizes = f"{report['results'][0]['input_len']} tokens in, {report['results'][0]['output_len']} out"
    kv_bytes = report["stats"]["memory_bytes"].get("kv_cache")
    memory = f"peak memory {format_bytes(report['peak_memory_bytes'])}"
    if report["workers_peak_memory_bytes"]:
        memory += f" and {format_bytes(report['workers_peak_memory_bytes'])} in workers"
    if kv_bytes is not None:
        memory += f"; room for {format_bytes(kv_bytes)} of KV cache"
    console.print(f"{sizes}; start to first token {report['start_up_s']:.1f} s; {memory}", highlight=False)
    if "eplb" in report:
        console.print(balancing_line(report["eplb"]), highlight=False)
    console.print(
        f"{here['cpu']}, {here['cores']} cores, {here['threads']} threads, torch {here['torch']}, {here['date']}",
        style="dim",
        highlight=False,
    )
