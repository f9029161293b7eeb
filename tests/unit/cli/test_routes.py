"""`trimtab routes`: the picture, the table and what is refused, on files made by hand."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trimtab.cli.main import EXIT_USER_ERROR, run
from trimtab.cli.routes import entropies
from trimtab.replay import RoutedModel, Routes, save_routes

MODEL = RoutedModel("hand made", "TinyForCausalLM", num_experts=4, top_k=2, layer_ids=(1, 2), num_hidden_layers=3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Layer 1 uses experts 0 and 1 alone; layer 2 uses all four alike."""
    first = np.array([[[0, 1], [0, 1]], [[1, 0], [2, 3]], [[0, 1], [1, 0]], [[1, 0], [3, 2]]])
    completions = [Routes(MODEL, first, np.arange(5), 2, request_id="a"), Routes(MODEL, first[:2], np.arange(3), 2)]
    return save_routes(tmp_path / "routes.safetensors", completions)


def size_of(png: Path) -> tuple[int, int]:
    header = png.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_entropy_is_zero_for_one_expert_and_log2_for_an_even_spread() -> None:
    assert entropies(np.array([[5, 0, 0, 0], [3, 3, 3, 3], [4, 4, 0, 0], [0, 0, 0, 0]])).tolist() == [0, 2, 1, 0]


def test_json_counts_all_completions_per_layer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["routes", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_completions"], facts["num_rows"], facts["bytes_per_row"]) == (2, 6, 4)
    first, second = facts["layers"]
    assert (first["layer_id"], first["entropy_bits"], first["unused_experts"]) == (1, 1.0, 2)
    assert first["busiest"][:2] == [{"expert": 0, "share": 0.5}, {"expert": 1, "share": 0.5}]
    assert second["layer_id"] == 2 and second["unused_experts"] == 0
    assert second["effective_experts"] == pytest.approx(4, abs=0.1)
    assert facts["picture"] == str(file.with_suffix(".png"))
    assert size_of(file.with_suffix(".png"))[0] == 2112


def test_the_table_fits_eighty_columns_and_names_the_picture(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new folder" / "a.png"
    assert run(["routes", str(file), "--output", str(picture), "--start", "1", "--num-tokens", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert any(line.split()[:4] == ["1", "1.00", "bits", "2.0"] for line in lines)
    assert str(picture) in lines[-1] and "request a completion 0" in lines[-1]
    assert size_of(picture)[1] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--completion", "2"], "completion (2) must be in [0, 2)"),
        (["--start", "4"], "start (4) must be in [0, 4), the rows of request a"),
        (["--start", "-1"], "start (-1) must be at least 0"),
        (["--num-tokens", "0"], "num_tokens (0) must be at least 1"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    file: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["routes", str(file), *argv]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


def test_a_completion_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B71"""
    empty = Routes(MODEL, np.zeros((0, 2, 2), np.uint8), np.arange(3), 3, finish_reason="abort", request_id="gone")
    assert run(["routes", str(save_routes(tmp_path / "r.safetensors", [empty]))]) == EXIT_USER_ERROR
    assert "request gone completion 0 has no row of routed experts to draw" in capsys.readouterr().err


def test_reading_and_drawing_need_no_torch(file: Path) -> None:
    code = (
        "import sys; from trimtab.cli.routes import routes; from pathlib import Path; "
        f"routes(Path({str(file)!r}), json_lines=True); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_many_layers_and_experts_are_drawn(tmp_path: Path) -> None:
    from trimtab.cli.routes_figure import save_routes_figure

    model = RoutedModel("big", "A", num_experts=256, top_k=8, layer_ids=tuple(range(3, 43)), num_hidden_layers=43)
    rows = np.argsort(np.random.default_rng(0).random((30, 40, 256)), axis=-1)[..., :8]
    picture = save_routes_figure(Routes(model, rows, np.arange(31), 25), tmp_path / "big.png", num_tokens=28)
    width, height = size_of(picture)
    assert width == 2112 and 1200 < height < 2000
