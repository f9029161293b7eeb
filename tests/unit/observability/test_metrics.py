"""Metrics as a Prometheus server reads them, from a snapshot made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trimtab.observability.metrics import ENGINE_ROWS, EPLB_ROWS, EPLB_STATES, exposition, metrics_table

DURATIONS = {"num": 3, "total_s": 0.06, "bounds_s": (0.01, 0.02), "counts": [1, 0, 2]}
EPLB: dict[str, Any] = {
    "state": "STAGING(3)", "balancedness": 0.5, "predicted_balancedness": 0.9, "max_over_mean_by_layer": [1.5, 2.0],
    "rearrangements": {"done": 4, "aborted": 1, "declined": 2, "failed": 0},
    "moves_by_kind": {"received": 7, "copied": 3}, "bytes_by_kind": {"received": 7000, "copied": 3000},
    "planning_s": 0.1, "staging_s": 0.2, "committing_s": 0.3, "mixed_layer_steps": 5, "clock": 90, "steps_to_next": 10,
    "step_times": {"rearranging": DURATIONS, "at_rest": DURATIONS}, "bandwidth": 1e9,
}  # fmt: skip
SNAPSHOT: dict[str, Any] = {
    "model": 'Mix"tral', "max_model_len": 128, "num_unfinished": 2, "num_preemptions": 1,
    "ranks": [{"num_unfinished": 3}, {"num_unfinished": 0}],
    "kv_cache": {"block_size": 32, "num_blocks": 10, "num_free_blocks": 6},
    "prefix_cache": {"num_queried_tokens": 100, "num_hit_tokens": 40, "hit_rate": 0.4},
    "memory_bytes": {"weights": 1000, "kv_cache": 500}, "start_up_s": {"plan": 0.5}, "weights_version": 2,
}  # fmt: skip


def samples(**changes: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    text = exposition(lambda: SNAPSHOT | changes)
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_snapshots_numbers_are_read_back_by_prometheus_own_parser() -> None:
    found = samples(eplb=EPLB)
    assert found["trimtab_requests_unfinished", ()] == 2
    assert found["trimtab_rank_sequences_unfinished", ("0",)] == 3
    assert found["trimtab_kv_cache_blocks", ("used",)] == 4
    assert found["trimtab_prefix_cache_hit_tokens_total", ()] == 40
    assert found["trimtab_memory_bytes", ("kv_cache",)] == 500
    assert found["trimtab_model_info", ('Mix"tral', "128")] == 1
    assert found["trimtab_eplb_rearrangements_total", ("aborted",)] == 1
    assert found["trimtab_eplb_moved_bytes_total", ("copied",)] == 3000
    assert found["trimtab_eplb_layer_max_over_mean", ("1",)] == 2.0
    assert found["trimtab_eplb_seconds_total", ("committing",)] == 0.3


def test_step_times_are_a_histogram_whose_classes_hold_those_below() -> None:
    found = samples(eplb=EPLB)
    buckets = [found["trimtab_eplb_step_seconds_bucket", (bound, "yes")] for bound in ("0.01", "0.02", "+Inf")]
    assert buckets == [1, 1, 3]
    assert found["trimtab_eplb_step_seconds_count", ("yes",)] == 3
    assert found["trimtab_eplb_step_seconds_sum", ("no",)] == 0.06


@pytest.mark.parametrize("state", [*EPLB_STATES, "ABORTING(layer 3, rank 1: slow (very))"])
def test_exactly_one_state_is_on(state: str) -> None:
    found = samples(eplb=EPLB | {"state": state})
    on = [labels for (name, labels), value in found.items() if name == "trimtab_eplb_state" and value]
    assert on == [(state.partition("(")[0],)]


def test_what_is_not_known_yet_and_what_is_off_have_no_samples() -> None:
    assert not any(name.startswith("trimtab_eplb") for name, _ in samples())
    young = samples(eplb=EPLB | {"predicted_balancedness": None})
    assert ("trimtab_eplb_predicted_balancedness", ()) not in young


def test_names_follow_prometheus_conventions_and_the_table_has_them_all() -> None:
    table = metrics_table()
    for row in (*ENGINE_ROWS, *EPLB_ROWS):
        assert row.name.startswith("trimtab_") and (row.kind == "counter") == row.name.endswith("_total"), row.name
        assert f"| `{row.name}" in table


def test_each_scrape_reads_anew() -> None:
    seen: list[int] = []

    def read() -> dict[str, Any]:
        seen.append(len(seen))
        return SNAPSHOT | {"num_unfinished": len(seen)}

    assert "trimtab_requests_unfinished 1.0" in exposition(read)
    assert "trimtab_requests_unfinished 2.0" in exposition(read)
