"""`trimtab doctor`: whether experts of a model move as they should, and where to look when they do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from trimtab.doctor import Diagnosis

EXIT_UNHEALTHY = 1
MARKS = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "unclear": ("?", "yellow")}


def facts_of(model: str, diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything `trimtab doctor --json` prints."""
    from trimtab.experts.control.support import support_table

    cause = diagnosis.cause
    return {
        "model": model,
        "healthy": diagnosis.is_healthy,
        "cause": None if cause is None else cause.anchor.symptom,
        "look_at": None if cause is None else {"what": cause.anchor.look_at, "files": list(cause.anchor.files)},
        "anchors": [
            {
                "name": finding.anchor.name,
                "checks": finding.anchor.checks,
                "status": finding.status,
                "details": list(finding.details),
            }
            for finding in diagnosis.findings
        ],
        "session": diagnosis.session,
        "support_table": support_table(),
    }


def show(model: str, diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table
    from rich.text import Text

    from trimtab.experts.control.support import support_table

    console = Console(highlight=False)
    if session := diagnosis.session:
        kinds = session["moves_by_kind"]
        console.print(
            f"[bold]{model}[/bold]: {session['num_tokens']:,} tokens on {session['num_ranks']} ranks; "
            f"{session['moves']} slots of {session['num_moe_layers']} MoE layers got another expert "
            f"({kinds['received']} from the other rank, {kinds['copied']} copied); "
            f"{session['mixed_layer_steps']} steps computed with old and new layers mixed"
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for finding in diagnosis.findings:
        mark, style = MARKS[finding.status]
        table.add_row(Text(mark, style=style), finding.anchor.name, Text(finding.anchor.checks))
        for detail in finding.details:
            table.add_row("", "", Text(detail, style=style))
        if finding.status == "unclear" and not finding.details:
            table.add_row("", "", Text("not reached", style="dim"))
    console.print(table)
    if (cause := diagnosis.cause) is None:
        console.print("[green]healthy[/green]: experts move, and nothing but time changes")
        return
    console.print(f"[bold red]{cause.anchor.symptom}[/bold red]: look at {cause.anchor.look_at}")
    for file in cause.anchor.files:
        console.print(f"  {file}", soft_wrap=True)
    if cause.anchor.name == "support":
        console.print(Markdown(support_table()))


def doctor(
    *,
    model: str = "demo",
    dtype: str = "auto",
    quantization: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Check that a model's experts can be balanced, and that balancing works: a minute for the demo model.

    Runs requests on two ranks, moves as many experts as it can under them, and
    holds what it finds against four anchors. It says which one failed and where
    to look: stale selection (placement and refresh), moved but unchanged
    behaviour (the weight view), shifted load (slot ids and padding), refused
    start (the support table).

    Exit code: 0 healthy, 1 an anchor failed, 2 there is no such model.

    Parameters
    ----------
    model
        A folder with a Hugging Face checkpoint, or demo.
    dtype
        What the weights are loaded as: auto, float32, bfloat16 or float16.
    quantization
        How experts are stored: int8; default: in dtype.
    json_output
        Print one JSON object.
    """
    from trimtab.doctor import diagnose
    from trimtab.observability.progress import progress_bar

    with progress_bar("examining") as report:
        diagnosis = diagnose(model, dtype=dtype, quantization=quantization, progress=report)
    if json_output:
        print(json.dumps(facts_of(model, diagnosis), indent=2))
    else:
        show(model, diagnosis)
    return 0 if diagnosis.is_healthy else EXIT_UNHEALTHY
