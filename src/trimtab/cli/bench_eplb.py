"""`trimtab bench eplb`: traffic that changes its domain, served with and without expert balancing, side by side."""

# L MoE layers  E experts

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter

from trimtab.cli.generate import open_llm
from trimtab.cli.options import EngineOptions, engine_config, given
from trimtab.observability.progress import Progress, no_progress, progress_bar
from trimtab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimtab.experts.placement import Placement
    from trimtab.llm import LLM

DOMAINS = ("code", "german", "maths", "english")
# Two rounds between decisions, two to move; the rest of a domain shows what it brought.
EPLB_CONFIG = {"window_size": 16, "step_interval": 32, "num_redundant_experts": 2, "min_gain": 0}


@dataclass(frozen=True, slots=True)
class Side:
    """One round on one side."""

    seconds: float
    tokens_per_s: float  # read and written
    max_over_mean: float  # the most loaded rank's pairs over the ranks' mean, layers weighted by their pairs


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests on both sides."""

    domain: str
    off: Side
    on: Side
    moves: int  # slots that got another expert meanwhile
    rearrangements: int  # completed meanwhile
    is_equal: bool  # tokens and routed experts are the same on both sides


@dataclass(frozen=True, slots=True)
class DomainResult:
    """Medians over the second half of a domain's rounds, when experts have had time to move."""

    domain: str
    off_tokens_per_s: float
    on_tokens_per_s: float
    ratio: float  # of each round's throughputs, on over off
    off_max_over_mean: float
    on_max_over_mean: float
    predicted_ratio: float  # what the shift of load is worth where experts take `experts_share` of a step
    moves: int  # over all of the domain's rounds
    rearrangements: int


def max_over_mean(counts: np.ndarray, placement: Placement) -> float:
    """counts int64 [L, E] -> how much more than the mean the most loaded rank has; 1 is even.

    Layers are passed one after the other, and in each all ranks wait for the most loaded one.
    """
    from trimtab.experts.control.gain import balancedness
    from trimtab.experts.load import ExpertLoad

    totals = counts.sum(axis=1)
    if not totals.any():
        return 1.0
    return float((totals / balancedness(ExpertLoad(counts, 1), placement)).sum() / totals.sum())


def predicted_ratio(experts_share: float, off_max_over_mean: float, on_max_over_mean: float = 1.0) -> float:
    """Step time without balancing over that with it. `experts_share`: of an evenly loaded step, in experts."""
    return (1 + experts_share * (off_max_over_mean - 1)) / (1 + experts_share * (on_max_over_mean - 1))


def domain_prompts(
    passages: Sequence[Sequence[int]], rng: random.Random, count: int, length: int
) -> Iterator[list[int]]:
    """`count` prompts of `length` tokens: passages in random order, one after the other."""
    for _ in range(count):
        prompt: list[int] = []
        while len(prompt) < length:
            for passage in rng.sample(list(passages), len(passages)):
                prompt += passage
        yield prompt[:length]


@dataclass(slots=True)
class _Served:
    seconds: float
    token_ids: list[list[int]]
    counts: np.ndarray  # int64 [L, E]
    placements: list[tuple[Placement, int]]  # in force, and for how many steps


def serve(llm: LLM, prompts: list[list[int]], output_len: int, placement: Callable[[], Placement]) -> _Served:
    """All prompts together, step by step. Raises `ValueError` when a request fails."""
    sampling = SamplingParams(
        temperature=0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
    )
    done: dict[str, Any] = {}
    placements: list[tuple[Placement, int]] = []
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, sampling)
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            if output.error:
                raise ValueError(f"the benchmark's request {output.request_id} failed: {output.error}")
            if output.finished:
                done[output.request_id] = output.outputs[0]
        current = placement()
        if placements and placements[-1][0] is current:
            placements[-1] = (current, placements[-1][1] + 1)
        else:
            placements.append((current, 1))
    seconds = time.perf_counter() - start
    answers = [done[str(index)] for index in range(len(prompts))]
    experts = np.concatenate([answer.routed_experts for answer in answers])  # [tokens, L, K]
    num_experts = placements[0][0].topology.num_experts
    counts = np.stack(
        [np.bincount(experts[:, layer].ravel(), minlength=num_experts) for layer in range(experts.shape[1])]
    )
    return _Served(seconds, [list(answer.token_ids) for answer in answers], counts, placements)


def _side(served: _Served, num_tokens: int) -> Side:
    steps = sum(number for _, number in served.placements)
    uneven = sum(number * max_over_mean(served.counts, placement) for placement, number in served.placements) / steps
    return Side(served.seconds, num_tokens / served.seconds, uneven)


def run_rounds(
    off: LLM,
    on: LLM,
    traffic: Sequence[tuple[str, list[list[int]]]],
    output_len: int,
    progress: Progress = no_progress,
) -> list[Round]:
    """Each round's prompts on both sides, the one that comes first changing; a first round warms up both."""
    from trimtab.experts.placement import Placement, Topology

    controller: Any = on.engine.balancer
    current = controller.placement
    topology = current.topology
    natural = Placement.initial(Topology(topology.num_experts, 0, topology.num_ranks), current.num_layers)

    def run(llm: LLM, prompts: list[list[int]]) -> _Served:
        return serve(llm, prompts, output_len, lambda: controller.placement if llm is on else natural)

    for llm in (off, on):
        with llm.engine.warm_up():
            run(llm, traffic[0][1])
    rounds = []
    for number, (domain, prompts) in enumerate(traffic):
        progress(domain, number, len(traffic))
        before = on.eplb_stats()
        pair: Sequence[LLM] = (off, on) if number % 2 == 0 else (on, off)
        found = {llm is on: run(llm, prompts) for llm in pair}
        after = on.eplb_stats()
        num_tokens = sum(len(prompt) + output_len for prompt in prompts)
        rounds.append(
            Round(
                domain,
                _side(found[False], num_tokens),
                _side(found[True], num_tokens),
                after["moves"] - before["moves"],
                after["rearrangements"]["done"] - before["rearrangements"]["done"],
                found[False].token_ids == found[True].token_ids
                and bool((found[False].counts == found[True].counts).all()),
            )
        )
    return rounds


def by_domain(rounds: Sequence[Round], experts_share: float) -> list[DomainResult]:
    """One result per stretch of rounds of one domain, in order."""
    stretches: list[list[Round]] = []
    for found in rounds:
        if not stretches or stretches[-1][0].domain != found.domain:
            stretches.append([])
        stretches[-1].append(found)
    results = []
    for stretch in stretches:
        settled = stretch[len(stretch) // 2 :]
        off_uneven = median(found.off.max_over_mean for found in settled)
        on_uneven = median(found.on.max_over_mean for found in settled)
        results.append(
            DomainResult(
                stretch[0].domain,
                median(found.off.tokens_per_s for found in settled),
                median(found.on.tokens_per_s for found in settled),
                median(found.on.tokens_per_s / found.off.tokens_per_s for found in settled),
                off_uneven,
                on_uneven,
                predicted_ratio(experts_share, off_uneven, on_uneven),
                sum(found.moves for found in stretch),
                sum(found.rearrangements for found in stretch),
            )
        )
    return results


def _chosen_domains(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in DOMAINS:
            raise ValueError(f"domains ({text!r}) must be some of {', '.join(DOMAINS)}, as in code,german")
    return chosen


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    import importlib.util

    if path.is_dir():
        raise ValueError(f"plot ({path}) is a folder; name a file in it")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plot ({path}) needs matplotlib; install trimtab[plot] or leave it out")


def eplb(
    *,
    model: str = "demo",
    domains: str = ",".join(DOMAINS[:3]),
    rounds: int = 6,
    batch_size: int = 8,
    input_len: int = 128,
    output_len: int = 16,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
    plot: Path | None = None,
    engine: Annotated[EngineOptions | None, Parameter(name="*")] = None,
) -> int:
    """Measure what live expert balancing brings when traffic changes its domain.

    Two engines of the same ranks, balancing off and on, take turns with the same
    requests, round by round. Both begin with experts in their order. Tokens must be
    the same on both sides (exit code 1 where they are not). Routed experts are
    captured on both, and tell how evenly each side's ranks were loaded.

    --eplb-config adds to window_size 16, step_interval 32, num_redundant_experts 2
    and min_gain 0; --data-parallel-size sets other than two ranks. Prompts gain
    most: a step of few tokens waits for weights, however tokens are spread.
    Nothing else should run on the machine meanwhile. On two cores the demo takes
    five minutes.

    Parameters
    ----------
    model
        A folder with a Hugging Face MoE checkpoint and a tokenizer, or demo.
    domains
        Kinds of text, one after the other: some of code, german, maths, english.
    rounds
        Rounds per domain, at least 2. Results are medians of a domain's second half.
    batch_size
        Requests per round, all at once.
    input_len
        Tokens per prompt.
    output_len
        Tokens per answer.
    json_output
        Print one JSON object: every round, every domain, balancing's own numbers, the machine.
    plot
        Draw throughput and balance over the rounds to this PNG.
    """
    from trimtab.cli.bench import machine

    chosen = _chosen_domains(domains)
    lows = {
        "rounds": (rounds, 2),
        "batch_size": (batch_size, 1),
        "input_len": (input_len, 1),
        "output_len": (output_len, 1),
    }
    for name, (value, low) in lows.items():
        if value < low:
            raise ValueError(f"{name} ({value}) must be at least {low}; leave it out for the default")
    _check_plot(plot)
    typed = given(engine)
    config = {**EPLB_CONFIG, **typed.pop("eplb_config", {})}
    common = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_prefix_caching": False,
        "enable_return_routed_experts": True,
        "max_num_seqs": batch_size,
        "max_model_len": input_len + output_len,
        **typed,
    }
    common.pop("enable_eplb", None)
    with_eplb = EngineOptions(**{**common, "enable_eplb": True, "eplb_config": config})
    engine_config(model, with_eplb)  # what is wrong with it is said before anything is loaded
    with ExitStack() as opened:
        off = opened.enter_context(open_llm(model, EngineOptions(**common)))
        on = opened.enter_context(open_llm(model, with_eplb))
        traffic = make_traffic(off, chosen, rounds, batch_size, input_len)
        with progress_bar("bench") as progress:
            found = run_rounds(off, on, traffic, output_len, progress)
        stats = on.eplb_stats()
    experts_share = stats["last_decision"].get("experts_share", 1.0)
    stats.pop("events")
    results = by_domain(found, experts_share)
    report: dict[str, Any] = {
        "model": model,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "eplb_config": config,
        "tokens_are_equal": all(part.is_equal for part in found),
        "experts_share": experts_share,
        "domains": [asdict(result) for result in results],
        "rounds": [asdict(part) for part in found],
        "eplb": stats,
        "machine": machine(),
    }
    if json_output:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    if plot is not None:
        from trimtab.cli.eplb_figure import save_eplb_figure

        save_eplb_figure(found, plot, model=model)
        if not json_output:
            print(f"The picture: {plot}")
    return 0 if report["tokens_are_equal"] else 1


def make_traffic(
    llm: LLM, domains: Sequence[str], rounds: int, batch_size: int, input_len: int
) -> list[tuple[str, list[list[int]]]]:
    """(domain, its prompts' token ids) per round, the same every time."""
    from trimtab.models.demo.domains import calibration_texts

    texts, tokenizer = calibration_texts(), llm.get_tokenizer()
    rng = random.Random(0)
    traffic = []
    for domain in domains:
        passages = [list(tokenizer.encode(text)) for text in texts[domain]]
        for _ in range(rounds):
            traffic.append((domain, list(domain_prompts(passages, rng, batch_size, input_len))))
    return traffic


def print_report(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['model']}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("domain")
    for heading in ("off\ntok/s", "on\ntok/s", "on/off", "predicted", "off\nmax/mean", "on\nmax/mean", "moves"):
        table.add_column(heading, justify="right")
    for result in report["domains"]:
        table.add_row(
            result["domain"],
            *(f"{result[name]:,.0f}" for name in ("off_tokens_per_s", "on_tokens_per_s")),
            *(f"{result[name]:.2f}" for name in ("ratio", "predicted_ratio", "off_max_over_mean", "on_max_over_mean")),
            f"{result['moves']:,}",
        )
    console = Console()
    console.print(table)
    stats, here = report["eplb"], report["machine"]
    outcome = ", ".join(f"{number} {name}" for name, number in stats["rearrangements"].items())
    console.print(
        f"{report['batch_size']} requests a round, {report['input_len']} tokens in, {report['output_len']} out\n"
        f"medians of the second half of each domain's {len(report['rounds']) // len(report['domains'])} rounds\n"
        f"rearrangements: {outcome}; experts take {report['experts_share']:.0%} of a step",
        highlight=False,
    )
    if not stats["moves"]:
        console.print(
            "[bold yellow]no expert moved[/]: on/off says what watching costs, not what balancing brings; "
            "more --rounds, or a smaller step_interval in --eplb-config",
            highlight=False,
        )
    if report["tokens_are_equal"]:
        console.print("tokens: the same on both sides in every round", highlight=False)
    else:
        number = sum(not part["is_equal"] for part in report["rounds"])
        console.print(f"[bold red]tokens: different in {number} rounds[/]", highlight=False)
    console.print(
        f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, {here['date']}", style="dim", highlight=False
    )
