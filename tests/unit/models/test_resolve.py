from pathlib import Path

import pytest

from trimtab.models.resolve import resolve_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_demo_is_built_by_the_demo_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trimtab.models.demo.ensure_demo", lambda progress=None: tmp_path / "built")
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == tmp_path / "built"
    assert resolve_model("./demo") == Path("demo")


def test_a_hub_id_says_how_to_download_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B"):
        resolve_model("Qwen/Qwen3-30B-A3B")


def test_a_wrong_path_or_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\) does not exist; pass a folder"):
        resolve_model(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; name the folder"):
        resolve_model(tmp_path / "model.safetensors")
