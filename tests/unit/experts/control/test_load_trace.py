"""The load on disk: whole after every window, and read back as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from trimtab.experts.control.load_trace import LoadTrace, TraceMetadata, placement_mark, read_load_trace
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

PLACEMENT = Placement(Topology(3, 1, 2), [[0, 1, 2, 0], [0, 1, 2, 1]])
METADATA = TraceMetadata("tiny", 2, 3, "decode", 16, PLACEMENT.digest())


def load(start: int) -> ExpertLoad:
    return ExpertLoad(np.arange(start, start + 6).reshape(2, 3), 16)


def test_windows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    trace = LoadTrace(str(path), METADATA)
    for index in range(3):
        trace.append(load(10 * index), PLACEMENT, end_step=100 * index)
        metadata, loads, facts = read_load_trace(path)  # whole also while it is being written
        assert len(loads) == index + 1
    trace.close()
    assert [found.counts.tolist() for found in loads] == [load(10 * i).counts.tolist() for i in range(3)]
    mark = placement_mark(PLACEMENT.digest())
    assert facts.tolist() == [[0, 16, mark], [100, 16, mark], [200, 16, mark]] and mark >= 0
    assert metadata["model"] == "tiny" and metadata["phase"] == "decode" and metadata["window_size"] == "16"


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    trace = LoadTrace(str(path), METADATA)
    with safe_open(path, "numpy") as opened:
        assert opened.get_tensor("windows").shape == (0, 9)
    trace.append(load(1), PLACEMENT, end_step=7)
    trace.close()
    with safe_open(path, "numpy") as opened:
        assert opened.get_tensor("windows")[0].tolist()[3:] == [1, 2, 3, 4, 5, 6]
        assert opened.metadata()["format"] == "trimtab-load"


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    path.write_text("precious")
    with pytest.raises(ValueError, match=r"record_load \(.*\) exists; name another file or remove it"):
        LoadTrace(str(path), METADATA)
    with pytest.raises(ValueError, match=r"record_load \(.*\) cannot be written: No such file or directory"):
        LoadTrace(str(tmp_path / "none" / "trace"), METADATA)
    assert path.read_text() == "precious"


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for content in (b"", b"short", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no trace of loads"):
            read_load_trace(path)
