"""`trimtab replay`: how far a trainer's routing and probabilities are from a rollout's, without replay and with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trimtab.observability.progress import progress_bar

if TYPE_CHECKING:
    from trimtab.replay.report import ReplayReport, RunReport
    from trimtab.replay.routes import RoutedModel

EXIT_DISAGREES = 1


def load_trainer(model: str, dtype: str) -> Any:
    """transformers' own network, as a trainer would load it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from trimtab.models.resolve import resolve_model

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype).eval()


def percent(share: float) -> str:
    """A share that is not whole never reads as if it were."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return f"{min(max(share, 0.0001), 0.9999):.2%}"


def _number(value: float | None) -> str:
    return "no log-probabilities" if value is None else f"{value:.3g}"


def show(report: ReplayReport, rollout: RoutedModel, trainer: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"[bold]{report.num_completions:,} completions[/bold] of {rollout.model} ({rollout.architecture}), "
        f"{report.num_rows:,} rows, {report.without.num_tokens:,} sampled tokens; trainer: {trainer}"
    )
    runs: tuple[RunReport, RunReport] = (report.without, report.with_replay)
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("without replay", justify="right")
    table.add_column("with replay", justify="right", style="bold")
    table.add_row("experts that agree", *(percent(run.agreement) for run in runs))
    table.add_row("rows with another set of experts", *(percent(run.row_mismatch) for run in runs))
    table.add_row("KL by k1, the mean of d", *(_number(run.kl_k1) for run in runs))
    table.add_row("KL by k3, the mean of exp(-d) - 1 + d", *(_number(run.kl_k3) for run in runs))
    console.print(table)
    console.print(
        "[dim]KL is KL(rollout || trainer); d: the rollout's log-probability of a sampled token - the trainer's[/dim]\n"
    )
    layers = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for title in ("layer", "rows that differ", "experts that differ", "with replay"):
        layers.add_column(title, justify="right")
    for before, after in zip(report.without.layers, report.with_replay.layers, strict=True):
        layers.add_row(
            str(before.layer_id), percent(before.row_share), percent(before.pair_share), percent(after.pair_share)
        )
    console.print(layers)
    for label in report.left_out:
        console.print(f"[dim]left out, no rows: {label}[/dim]")


def replay(
    model: str,
    file: Path,
    /,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Compare a rollout with the trainer's model, without replay and with the rollout's experts forced.

    Every completion of the file runs twice through transformers' own network:
    once with its router choosing, once with the captured experts, whose weights
    are recomputed from the live router. With replay all experts agree; what is
    left of the KL divergence does not come from routing.

    Exit code: 0 when all experts agree with replay, 1 when they do not, 2 when
    model and file do not fit.

    Parameters
    ----------
    model
        A folder with a Hugging Face MoE checkpoint, or demo: the trainer's weights, those of the rollout or later ones.
    file
        Written by trimtab generate --return-routed-experts, LLM.save_routed_experts or trimtab.replay.save_routes.
    dtype
        What the trainer computes in; auto is the checkpoint's.
    json_lines
        Print one JSON object instead of the tables.
    """
    from trimtab.replay.routes_file import RoutesFile

    opened = RoutesFile(file)  # what is no file of routes should not wait for the model
    network = load_trainer(model, dtype)
    from trimtab.replay.report import report_replay

    with progress_bar("replaying") as progress:
        report = report_replay(network, opened, lambda done: progress("completions", done, len(opened)))
    if json_lines:
        facts = {"model": model, "file": str(file), "dtype": str(network.dtype).removeprefix("torch.")}
        print(json.dumps(facts | report.as_dict()))
    else:
        show(report, opened.model, f"{type(network).__name__} in {str(network.dtype).removeprefix('torch.')}")
    return 0 if report.with_replay.agreement == 1.0 else EXIT_DISAGREES
