"""The PNG of one completion's routing: tokens x layers, each expert in its colour, and what each layer used overall."""

# T tokens drawn  L MoE layers  K top-k  E experts

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.cli.figure import FAINT, INK, PAPER, save_drawing

if TYPE_CHECKING:
    from trimtab.replay.routes import Routes

_ACCENT = "#2a788e"


def save_routes_figure(routes: Routes, path: Path, *, start: int = 0, num_tokens: int = 256) -> Path:
    """Draws rows [start, start + num_tokens) of `routes` to `path` (its folder is made). Returns `path`."""
    rows = routes.experts[start : start + num_tokens]
    if not len(rows):
        raise ValueError(f"{routes.label} has no row of routed experts to draw")
    return save_drawing(lambda plt: _draw(plt, routes, rows, start), path)


def _draw(plt: Any, routes: Routes, rows: np.ndarray, start: int) -> Any:
    model = routes.model
    num_layers, num_experts = len(model.layer_ids), model.num_experts
    height = min(max(3.4, 0.17 * num_layers * model.top_k), 8.0) + 2.6
    figure = plt.figure(figsize=(13.2, height))
    frame = {"left": 0.055, "right": 0.98, "top": 1 - 1.75 / height, "bottom": 0.95 / height}
    # Columns: tokens, the colours' scale, room for its numbers, experts, room for layer numbers, evenness.
    layout = figure.add_gridspec(1, 6, width_ratios=[3.1, 0.06, 0.03, 0.95, 0.0001, 0.62], wspace=0.13, **frame)
    over_tokens, scale, over_experts, evenness = (figure.add_subplot(layout[0, column]) for column in (0, 1, 3, 5))
    colours = _expert_colours(num_experts)
    _tokens_panel(over_tokens, routes, rows, start, colours)
    _expert_scale(scale, colours)
    counts = np.stack([np.bincount(rows[:, layer].ravel(), minlength=num_experts) for layer in range(num_layers)])
    _experts_panel(over_experts, counts, len(rows))
    _evenness_panel(evenness, counts)
    for panel in (over_experts, evenness):
        panel.set_yticks(*_layer_ticks(model.layer_ids, 1))
        panel.set_ylim(num_layers - 0.5, -0.5)
    figure.text(0.055, 1 - 0.38 / height, "Which experts every token used", fontsize=17, fontweight="bold", va="center")
    shown = f"{len(rows):,} of {routes.num_rows:,} tokens" if len(rows) < routes.num_rows else f"{len(rows):,} tokens"
    facts = f"{model.model} · {routes.label} · {shown} · {num_layers} MoE layers · top-{model.top_k} of {num_experts}"
    figure.text(0.055, 1 - 0.72 / height, facts, fontsize=10, color=FAINT, va="center")
    return figure


def _expert_colours(num_experts: int) -> np.ndarray:
    """[E, 3]: a palette made to be told apart for a few; else round the colour wheel in three steps of lightness."""
    from matplotlib import colormaps
    from matplotlib.colors import hsv_to_rgb

    if num_experts <= 10:
        return 0.88 * np.asarray(colormaps["tab10"](np.arange(num_experts)))[:, :3] + 0.12
    experts = np.arange(num_experts)
    value = np.array([0.94, 0.72, 0.50])[experts % 3]
    saturation = np.array([0.52, 0.72, 0.62])[experts % 3]
    return np.asarray(hsv_to_rgb(np.stack([experts / num_experts * 0.92, saturation, value], axis=1)))


def _tokens_panel(panel: Any, routes: Routes, rows: np.ndarray, start: int, colours: np.ndarray) -> None:
    num_tokens, num_layers, top_k = rows.shape
    image = colours[rows.transpose(1, 2, 0).reshape(num_layers * top_k, num_tokens)]
    first = routes.start + start
    extent = (first - 0.5, first + num_tokens - 0.5, num_layers * top_k - 0.5, -0.5)
    panel.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    for layer in range(1, num_layers):
        panel.axhline(layer * top_k - 0.5, color=PAPER, linewidth=1.1 if num_layers <= 32 else 0.5)
    panel.set_yticks(*_layer_ticks(routes.model.layer_ids, top_k))
    panel.set_ylabel("decoder layer")
    panel.set_xlabel("position of the token")
    _title(panel, "Every token", f"a band per layer, the strongest of its {top_k} choices on top")
    boundary = routes.num_prompt_tokens
    if first < boundary < first + num_tokens:
        panel.axvline(boundary - 0.5, color=INK, linewidth=1.6)
        at_right = boundary - first > num_tokens / 2
        text, align = ("prompt ends here  ", "right") if at_right else ("  output begins here", "left")
        place = ((boundary - first) / num_tokens, 1.0)
        offset = {"xytext": (0, 5), "textcoords": "offset points", "xycoords": "axes fraction"}
        panel.annotate(text, place, fontsize=8.5, color=INK, ha=align, **offset)
    _clear(panel)


def _expert_scale(panel: Any, colours: np.ndarray) -> None:
    num_experts = len(colours)
    panel.imshow(colours[:, None, :], aspect="auto", interpolation="nearest")
    panel.set_xticks([])
    step = max(1, -(-num_experts // 16))
    panel.set_yticks(range(0, num_experts, step))
    panel.yaxis.tick_right()
    panel.set_title("expert", fontsize=8.5, color=FAINT, loc="left", pad=5)
    _clear(panel)


def _experts_panel(panel: Any, counts: np.ndarray, num_tokens: int) -> None:
    shares = counts / num_tokens
    top = float(max(np.percentile(shares, 99), 1.5 / counts.shape[1]))
    panel.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    panel.set_xlabel("expert")
    if counts.shape[1] <= 8:
        panel.set_xticks(range(counts.shape[1]))
    _title(panel, "Every expert", f"share of tokens (yellow: {top:.0%}, more)")
    _clear(panel)


def _evenness_panel(panel: Any, counts: np.ndarray) -> None:
    from trimtab.cli.routes import entropies

    num_experts = counts.shape[1]
    effective = 2 ** entropies(counts)
    panel.barh(range(len(counts)), effective, color=_ACCENT, height=0.62 if len(counts) > 6 else 0.3)
    panel.axvline(num_experts, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    panel.set_xlim(0, num_experts * 1.04)
    panel.set_xticks([0, num_experts / 2, num_experts], ["0", f"{num_experts / 2:g}", str(num_experts)])
    panel.set_xlabel("experts")
    _title(panel, "How evenly", "as if so many shared alike")
    _clear(panel)


def _layer_ticks(layer_ids: tuple[int, ...], rows_per_layer: int) -> tuple[list[float], list[str]]:
    """Places and names of at most 16 layers, in the middle of their bands."""
    step = max(1, -(-len(layer_ids) // 16))
    ordinals = range(0, len(layer_ids), step)
    places = [ordinal * rows_per_layer + (rows_per_layer - 1) / 2 for ordinal in ordinals]
    return places, [str(layer_ids[ordinal]) for ordinal in ordinals]


def _title(panel: Any, title: str, subtitle: str) -> None:
    panel.set_title(title, fontsize=12.5, fontweight="bold", loc="left", pad=36)
    offset = {"xytext": (0, 21), "textcoords": "offset points", "xycoords": "axes fraction"}
    panel.annotate(subtitle, (0, 1), fontsize=8.5, color=FAINT, **offset)


def _clear(panel: Any) -> None:
    panel.tick_params(which="both", length=0, labelsize=8.5)
    for spine in panel.spines.values():
        spine.set_visible(False)
