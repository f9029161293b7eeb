"""Which experts each kind of text used, as a picture: in the terminal and as a PNG.

Shapes: L MoE layers, E experts. Counts are tokens routed to an expert (a token counts once per expert it goes to).
"""

# L MoE layers  E experts

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

Counts = dict[str, np.ndarray]  # kind of text -> [L, E] tokens routed

# Dark blue over teal to yellow: even steps of lightness, so that it reads in grey and to the colour-blind too.
_RAMP = ((13, 17, 43), (41, 48, 122), (35, 105, 145), (37, 160, 134), (142, 207, 79), (253, 231, 76))
_SHADES = " ·░▒▓█"
_MAX_TERMINAL_EXPERTS = 64


def shares(counts_LE: np.ndarray) -> np.ndarray:
    """Each layer's counts as shares of that layer, [L, E]; a layer without tokens is zero."""
    totals_L1 = counts_LE.sum(axis=1, keepdims=True)
    return np.divide(counts_LE, totals_L1, out=np.zeros(counts_LE.shape, np.float64), where=totals_L1 > 0)


def routing_difference(first_LE: np.ndarray, second_LE: np.ndarray) -> float:
    """Share of the routed tokens that would have to change expert to turn one load into the other, mean over layers.

    This is the total variation distance: 0 means the same experts equally often, 1 means none in common.
    """
    return float(np.abs(shares(first_LE) - shares(second_LE)).sum(axis=1).mean() / 2)


def check_counts(counts: Counts) -> None:
    shapes = {kind: np.shape(table) for kind, table in counts.items()}
    assert counts and len(set(shapes.values())) == 1, f"every kind needs the same [L, E] table, got {shapes}"


def _colour(level: float) -> str:
    position = min(max(level, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(position), len(_RAMP) - 2)
    mixed = (round(a + (b - a) * (position - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _cell_pair(upper: float, lower: float | None, width: int, coloured: bool) -> Text:
    """Two layers in one line of text: the half block's foreground is the upper one, its background the lower."""
    from rich.text import Text

    if not coloured:
        mean = upper if lower is None else (upper + lower) / 2
        return Text(_SHADES[min(int(mean * len(_SHADES)), len(_SHADES) - 1)] * width)
    style = _colour(upper) if lower is None else f"{_colour(upper)} on {_colour(lower)}"
    return Text("▀" * width, style=style)


def _layers_grid(counts: Counts, console: Console, full_share: float) -> Table:
    """One column per kind, two layers per line, one cell per expert."""
    from rich.table import Table
    from rich.text import Text

    tables = {kind: shares(table) / full_share for kind, table in counts.items()}
    num_layers, num_experts = next(iter(tables.values())).shape
    room = (console.width - 8) // len(tables) - 2
    width = max(1, min(3, room // num_experts))
    coloured = console.color_system is not None
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim")
    grid.add_row("layer", *(Text(kind, style="bold") for kind in tables))
    for layer in range(0, num_layers, 2):
        has_lower = layer + 1 < num_layers
        cells = []
        for table in tables.values():
            pairs = zip(table[layer], table[layer + 1] if has_lower else [None] * num_experts, strict=True)
            cells.append(Text.assemble(*(_cell_pair(upper, lower, width, coloured) for upper, lower in pairs)))
        grid.add_row(f"{layer}-{layer + 1}" if has_lower else str(layer), *cells)
    ruler = "".join(f"{expert:<{width}}"[:width] for expert in range(num_experts)) if num_experts <= 10 else ""
    grid.add_row("expert" if ruler else "", *(Text(ruler, style="dim") for _ in tables))
    return grid


def _scale(full_share: float, coloured: bool) -> Text:
    from rich.text import Text

    steps = 24
    bar = [("█", _colour(step / (steps - 1))) for step in range(steps)] if coloured else [_SHADES]
    return Text.assemble(("share of the layer's tokens  0 % ", "dim"), *bar, (f" {full_share:.0%} and more", "dim"))


def _differences(counts: Counts) -> Table:
    """How differently two kinds are routed, as a triangle of percentages."""
    from rich.table import Table
    from rich.text import Text

    kinds = list(counts)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for kind in kinds[1:]:
        table.add_column(kind, justify="right")
    table.add_row("", *(Text(kind, style="bold") for kind in kinds[1:]))
    for row, kind in enumerate(kinds[:-1]):
        cells = [
            f"{routing_difference(counts[kind], counts[other]):.0%}" if column > row else ""
            for column, other in enumerate(kinds[1:], 1)
        ]
        table.add_row(kind, *cells)
    return table


def full_share_of(counts: Counts) -> float:
    """The share at which the colours end: the 98th percentile, so that one extreme layer does not darken the rest."""
    every = np.concatenate([shares(table).ravel() for table in counts.values()])
    num_experts = next(iter(counts.values())).shape[1]
    return float(min(1.0, max(np.percentile(every, 98), 1.5 / num_experts)))


def terminal_picture(counts: Counts, console: Console) -> RenderableType:
    """The picture for `console`: layers x experts per kind, the colour scale, and how far the kinds differ."""
    from rich.console import Group
    from rich.text import Text

    check_counts(counts)
    num_experts = next(iter(counts.values())).shape[1]
    full_share = full_share_of(counts)
    parts: list[Any] = [Text("Experts that each kind of text used", style="bold"), ""]
    if num_experts <= _MAX_TERMINAL_EXPERTS:
        parts += [_layers_grid(counts, console, full_share), "", _scale(full_share, console.color_system is not None)]
    else:
        parts.append(f"({num_experts} experts are too many for a terminal; the PNG shows them)")
    routed = ", ".join(f"{kind} {int(table.sum()):,}" for kind, table in counts.items())
    even = f"an even spread is {1 / num_experts:.1%} each"
    parts += [Text(f"tokens routed, summed over layers: {routed}; {even}", style="dim"), ""]
    if len(counts) > 1:
        parts += [Text("Tokens that go to other experts, kind against kind (mean over layers)"), _differences(counts)]
    group: Group = Group(*parts)
    return group
