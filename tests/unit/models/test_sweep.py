"""The sweep of all architectures: a few of each outcome, and that no crash of one ends it."""

from pathlib import Path

import pytest

from trimtab.models import network, sweep
from trimtab.models.sweep import SweepRow, run_sweep, sweep_names, to_markdown, try_architecture


def test_every_moe_family_is_found() -> None:
    names = sweep_names()
    assert {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "jamba"} <= set(names)
    assert "llama" not in names


@pytest.mark.parametrize(
    ("model_type", "status"),
    [("olmoe", "works"), ("phimoe", "works"), ("jamba", "refused"), ("deepseek_v32", "refused")],
)
def test_an_architecture_works_or_is_refused_by_name(tmp_path: Path, model_type: str, status: str) -> None:
    row = try_architecture(model_type, tmp_path)
    assert row.status == status, row
    if status == "works":
        assert row.largest_difference is not None and row.largest_difference <= sweep.TOLERANCE
    else:
        assert row.reason


def test_a_crash_or_a_hang_of_one_does_not_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import time

    def misbehave(model_type: str, directory: Path) -> SweepRow:
        if model_type == "dies":
            os._exit(3)
        if model_type == "hangs":
            time.sleep(600)
        return SweepRow(model_type, "Fine", "works")

    monkeypatch.setattr(sweep, "try_architecture", misbehave)
    seen: list[str] = []
    rows = run_sweep(["dies", "hangs", "fine"], lambda done, total, row: seen.append(f"{done}/{total}"), timeout_s=3.0)
    assert [row.status for row in rows] == ["broken", "broken", "works"]
    assert "exit code 3" in rows[0].reason and "longer than 3 s" in rows[1].reason
    assert seen == ["1/3", "2/3", "3/3"]


def test_an_error_that_is_not_a_refusal_is_broken(tmp_path: Path) -> None:
    row = try_architecture("no_such_family", tmp_path)
    assert row.status == "broken" and "no_such_family" in row.reason


def test_the_table_has_a_row_for_each_and_counts_them() -> None:
    rows = [SweepRow("b", "BForCausalLM", "refused", "BForCausalLM is not supported: a|b"), SweepRow("a", "A", "works")]
    table = to_markdown(rows)
    assert "1 of 2 work" in table
    assert table.index("| a | A | works |  |") < table.index("| b | BForCausalLM | refused | a\\|b |")


def test_what_is_refused_by_list_has_a_reason() -> None:
    assert all(reason for reason in network.REFUSED.values())
