"""What balancing is refused with; each refused row has an accepted twin."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from trimtab.experts.control.support import ExecutionFacts, support_table, unsupported

# field -> (accepted, refused, what the reason names)
ROWS: dict[str, tuple[list[Any], list[Any], str]] = {
    "model_runner": (["v2"], ["v1"], r"model_runner ('v1')"),
    "enable_expert_parallel": ([True], [False], "enable_expert_parallel (False)"),
    "num_ranks": ([2, 8], [1], "data_parallel_size * tensor_parallel_size (1)"),
    "executor": (["threads", "mp"], ["inline", "ray"], "distributed_executor_backend ("),
    "dispatcher": (["shared_memory", "gloo"], ["local", "nccl"], "all2all_backend ("),
    "communicator": (["torch_gloo", "shared_memory"], ["nixl"], "eplb_config.communicator ('nixl')"),
    "async_depth": ([1, 2], [0, 3], "async_depth ("),
    "expert_format": (["float32", "bfloat16", "int8"], ["mxfp4"], "experts in format 'mxfp4'"),
    "kernel": (["native", "portable", "reference"], ["marlin"], "with kernel 'marlin'"),
    "experts_per_layer": ([(4,), (8, 8, 8)], [(), (8, 4)], "experts and must have 8 as layer 0"),
}


def test_every_fact_has_accepted_and_refused_values() -> None:
    assert set(ROWS) == {field.name for field in fields(ExecutionFacts)}
    assert unsupported(ExecutionFacts()) == []


@pytest.mark.parametrize("name", ROWS)
def test_each_refused_row_has_an_accepted_twin(name: str) -> None:
    """B34, B55: refused at the start, by key, value and what is allowed; the other values pass."""
    accepted, refused, named = ROWS[name]
    for value in accepted:
        assert unsupported(replace(ExecutionFacts(), **{name: value})) == []
    for value in refused:
        reasons = unsupported(replace(ExecutionFacts(), **{name: value}))
        assert len(reasons) == 1 and "must" in reasons[0] and ";" in reasons[0]
    assert named in reasons[0]


def test_all_reasons_are_given_at_once() -> None:
    facts = ExecutionFacts(model_runner="v1", num_ranks=1, enable_expert_parallel=False)
    assert [reason.split(" ")[0] for reason in unsupported(facts)] == [
        "model_runner", "enable_expert_parallel", "data_parallel_size",
    ]  # fmt: skip


def test_a_format_nobody_admitted_is_refused() -> None:
    """B56: default deny; a new format is refused until it is on the list of those that passed the suite."""
    assert unsupported(ExecutionFacts(expert_format="toy", kernel="native"))
    assert unsupported(ExecutionFacts(expert_format="float16", kernel="native"))
    assert unsupported(ExecutionFacts(expert_format="float16", kernel="portable")) == []


def test_the_table_of_the_docs_has_a_row_per_rule() -> None:
    table = support_table().splitlines()
    assert table[0] == "| with `enable_eplb` | supported |" and len(table) == 2 + 9
    assert "| `async_depth` | 1 to 2 |" in table
