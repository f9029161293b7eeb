"""Experts move while the engine serves, all the time: the same tokens and log-probabilities as one rank gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eplb_watch import LIMITS, SAMPLING, Watch, balanced, prompts

from trimtab import LLM
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.movement.verify import SlotMismatchError
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint

# torch multiplies by a router of fewer than 32 rows otherwise in another batch: a last bit, and no matter of placement.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen3_moe": {}, "deepseek_v3": {"n_routed_experts": 32}, "gpt_oss": {}
}  # fmt: skip
NUM_PROMPTS = 24  # some 170 steps of four sequences, as often as it takes


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
        with LLM(str(checkpoint), **LIMITS | {"max_num_seqs": 8}) as llm:
            found[family] = llm.generate(prompts(NUM_PROMPTS), SAMPLING, use_tqdm=False)
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, {"data_parallel_size": 2}) for family in FAMILIES),
        ("mixtral", {"data_parallel_size": 4, "max_num_seqs": 1}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "max_num_seqs": 4}),
        ("mixtral", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else "-".join(f"{name[:1]}p{size}" for name, size in value.items() if "parallel" in name)
    ),
)
def test_rule_11_tokens_and_logprobs_stay_bitwise_the_same_while_experts_always_move(
    checkpoints: dict[str, Path],
    expected: dict[str, list[RequestOutput]],
    family: str,
    layout: dict[str, int],
) -> None:
    """Rule 11, 500 steps with a transaction open: all ranks commit a layer in the same step plan, and outputs are the
    oracle's at every step between, of tokens that ranks share as well."""
    with balanced(checkpoints[family], **layout) as llm:
        watch = Watch(llm)
        watch.run_until(
            lambda: watch.num_open >= 500 and watch.num_commits > 60, prompts(NUM_PROMPTS), expected[family]
        )
        stats = llm.eplb_stats()
    assert stats["rearrangements"]["aborted"] == stats["rearrangements"]["failed"] == 0
    assert stats["moves"] > 100 and stats["mixed_layer_steps"] > 10 and watch.most_replicas > 1


class StrictWatch(Watch):
    """Computes everything anew that is derived from a placement, whenever a commit has changed it."""

    def check(self) -> None:
        super().check()  # checksums of all slots
        assert {rank.placement.digest() for rank in self.ranks} == {self.llm._controller().placement.digest()}
        assert len({id(rank.placement) for rank in self.ranks}) == len(self.ranks), "each rank has its own"
        for model in self.llm._parts.models:
            for ordinal, layer in enumerate(model.moe_layers):
                live = layer.routing_table
                anew = RoutingTable(self.placement, ordinal, live.token_group)
                assert torch.equal(live.slots, anew.slots) and live._identity == anew._identity


@pytest.mark.parametrize("layout", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2, "max_num_seqs": 4}], ids=str)
def test_rule_01_after_every_commit_lookups_digests_and_slots_are_what_the_placement_says(
    checkpoints: dict[str, Path], expected: dict[str, list[RequestOutput]], layout: dict[str, int]
) -> None:
    """And each of the three is seen where it is not so."""
    with balanced(checkpoints["mixtral"], **layout) as llm:
        watch = StrictWatch(llm)
        watch.run_until(
            lambda: watch.num_commits > 10 and watch.most_replicas > 1, prompts(16), expected["mixtral"][:16]
        )
        watch.check()
        table = llm._parts.models[1].moe_layers[0].routing_table.slots
        other = table.roll(1, 0)
        before = table.clone()
        table.copy_(other)
        with pytest.raises(AssertionError):
            watch.check()
        table.copy_(before)
        rank, placement = watch.ranks[1], watch.ranks[1].placement
        shifted = type(placement)(placement.topology, (placement.slot_to_expert + 1) % placement.topology.num_experts)
        rank.placement = shifted
        with pytest.raises(AssertionError):
            watch.check()
        with pytest.raises(SlotMismatchError):
            rank.mover.check_slots(shifted)  # type: ignore[attr-defined]
        rank.placement = placement
        watch.check()
