"""Metrics and events of an engine that serves and moves experts, as an operator reads them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint

LIMITS: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": "2MiB",
    "num_threads": 1, "dtype": "float32",
}  # fmt: skip
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[3 + index, 5, 7, 9] for index in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("metrics"))


def samples(llm: LLM) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(llm.metrics_text())
        for sample in family.samples
    }


def test_metrics_are_the_numbers_of_stats_and_the_log_says_what_moved(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eplb = {"num_redundant_experts": 2, "policy": "trimtab.testing.policies:ShufflingPolicy"}
    with LLM(
        str(checkpoint), data_parallel_size=2, enable_expert_parallel=True, distributed_executor_backend="threads",
        enable_eplb=True, eplb_config=eplb, **LIMITS,
    ) as llm:  # fmt: skip
        llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        with caplog.at_level(logging.INFO, "trimtab.events"):
            stats = llm.rearrange_experts()
        found = samples(llm)
        assert llm.stats()["memory_bytes"]["staging"] == found["trimtab_memory_bytes", ("staging",)] > 0
    assert found["trimtab_eplb_state", ("DONE",)] == 1
    assert found["trimtab_eplb_rearrangements_total", ("done",)] == stats["rearrangements"]["done"] == 1
    assert found["trimtab_eplb_moves_total", ("received",)] == stats["moves_by_kind"]["received"] > 0
    assert found["trimtab_eplb_moved_bytes_total", ("received",)] == stats["bytes"] > 0
    counted = [found["trimtab_eplb_step_seconds_count", (rearranging,)] for rearranging in ("yes", "no")]
    assert sum(counted) == found["trimtab_eplb_steps_total", ()] == stats["clock"]
    for layer, value in enumerate(stats["max_over_mean_by_layer"]):
        assert found["trimtab_eplb_layer_max_over_mean", (str(layer),)] == pytest.approx(value)
    began, done = (record.getMessage() for record in caplog.records if record.levelname == "INFO")
    assert began.startswith("began: transaction 1") and done.startswith("done: transaction 1")
    assert began.splitlines()[1:] == done.splitlines()[1:]  # what was planned is what came about
    assert f"{stats['moves']} slots get another expert in 2 layers" in done and "replica on rank" in done


def test_without_balancing_there_are_metrics_of_the_engine_alone(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **LIMITS) as llm:
        llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        found = samples(llm)
    assert found["trimtab_requests_unfinished", ()] == 0 and found["trimtab_weights_version", ()] == 0
    assert not any(name.startswith("trimtab_eplb") for name, _ in found)
