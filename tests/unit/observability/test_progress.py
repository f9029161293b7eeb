"""Progress is drawn for people at a terminal, and for nobody else."""

import io

from trimtab.observability.progress import progress_bar


def test_nothing_is_drawn_when_stderr_is_no_terminal(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with progress_bar("loading") as progress:
        progress("layer 1", 1, 2)
    assert stderr.getvalue() == ""


def test_a_terminal_gets_a_bar_with_title_and_stage(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("loading") as progress:
        progress("layer 1", 1, 2)
    assert "loading" in stderr.getvalue()
    assert "layer 1" in stderr.getvalue()
    assert "50%" in stderr.getvalue()
