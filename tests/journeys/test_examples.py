"""Every example runs, on a tiny checkpoint, and stays short enough to read at a glance."""

import runpy
from pathlib import Path

import pytest

from trimtab.testing.checkpoints import make_tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_LINE = {
    "offline_generate.py": "tokens, ended by",
    "chat_stream.py": "first token after",
    "expert_usage.py": "of the tokens go to other experts",
    "prefix_caching.py": "of all prompt tokens",
    "rebalance_live.py": "8 of 8 answers are the same, token by token",
    "replay_training.py": "with replay       0.00% of rows use other experts",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    # The tiny tokenizer reads bytes, so texts are long.
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_checkpoint(folder, with_tokenizer=True, max_position_embeddings=2048)


def test_every_example_is_known_here_and_under_sixty_lines():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(LAST_LINE)
    for name in LAST_LINE:
        assert len((EXAMPLES / name).read_text().splitlines()) < 60, name


@pytest.mark.parametrize("name", LAST_LINE)
def test_the_example_runs_and_prints_what_it_promises(name, checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, str(checkpoint)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert LAST_LINE[name] in printed
    assert "failed" not in printed


def test_the_prefix_caching_example_finds_the_shared_text(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prefix_caching.py", str(checkpoint)])
    runpy.run_path(str(EXAMPLES / "prefix_caching.py"), run_name="__main__")
    first, second = (int(line.split()[2]) for line in capsys.readouterr().out.splitlines()[:2])
    assert first == 0
    assert second > 800
