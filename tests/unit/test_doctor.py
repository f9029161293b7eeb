"""The doctor finds what is wrong: each fault is put in by hand, and the diagnosis must name its anchor and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.cli.doctor import doctor, facts_of, show
from trimtab.doctor import (
    ANCHORS,
    LOAD,
    SELECTION,
    SUPPORT,
    WEIGHTS,
    Anchor,
    Diagnosis,
    Patient,
    diagnose,
    examine,
    session_config,
    start,
    support_problems,
)
from trimtab.experts.control import support
from trimtab.models.spec import read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("doctor"))


def examined(checkpoint: Path, fault: Callable[[Patient], None] = lambda patient: None) -> Diagnosis:
    config = session_config(checkpoint, read_spec(checkpoint, "float32", None), "float32", None)
    with start(config) as patient:
        fault(patient)
        return examine(patient)


def doors(patient: Patient, rank: int) -> list[Any]:
    """What a commit of this rank writes, by layer."""
    found: list[Any] = list(patient.ranks[rank]._layers)
    return found


def stale_selection(patient: Patient) -> None:
    """A rank whose look-ups do not follow commits."""
    for door in doors(patient, 1):
        door.refresh = lambda placement: None


def skipped_install(patient: Patient) -> None:
    """A commit that forgets the bytes."""
    for door in doors(patient, 1):
        door.storage.install = lambda slot, prepared: None


def one_slot_off(patient: Patient) -> None:
    """Load is counted for the slot beside the one that computes."""
    load: Any = patient.ranks[0]._load
    fold = load.fold

    def shifted(placement: Any) -> Any:
        load.counts.copy_(load.counts.roll(1, dims=1))
        return fold(placement)

    load.fold = shifted


def padding_counted(patient: Patient) -> None:
    """A token that is none counts as load."""
    load: Any = patient.ranks[0]._load
    fold = load.fold

    def padded(placement: Any) -> Any:
        folded = fold(placement)
        folded[:, 0] += 1
        return folded

    load.fold = padded


def exchanged_lookup(patient: Patient) -> None:
    """A look-up that is made anew: whatever holds the old tensor does not see it."""
    for door, layer in zip(doors(patient, 0), patient.parts.models[0].moe_layers, strict=True):
        refresh = door.refresh

        def renewed(placement: Any, refresh: Any = refresh, table: Any = layer.routing_table) -> None:
            table.slots = table.slots.clone()
            refresh(placement)

        door.refresh = renewed


@pytest.mark.parametrize(
    ("fault", "anchor", "words"),
    [
        (stale_selection, SELECTION, "rank 1: "),
        (exchanged_lookup, SELECTION, "the look-up's tensor is another one"),
        (skipped_install, WEIGHTS, "rank 1: "),
        (one_slot_off, LOAD, "were recorded and"),
        (padding_counted, LOAD, "pairs were recorded of"),
    ],
)
def test_a_fault_is_found_at_its_anchor(
    checkpoint: Path, fault: Callable[[Patient], None], anchor: Anchor, words: str
) -> None:
    diagnosis = examined(checkpoint, fault)
    assert not diagnosis.is_healthy and diagnosis.cause is not None
    assert diagnosis.cause.anchor is anchor, diagnosis.findings
    assert any(words in detail for detail in diagnosis.cause.details), diagnosis.cause.details
    before = ANCHORS[: ANCHORS.index(anchor)]
    assert [finding.status for finding in diagnosis.findings][: len(before)] == ["passed"] * len(before)


def test_a_healthy_model_passes_and_experts_really_moved(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    diagnosis = examined(checkpoint)
    assert diagnosis.is_healthy and diagnosis.cause is None, diagnosis.findings
    session = diagnosis.session
    assert session["moves"] > 8 and session["mixed_layer_steps"] > 0 and session["rearrangements"]["done"] == 2
    show("tiny", diagnosis)
    printed = capsys.readouterr().out
    assert printed.count("✓") == 4 and "healthy: experts move" in printed
    assert json.loads(json.dumps(facts_of("tiny", diagnosis)))["cause"] is None


def test_a_refused_start_shows_the_support_table_and_the_reason(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the storage formats is admitted any more: default deny, and the words say so."""
    monkeypatch.setattr(support, "MOVABLE", frozenset())
    assert doctor(model=str(checkpoint)) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "refused start: look at the support table" in printed and "this model is refused" in printed
    assert "distributed_executor_backend" in printed and "not reached" in printed


def test_a_table_that_admits_what_must_be_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert support_problems() == []
    monkeypatch.setattr(support, "ADMITTED_EXECUTORS", ("threads", "mp", "inline"))
    assert support_problems() == ["executor 'inline' is not refused by its name"]


def test_redundant_slots_divide_over_the_ranks_and_a_missing_model_is_the_users_mistake(tmp_path: Path) -> None:
    six_experts = make_tiny_checkpoint(tmp_path / "odd", "qwen3_moe", num_experts=6, num_experts_per_tok=2)
    config = session_config(six_experts, read_spec(six_experts, "float32", None), "float32", None)
    assert config.redundant_experts == 2  # (6 + 2) slots divide over two ranks
    with pytest.raises(ValueError, match="nowhere"):
        diagnose(str(tmp_path / "nowhere"))


def test_the_doctor_points_at_files_that_exist() -> None:
    for anchor in ANCHORS:
        assert all((ROOT / file).exists() for file in anchor.files), anchor
    assert SUPPORT in ANCHORS and np.all([anchor.look_at for anchor in ANCHORS])
