"""`trimtab replay`: how shares read, and what is refused before a model is loaded."""

from pathlib import Path

import pytest

from trimtab.cli.main import EXIT_USER_ERROR, run
from trimtab.cli.replay import percent


def test_a_share_that_is_not_whole_never_reads_as_if_it_were() -> None:
    assert [percent(share) for share in (0.0, 1.0, 0.5)] == ["0%", "100%", "50.00%"]
    assert percent(1e-9) == "0.01%" and percent(1 - 1e-9) == "99.99%"


def test_a_file_that_is_none_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.cli.replay.load_trainer", None)  # would fail when called
    assert run(["replay", "demo", str(tmp_path / "none.safetensors")]) == EXIT_USER_ERROR
    assert "is not a file" in capsys.readouterr().err


def test_writing_routes_needs_an_engine_that_stores_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B70: a missing flag is named at once, not by a trainer later."""
    monkeypatch.setattr("trimtab.cli.generate.open_llm", None)
    argv = ["generate", "--prompt", "x", "--return-routed-experts"]
    assert run([*argv, str(tmp_path / "r.safetensors")]) == EXIT_USER_ERROR
    assert "add --enable-return-routed-experts" in capsys.readouterr().err
    assert run([*argv, str(tmp_path), "--enable-return-routed-experts"]) == EXIT_USER_ERROR
    assert "is a folder; name a file in it" in capsys.readouterr().err
