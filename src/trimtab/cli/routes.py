"""`trimtab routes`: what a file of routed experts holds, as a picture over tokens and layers and as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    import numpy as np

    from trimtab.replay.routes_file import RoutesFile

BUSIEST = 4  # experts named per layer


def count_experts(file: RoutesFile) -> np.ndarray:
    """Tokens routed to each expert over all completions, [L, E]; one completion is in memory at a time."""
    import numpy as np

    model = file.model
    counts = np.zeros((len(model.layer_ids), model.num_experts), np.int64)
    for entry in file:
        for ordinal in range(len(counts)):
            counts[ordinal] += np.bincount(entry.experts[:, ordinal].ravel(), minlength=model.num_experts)
    return counts


def entropies(counts_LE: np.ndarray) -> np.ndarray:
    """Bits per layer, [L]: 0 where one expert takes everything, log2 E where all take the same."""
    import numpy as np

    shares = counts_LE / np.maximum(counts_LE.sum(axis=1, keepdims=True), 1)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return -(shares * logs).sum(axis=1) + 0.0


def describe(file: RoutesFile, counts: np.ndarray) -> dict[str, Any]:
    """Everything `trimtab routes --json` prints."""
    import numpy as np

    model = file.model
    layers = []
    for layer_id, row, bits in zip(model.layer_ids, counts, entropies(counts), strict=True):
        order = np.argsort(-row, kind="stable")[:BUSIEST]
        layers.append(
            {
                "layer_id": layer_id,
                "entropy_bits": float(bits),
                "effective_experts": float(2**bits),
                "unused_experts": int((row == 0).sum()),
                "busiest": [{"expert": int(e), "share": float(row[e] / max(row.sum(), 1))} for e in order],
            }
        )
    return {
        "path": str(file.path),
        "model": model.model,
        "architecture": model.architecture,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "num_completions": len(file),
        "num_rows": int(counts[0].sum()) // model.top_k,
        "bytes_per_row": len(model.layer_ids) * model.top_k * model.dtype.itemsize,
        "layers": layers,
    }


def show(facts: dict[str, Any], drawn: str, picture: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"[bold]{facts['model']}[/bold] ({facts['architecture']}): {facts['num_completions']:,} completions, "
        f"{facts['num_rows']:,} rows of {facts['bytes_per_row']} bytes, "
        f"top-{facts['top_k']} of {facts['num_experts']} experts in {len(facts['layers'])} layers"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("layer", "entropy", "as if", "unused"):
        table.add_column(title, justify="right")
    table.add_column("busiest experts, their share")
    for layer in facts["layers"]:
        busiest = "  ".join(f"{one['expert']:>3} {one['share']:>4.0%}" for one in layer["busiest"])
        table.add_row(
            str(layer["layer_id"]),
            f"{layer['entropy_bits']:.2f} bits",
            f"{layer['effective_experts']:.1f}",
            str(layer["unused_experts"]),
            busiest,
        )
    console.print(table)
    console.print("[dim]as if: so many experts sharing alike would have this entropy[/dim]")
    console.print(f"[dim]The picture of {drawn}:[/dim] {picture}", soft_wrap=True)


def routes(
    file: Path,
    /,
    *,
    output: Path | None = None,
    completion: int = 0,
    start: int = 0,
    num_tokens: int = 256,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show which experts a file's tokens used: a PNG over tokens and layers, a table.

    The picture is of one completion: every column a token, every layer a band
    of top-k rows, the strongest choice on top, each expert in its own colour.
    The table counts all completions: entropy tells how evenly a layer spreads
    its tokens, as bits and as the number of experts that would share them alike.

    Parameters
    ----------
    file
        Written by trimtab generate --return-routed-experts, LLM.save_routed_experts or trimtab.replay.save_routes.
    output
        Where the PNG goes (default: beside the file, with its name).
    completion
        The completion to draw, counted from 0 in the file's order.
    start
        First row to draw.
    num_tokens
        Most tokens to draw.
    json_lines
        Print one JSON object instead of the table.
    """
    from trimtab.replay.routes_file import RoutesFile

    if start < 0:
        raise ValueError(f"start ({start}) must be at least 0, the first row")
    if num_tokens < 1:
        raise ValueError(f"num_tokens ({num_tokens}) must be at least 1")
    opened = RoutesFile(file)
    if not 0 <= completion < len(opened):
        raise ValueError(f"completion ({completion}) must be in [0, {len(opened)}), the completions of {file}")
    entry = opened[completion]
    if start >= max(entry.num_rows, 1):
        raise ValueError(f"start ({start}) must be in [0, {entry.num_rows}), the rows of {entry.label}")
    facts = describe(opened, count_experts(opened))
    from trimtab.cli.routes_figure import save_routes_figure

    picture = save_routes_figure(entry, output or file.with_suffix(".png"), start=start, num_tokens=num_tokens)
    if json_lines:
        print(json.dumps(facts | {"picture": str(picture), "drawn_completion": completion}))
    else:
        show(facts, entry.label, picture)
    return 0
