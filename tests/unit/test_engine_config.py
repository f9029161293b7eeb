"""Options that only make sense together: each refusal beside the setting next to it that is accepted."""

from typing import Any

import pytest

from trimtab.config import EngineConfig

PLACED = {"enable_expert_parallel": True, "initial_placement": "p.json"}
BALANCED = {"enable_expert_parallel": True, "enable_eplb": True}


@pytest.mark.parametrize(
    ("refused", "message", "accepted"),
    [
        (
            {"data_parallel_size": 2},
            r"data_parallel_size \(2\) above 1 needs enable_expert_parallel.*switch it on or take one rank",
            {"data_parallel_size": 2, "enable_expert_parallel": True},
        ),
        (
            {"tensor_parallel_size": 4},
            r"tensor_parallel_size \(4\) above 1 needs enable_expert_parallel",
            {"tensor_parallel_size": 4, "enable_expert_parallel": True},
        ),
        (
            {"data_parallel_size": 0, "enable_expert_parallel": True},
            r"data_parallel_size \(0\) must be an integer in \[1, 1024\]; 1 is a single rank",
            {"data_parallel_size": 1, "enable_expert_parallel": True},
        ),
        (
            {"tensor_parallel_size": True, "enable_expert_parallel": True},
            r"tensor_parallel_size \(True\) must be an integer",
            {"tensor_parallel_size": 1},
        ),
        (
            {"data_parallel_size": 64, "tensor_parallel_size": 32, "enable_expert_parallel": True},
            r"data_parallel_size \(64\) \* tensor_parallel_size \(32\) must be at most 1024 ranks; lower one",
            {"data_parallel_size": 32, "tensor_parallel_size": 32, "enable_expert_parallel": True},
        ),
        (
            {"num_redundant_experts": 2, "enable_expert_parallel": True},
            r"num_redundant_experts \(2\) needs initial_placement",
            {"num_redundant_experts": 2, **PLACED},
        ),
        (
            {"num_redundant_experts": -1, **PLACED},
            r"num_redundant_experts \(-1\) must be an integer in \[0, 65536\]; 0 adds no replica",
            {"num_redundant_experts": 0, **PLACED},
        ),
        (
            {"initial_placement": "p.json"},
            r"initial_placement \('p.json'\) needs enable_expert_parallel",
            PLACED,
        ),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True, "distributed_executor_backend": "inline"},
            r"distributed_executor_backend \('inline'\) runs one rank, not 2; use 'mp' or 'threads'",
            {"enable_expert_parallel": True, "distributed_executor_backend": "inline"},
        ),
        (
            {"distributed_executor_backend": "ray"},
            r"distributed_executor_backend \('ray'\) must be one of None, 'inline', 'threads', 'mp'",
            {"distributed_executor_backend": "mp"},
        ),
        (
            {"all2all_backend": "nccl"},
            r"all2all_backend \('nccl'\) must be one of None, 'shared_memory', 'gloo'",
            {"all2all_backend": "gloo"},
        ),
        (
            {"enable_eplb": True},
            "enable_eplb needs enable_expert_parallel.*switch it on",
            BALANCED,
        ),
        (
            {"enable_expert_parallel": True, "eplb_config": {"window_size": 5}},
            r"eplb_config \({'window_size': 5}\) needs enable_eplb; switch it on or leave it out",
            {**BALANCED, "eplb_config": {"window_size": 5}},
        ),
        (
            {**BALANCED, "model_runner": "v1"},
            "enable_eplb needs model_runner 'v2'",
            {**BALANCED, "model_runner": "v2"},
        ),
        (
            {"model_runner": "v1", "eplb_config": {}},
            "eplb_config needs model_runner 'v2'",
            {"model_runner": "v1", "eplb_config": None},
        ),
        (
            {**BALANCED, "eplb_config": {"windowsize": 5}},
            "'windowsize' is no key of eplb_config; did you mean window_size",
            {**BALANCED, "eplb_config": {}},
        ),
        (
            {**BALANCED, "num_redundant_experts": 2, "eplb_config": {"num_redundant_experts": 4}},
            r"num_redundant_experts \(2\) and eplb_config's num_redundant_experts \(4\) are one setting; give it once",
            {**BALANCED, "num_redundant_experts": 2},
        ),
        (
            {**BALANCED, "eplb_config": [5]},
            r"eplb_config \(\[5\]\) must be a mapping",
            {**BALANCED, "eplb_config": {"num_redundant_experts": 2}},
        ),
    ],
)
def test_setting_is_refused_by_name_and_its_neighbour_accepted(
    refused: dict[str, Any], message: str, accepted: dict[str, Any]
) -> None:
    """B34: one of data and tensor parallel above 1 is enough for expert parallelism to mean something; expert
    parallelism on one rank is accepted and changes nothing."""
    with pytest.raises(ValueError, match=message):
        EngineConfig(**refused)
    config = EngineConfig(**accepted)
    assert all(getattr(config, name) == value for name, value in accepted.items())


def test_ranks_are_processes_unless_there_is_one() -> None:
    assert EngineConfig().executor_backend == "inline"
    several = {"data_parallel_size": 2, "tensor_parallel_size": 3, "enable_expert_parallel": True}
    assert EngineConfig(**several).num_ranks == 6 and EngineConfig(**several).executor_backend == "mp"
    assert EngineConfig(distributed_executor_backend="threads", **several).executor_backend == "threads"
