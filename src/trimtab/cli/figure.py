"""The PNG of which experts each kind of text used: one panel per kind, layers x experts, one colour scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.cli.pictures import Counts, check_counts, full_share_of, routing_difference, shares

INK, FAINT, PAPER = "#1f2430", "#6b7280", "#ffffff"


def save_drawing(draw: Callable[[Any], Any], path: Path) -> Path:
    """Writes the figure that `draw(pyplot)` makes to `path` (its folder is made), in the house's type and colours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK}
    with plt.rc_context({**style, "xtick.color": FAINT, "ytick.color": FAINT}):
        figure = draw(plt)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor=PAPER)
        plt.close(figure)
    return path


def save_figure(counts: Counts, path: Path, *, model: str) -> Path:
    """Writes the picture to `path` (its folder is made). Returns `path`."""
    check_counts(counts)
    return save_drawing(lambda plt: _draw(plt, counts, model), path)


def _draw(plt: Any, counts: Counts, model: str) -> Any:
    num_layers, num_experts = next(iter(counts.values())).shape
    full_share = full_share_of(counts)
    figure = plt.figure(figsize=(2.5 * len(counts) + 4.2, 7.4))
    # Columns: the kinds, the colour scale, room for its numbers, how far apart the kinds are.
    widths = [*[1] * len(counts), 0.07, 0.16, 1.1]
    frame = {"left": 0.06, "right": 0.975, "top": 0.80, "bottom": 0.125}
    layout = figure.add_gridspec(1, len(widths), width_ratios=widths, wspace=0.17, **frame)
    panels = [figure.add_subplot(layout[0, column]) for column in range(len(counts))]
    for panel, (kind, table) in zip(panels, counts.items(), strict=True):
        image = _panel(panel, kind, table, full_share)
    panels[0].set_ylabel("MoE layer")
    for panel in panels[1:]:
        panel.tick_params(labelleft=False)
    bar = figure.colorbar(image, cax=figure.add_subplot(layout[0, len(counts)]), extend="max")
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    bar.outline.set_visible(False)
    bar.ax.axhline(1 / num_experts, color=PAPER, linewidth=1.5)
    bar.ax.tick_params(length=0, labelsize=8.5)
    bar.set_label("share of the layer's tokens", fontsize=8.5, color=FAINT)
    if len(counts) > 1:
        _differences_panel(figure.add_subplot(layout[0, len(widths) - 1]), counts)
    figure.text(0.06, 0.945, "Which experts each kind of text used", fontsize=17, fontweight="bold", va="center")
    facts = f"{model} · {num_layers} MoE layers × {num_experts} experts · tokens routed to each expert, by kind of text"
    figure.text(0.06, 0.902, facts, fontsize=10, color=FAINT, va="center")
    note = f"An even spread would give every expert {1 / num_experts:.1%} (white mark on the scale)."
    figure.text(0.06, 0.025, note, fontsize=8.5, color=FAINT, va="center")
    return figure


def _panel(panel: Any, kind: str, table: np.ndarray, full_share: float) -> Any:
    num_layers, num_experts = table.shape
    image = panel.imshow(shares(table), aspect="auto", cmap="viridis", vmin=0, vmax=full_share, interpolation="nearest")
    panel.set_title(kind, fontsize=12.5, fontweight="bold", loc="left", pad=22)
    panel.text(0, 1.012, f"{int(table.sum()):,} routed", transform=panel.transAxes, fontsize=8.5, color=FAINT)
    panel.set_xlabel("expert")
    if num_experts <= 16:
        panel.set_xticks(range(num_experts))
    panel.set_yticks(range(0, num_layers, 1 if num_layers <= 12 else 5))
    if num_layers * num_experts <= 2000:
        panel.set_xticks(np.arange(num_experts + 1) - 0.5, minor=True)
        panel.set_yticks(np.arange(num_layers + 1) - 0.5, minor=True)
        panel.grid(which="minor", color=PAPER, linewidth=0.6)
    panel.tick_params(which="both", length=0, labelsize=8.5)
    for spine in panel.spines.values():
        spine.set_visible(False)
    return image


def _differences_panel(panel: Any, counts: Counts) -> None:
    """One bar per pair of kinds: the share of tokens that go to other experts."""
    kinds = list(counts)
    pairs = [(first, second) for place, first in enumerate(kinds) for second in kinds[place + 1 :]]
    values = {pair: routing_difference(counts[pair[0]], counts[pair[1]]) for pair in pairs}
    pairs.sort(key=values.__getitem__)
    panel.barh(range(len(pairs)), [values[pair] for pair in pairs], color="#2a788e", height=0.42)
    for place, pair in enumerate(pairs):
        panel.text(0, place + 0.3, f"{pair[0]} / {pair[1]}", fontsize=9, va="bottom")
        panel.text(values[pair] + 0.015, place, f"{values[pair]:.0%}", fontsize=9.5, va="center", fontweight="bold")
    panel.set_title("How far apart", fontsize=12.5, fontweight="bold", loc="left", pad=22)
    panel.text(0, 1.012, "tokens that go to other experts", transform=panel.transAxes, fontsize=8.5, color=FAINT)
    panel.set_xlim(0, 1.0)
    panel.set_ylim(-0.6, len(pairs) - 0.1)
    panel.set_yticks([])
    panel.set_xticks([0, 0.5, 1.0])
    panel.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    panel.set_xlabel("0 %: same experts, 100 %: none in common", fontsize=8.5, color=FAINT)
    panel.tick_params(length=0, labelsize=8.5)
    for side in ("top", "right", "left", "bottom"):
        panel.spines[side].set_visible(False)
    panel.axvline(0, color=FAINT, linewidth=0.8)
