"""Experts move while the engine serves, all the time: the same tokens and log-probabilities as one rank gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab import LLM, SamplingParams
from trimtab.experts.balancer import RankBalancer
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint

# torch multiplies by a router of fewer than 32 rows otherwise in another batch: a last bit, and no matter of placement.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen3_moe": {}, "deepseek_v3": {"n_routed_experts": 32}, "gpt_oss": {}
}  # fmt: skip
LIMITS: dict[str, Any] = {
    "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": "4MiB",
    "num_threads": 1, "dtype": "float32",
}  # fmt: skip
SHUFFLE: dict[str, Any] = {
    "window_size": 1, "step_interval": 1, "num_redundant_experts": 4, "min_gain": 0,
    "policy": "trimtab.testing.policies:ShufflingPolicy",
}  # fmt: skip
SAMPLING = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)


def prompts(count: int, seed: int = 7) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 90, random.integers(1, 40)).tolist() for _ in range(count)]


@contextmanager
def balanced(checkpoint: Path, eplb: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    options = {"distributed_executor_backend": "threads", "enable_expert_parallel": True, **LIMITS, **options}
    with LLM(str(checkpoint), enable_eplb=True, eplb_config={**SHUFFLE, **(eplb or {})}, **options) as llm:
        yield llm


def rank_balancers(llm: LLM) -> list[RankBalancer]:
    return [worker.runner.balancer for worker in llm._parts.workers]  # type: ignore[attr-defined]


class Watch:
    """Runs requests step by step and looks at every rank's slots, lookups and placement after each."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.ranks = rank_balancers(llm)
        self.num_steps = self.num_open = self.num_commits = self.most_replicas = 0
        self.placement = self.ranks[0].placement

    def run(self, token_ids: list[list[int]], sampling: SamplingParams = SAMPLING) -> list[RequestOutput]:
        engine, finished = self.llm.engine, {}
        for index, prompt in enumerate(token_ids):
            engine.add_request(str(index), prompt, sampling)
        while engine.has_unfinished:
            for output in engine.step():
                assert output.error is None, output.error
                if output.finished:
                    finished[int(output.request_id)] = output
            self.look()
        return [finished[index] for index in range(len(token_ids))]

    def look(self) -> None:
        self.num_steps += 1
        self.num_open += self.llm.eplb_stats()["state"] not in ("IDLE", "DONE", "ABORTED")
        (digest,) = {rank.placement.digest() for rank in self.ranks}
        if digest != self.placement.digest():
            self.num_commits += 1
            self.placement = self.ranks[0].placement
            self.most_replicas = max(self.most_replicas, int(self.placement.replica_counts().max()))
            self.check()

    def check(self) -> None:
        """Rule 1: slots hold their experts' bytes, lookups are what the placement says."""
        for rank, model in zip(self.ranks, self.llm._parts.models, strict=True):
            rank.mover.check_slots(self.placement)  # type: ignore[attr-defined]
            for ordinal, layer in enumerate(model.moe_layers):
                for expert, slots in enumerate(self.placement.expert_to_slots(ordinal)):
                    assert set(layer.routing_table.slots[expert].tolist()) == set(slots)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, **sizes)
        for family, sizes in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[RequestOutput]]:
    found = {}
    for family, checkpoint in checkpoints.items():
        with LLM(str(checkpoint), **LIMITS) as llm:
            found[family] = llm.generate(prompts(60), SAMPLING, use_tqdm=False)
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, {"data_parallel_size": 2}) for family in FAMILIES),
        ("mixtral", {"data_parallel_size": 4}),
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("deepseek_v3", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(f"{name[:1]}p{size}" for name, size in value.items())
    ),
)
def test_tokens_and_logprobs_stay_bitwise_the_same_while_experts_always_move(
    checkpoints: dict[str, Path],
    expected: dict[str, list[RequestOutput]],
    family: str,
    layout: dict[str, int],
) -> None:
    """Rule 11: all ranks commit a layer in the same step plan, and outputs are the oracle's at every step between."""
    with balanced(checkpoints[family], **layout) as llm:
        watch = Watch(llm)
        outputs = watch.run(prompts(60))
        stats = llm.eplb_stats()
    for found, wanted in zip(outputs, expected[family], strict=True):
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
    assert stats["rearrangements"]["aborted"] == stats["rearrangements"]["failed"] == 0
    assert watch.num_commits > watch.num_steps / 8 and watch.num_open > watch.num_steps / 2
    assert stats["moves"] > 100 and stats["mixed_layer_steps"] > 10 and watch.most_replicas > 1
