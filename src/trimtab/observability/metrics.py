"""Prometheus metrics: what `LLM.stats` and `LLM.eplb_stats` know, read at the moment somebody asks.

Nothing is counted here. Each metric is one row that says how its samples are read from a snapshot, so that the table in
the docs is made of the same rows, and no number exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

Snapshot = Mapping[str, Any]  # LLM.stats; under "eplb" LLM.eplb_stats, where experts are balanced
Samples = Iterable[tuple[tuple[str, ...], Any]]  # (label values, value)

# `state` of eplb_stats, without what it says in parentheses.
EPLB_STATES = (
    "IDLE", "WAITING_FOR_LOAD", "WAITING_FOR_POLICY", "PLANNED", "STAGING", "READY", "COMMITTING", "COMMITTED",
    "FINISHING", "DONE", "ABORTING", "ABORTED", "BROKEN",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Row:
    """One metric. Gauges and counters have numbers as values, histograms `Durations.numbers()`, an info its labels."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Any], Samples]

    def family(self, source: Any) -> Metric | None:
        """Its samples now; None where there is none yet."""
        samples = [(labels, value) for labels, value in self.read(source) if value is not None]
        if not samples:
            return None
        made: Any = _FAMILIES[self.kind](self.name, self.help, labels=self.labels)
        for labels, value in samples:
            if self.kind == "histogram":
                made.add_metric(labels, buckets=_cumulative(value), sum_value=value["total_s"])
            else:
                made.add_metric(labels, value)
        return made


_FAMILIES: dict[str, Callable[..., Metric]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


def _cumulative(durations: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(upper bound, how many are at most that long): Prometheus counts each in all classes above its own."""
    bounds, total, buckets = [*map(str, durations["bounds_s"]), "+Inf"], 0, []
    for bound, count in zip(bounds, durations["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _one(*path: str) -> Callable[[Any], Samples]:
    """The number at a path of keys."""

    def read(source: Any) -> Samples:
        for key in path:
            source = source[key]
        return [((), source)]

    return read


def _each(*path: str) -> Callable[[Any], Samples]:
    """A number per key of the mapping at a path."""

    def read(source: Any) -> Samples:
        for key in path:
            source = source[key]
        return [((name,), value) for name, value in source.items()]

    return read


def _kv_blocks(snapshot: Snapshot) -> Samples:
    found = snapshot["kv_cache"]
    free = found["num_free_blocks"]
    return [(("free",), free), (("used",), found["num_blocks"] - free)]


def _state(eplb: Snapshot) -> Samples:
    current = eplb["state"].partition("(")[0]
    assert current in EPLB_STATES, f"{current} is missing in EPLB_STATES"
    return [((state,), int(state == current)) for state in EPLB_STATES]


ENGINE_ROWS = (
    _Row(
        "trimtab_model", "info", "The model that is served", (),
        lambda s: [((), {"architecture": s["model"], "max_model_len": str(s["max_model_len"])})],
    ),
    _Row("trimtab_requests_unfinished", "gauge", "Requests that wait or run", (), _one("num_unfinished")),
    _Row(
        "trimtab_rank_sequences_unfinished", "gauge", "Sequences that wait or run on a data-parallel rank", ("rank",),
        lambda s: [((str(rank),), stats["num_unfinished"]) for rank, stats in enumerate(s["ranks"])],
    ),
    _Row("trimtab_preemptions_total", "counter", "Requests that gave up their KV blocks", (), _one("num_preemptions")),
    _Row("trimtab_kv_cache_blocks", "gauge", "KV cache blocks, over all ranks", ("state",), _kv_blocks),
    _Row(
        "trimtab_prefix_cache_queried_tokens_total", "counter", "Prompt tokens looked up in the prefix cache", (),
        _one("prefix_cache", "num_queried_tokens"),
    ),
    _Row(
        "trimtab_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found there", (),
        _one("prefix_cache", "num_hit_tokens"),
    ),
    _Row("trimtab_memory_bytes", "gauge", "Memory held, over all ranks", ("kind",), _each("memory_bytes")),
    _Row("trimtab_start_up_seconds", "gauge", "Time that a stage of start-up took", ("stage",), _each("start_up_s")),
    _Row("trimtab_weights_version", "gauge", "How often new weights were loaded", (), _one("weights_version")),
)  # fmt: skip

EPLB_ROWS = (
    _Row("trimtab_eplb_state", "gauge", "1 for the state that balancing is in, else 0", ("state",), _state),
    _Row(
        "trimtab_eplb_balancedness", "gauge",
        "Mean over max of the ranks' loads, averaged over layers, when it was last looked at; 1 is even", (),
        _one("balancedness"),
    ),
    _Row(
        "trimtab_eplb_predicted_balancedness", "gauge", "The same under the placement that was decided on last", (),
        _one("predicted_balancedness"),
    ),
    _Row(
        "trimtab_eplb_layer_max_over_mean", "gauge",
        "Load of the most loaded rank over the ranks' mean, by MoE layer, when it was last looked at", ("layer",),
        lambda s: [((str(layer),), value) for layer, value in enumerate(s["max_over_mean_by_layer"])],
    ),
    _Row(
        "trimtab_eplb_rearrangements_total", "counter",
        "Decisions by outcome: done, aborted, declined (not worth it), failed (the policy)", ("outcome",),
        _each("rearrangements"),
    ),
    _Row(
        "trimtab_eplb_moves_total", "counter",
        "Slots that got another expert: received from another rank, or copied on their own", ("kind",),
        _each("moves_by_kind"),
    ),
    _Row(
        "trimtab_eplb_moved_bytes_total", "counter", "Bytes of those moves, over all ranks", ("kind",),
        _each("bytes_by_kind"),
    ),
    _Row(
        "trimtab_eplb_seconds_total", "counter",
        "Time of rearrangements by stage: planning (the policy's), staging and committing (the ranks' mean)",
        ("stage",),
        lambda s: [((stage,), s[f"{stage}_s"]) for stage in ("planning", "staging", "committing")],
    ),
    _Row(
        "trimtab_eplb_step_seconds", "histogram", "Time of steps, while experts were moving and while not",
        ("rearranging",),
        lambda s: [(("yes",), s["step_times"]["rearranging"]), (("no",), s["step_times"]["at_rest"])],
    ),
    _Row(
        "trimtab_eplb_mixed_layer_steps_total", "counter",
        "Steps that computed with some of a rearrangement's layers old and some new", (), _one("mixed_layer_steps"),
    ),
    _Row("trimtab_eplb_steps_total", "counter", "Steps on the controller's clock", (), _one("clock")),
    _Row("trimtab_eplb_steps_to_next", "gauge", "Steps until the next decision is due", (), _one("steps_to_next")),
    _Row(
        "trimtab_eplb_bandwidth_bytes_per_second", "gauge", "Into a rank, measured over all moves so far", (),
        _one("bandwidth"),
    ),
)  # fmt: skip


class SnapshotCollector:
    """What a Prometheus registry asks; `read` gives a snapshot, once per scrape. Called on: who scrapes."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        snapshot = self._read()
        sources: list[tuple[tuple[_Row, ...], Snapshot]] = [(ENGINE_ROWS, snapshot)]
        if "eplb" in snapshot:
            sources.append((EPLB_ROWS, snapshot["eplb"]))
        return [family for rows, source in sources for row in rows if (family := row.family(source)) is not None]


def exposition(read: Callable[[], Snapshot]) -> str:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(read))
    return generate_latest(registry).decode()


def metrics_table() -> str:
    """All of them for people, in Markdown."""
    rows = [
        f"| `{row.name}{'_info' if row.kind == 'info' else ''}` | {row.kind} "
        f"| {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |"
        for row in (*ENGINE_ROWS, *EPLB_ROWS)
    ]
    return "\n".join(["| metric | kind | labels | what |", "|---|---|---|---|", *rows])
