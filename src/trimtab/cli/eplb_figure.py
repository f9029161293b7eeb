"""The PNG of `trimtab bench eplb`: throughput and balance over rounds, without and with expert balancing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli.figure import FAINT, INK, save_drawing

if TYPE_CHECKING:
    from trimtab.cli.bench_eplb import Round

_COLOURS = {"off": "#8a8f99", "on": "#2a788e"}
_TITLES = {"code": "code", "english": "English", "german": "German", "maths": "maths"}
_MARK = "#c8553d"


def save_eplb_figure(rounds: Sequence[Round], path: Path, *, model: str) -> Path:
    """Writes the picture to `path` (its folder is made). Returns `path`."""
    return save_drawing(lambda plt: _draw(plt, rounds, model), path)


def _draw(plt: Any, rounds: Sequence[Round], model: str) -> Any:
    figure = plt.figure(figsize=(11.5, 7.2))
    frame = {"left": 0.075, "right": 0.90, "top": 0.80, "bottom": 0.09}
    layout = figure.add_gridspec(3, 1, height_ratios=[1.25, 1, 0.38], hspace=0.16, **frame)
    speed, balance, moves = (figure.add_subplot(layout[row, 0]) for row in range(3))
    for panel in (speed, balance, moves):
        _frame(panel, rounds)
    _lines(speed, {side: [getattr(found, side).tokens_per_s for found in rounds] for side in _COLOURS}, "{:,.0f}", 0)
    _lines(balance, {side: [getattr(found, side).max_over_mean for found in rounds] for side in _COLOURS}, "{:.2f}", 1)
    speed.set_ylabel("tokens per second")
    balance.set_ylabel("busiest rank ÷ mean")
    balance.text(0.004, 0.03, "1 = even", transform=balance.transAxes, fontsize=8.5, color=FAINT)
    numbers = range(1, len(rounds) + 1)
    moves.bar(numbers, [found.moves for found in rounds], color=_MARK, width=0.55, zorder=2)
    moves.set_ylabel("slots moved")
    moves.set_xlabel("round (the same requests on both sides)")
    for panel in (speed, balance):
        panel.tick_params(labelbottom=False)
        for number, found in zip(numbers, rounds, strict=True):
            if found.rearrangements:
                panel.axvline(number, color=_MARK, linewidth=1, linestyle=(0, (2, 2)), alpha=0.8, zorder=1)
    _name_domains(speed, rounds)
    if any(found.rearrangements for found in rounds):
        note = "dashed: a rearrangement was completed"
        figure.text(0.90, 0.902, note, fontsize=9, color=_MARK, va="center", ha="right")
    figure.text(
        0.075,
        0.945,
        "Live expert balancing, off and on, while traffic changes",
        fontsize=17,
        fontweight="bold",
        va="center",
    )
    ratio = sum(found.off.seconds for found in rounds) / sum(found.on.seconds for found in rounds)
    facts = f"{model} · throughput on / off over all rounds: {ratio:.2f}"
    figure.text(0.075, 0.902, facts, fontsize=10, color=FAINT, va="center")
    return figure


def _frame(panel: Any, rounds: Sequence[Round]) -> None:
    panel.set_xlim(0.5, len(rounds) + 0.5)
    panel.grid(axis="y", color="#e7e9ee", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(length=0, labelsize=9)
    for name, spine in panel.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color("#c4c8d0")
    for place, (start, end, _) in enumerate(_stretches(rounds)):
        if place % 2:
            panel.axvspan(start - 0.5, end + 0.5, color="#f4f5f8", linewidth=0, zorder=0)
        if place:
            panel.axvline(start - 0.5, color=INK, linewidth=1, zorder=1)


def _lines(panel: Any, values: dict[str, list[float]], form: str, bottom: float) -> None:
    """Each line is named at its end, by its last value's height where the two stay apart."""
    for side, line in values.items():
        panel.plot(
            range(1, len(line) + 1), line, color=_COLOURS[side], linewidth=2.2, marker="o", markersize=4, zorder=3
        )
    panel.set_ylim(bottom=bottom)
    low, high = panel.get_ylim()
    ends = {side: line[-1] for side, line in values.items()}
    lower, upper = sorted(ends, key=ends.__getitem__)
    least = 0.21 * (high - low)
    spread = max(0.0, least - (ends[upper] - ends[lower])) / 2
    for side, height in ((lower, ends[lower] - spread), (upper, ends[upper] + spread)):
        panel.annotate(
            f"{side}\n{form.format(ends[side])}",
            (len(values[side]) + 0.5, height),
            xytext=(8, 0),
            textcoords="offset points",
            color=_COLOURS[side],
            fontsize=10,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _name_domains(panel: Any, rounds: Sequence[Round]) -> None:
    for start, end, domain in _stretches(rounds):
        panel.text(
            (start + end) / 2, 1.03, _TITLES.get(domain, domain), transform=panel.get_xaxis_transform(), fontsize=11.5,
            fontweight="bold", ha="center",
        )  # fmt: skip


def _stretches(rounds: Sequence[Round]) -> list[tuple[int, int, str]]:
    """(first round, last round, domain), rounds counted from 1."""
    stretches, start = [], 1
    for domain, group in groupby(rounds, key=lambda found: found.domain):
        length = len(list(group))
        stretches.append((start, start + length - 1, domain))
        start += length
    return stretches
