"""Placements on disk: there and back, and every mistake named with its layer and rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.experts.placement import Placement, Topology
from trimtab.experts.placement_file import read_placement, write_placement

TOPOLOGY = Topology(4, 2, num_ranks=2)
LAYERS = [[[0, 1, 2], [3, 0, 1]], [[3, 3, 3], [0, 1, 2]]]


def write(folder: Path, **changes: Any) -> Path:
    content = {"format": "trimtab-placement", "version": 1, "num_experts": 4, "layers": LAYERS} | changes
    path = folder / "placement.json"
    path.write_text(json.dumps(content))
    return path


def test_a_placement_comes_back_as_it_was_written(tmp_path: Path) -> None:
    slots = [[0, 1, 2, 3, 0, 1], [3, 3, 3, 0, 1, 2]]
    placement = Placement(TOPOLOGY, slots, [[1, 1, 1, 1, 3, 1], [2, 2, 1, 1, 1, 1]])
    write_placement(placement, tmp_path / "placement.json")
    assert read_placement(tmp_path / "placement.json", TOPOLOGY, 2) == placement
    assert [path.name for path in tmp_path.iterdir()] == ["placement.json"]


def test_shares_are_equal_where_the_file_gives_none(tmp_path: Path) -> None:
    placement = read_placement(write(tmp_path), TOPOLOGY, 2)
    assert placement.slot_to_expert.tolist() == [[0, 1, 2, 3, 0, 1], [3, 3, 3, 0, 1, 2]]
    assert (placement.shares == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [LAYERS[0], [[3, 3, 3, 2], [0, 1]]]}, r"layer 1, rank 0 has 4 slots and must have 3"),
        ({"layers": [[[0, 1, 2], [3, 0]], LAYERS[1]]}, r"layer 0, rank 1 has 2 slots .*num_redundant_experts"),
        ({"layers": LAYERS[:1]}, r"\(1 layers\) must list the 2 MoE layers of the model; layer 1 is the first missing"),
        ({"layers": [*LAYERS, LAYERS[0]]}, r"\(3 layers\) must list the 2 MoE layers"),
        ({"layers": [LAYERS[0], [[3, 3, 3], [0, 1, 1]]]}, r"layer 1 has no slot for expert 2"),
        ({"layers": [LAYERS[0], [[3, 3, 3], [0, 1, 4]]]}, r"layer 1, rank 1: expert 4 must be in \[0, 4\)"),
        ({"layers": [[[0, 1, -1], [3, 0, 1]], LAYERS[1]]}, r"layer 0, rank 0: expert -1"),
        ({"layers": [[[0, 1, 2, 3, 0, 1]], LAYERS[1]]}, r"layer 0 \(1 ranks\) must list the slots of 2 ranks"),
        ({"layers": [[[0, 1, 2.0], [3, 0, 1]], LAYERS[1]]}, r"layer 0, rank 0 must be a list of integers"),
        ({"layers": [[[0, 1, True], [3, 0, 1]], LAYERS[1]]}, r"layer 0, rank 0 must be a list of integers"),
        ({"layers": None}, r'"layers" \(NoneType\) must list'),
        ({"shares": [[[1, 1, 1], [1, 1]], LAYERS[1]]}, r'"shares", layer 0, rank 1 has 2 slots'),
        ({"shares": [[[1, 1, 1], [1, 0, 1]], [[1] * 3] * 2]}, r"shares\[0, 4\] \(0\) must be at least 1"),
        ({"num_experts": 8}, r'"num_experts" \(8\) must be 4, as in the model'),
        ({"version": 2}, r'"version" \(2\) must be 1'),
        ({"format": "other"}, r'"format" must be "trimtab-placement"'),
        ({"layer": []}, r"'layer' is no key of a placement"),
    ],
)
def test_a_wrong_file_is_refused_naming_layer_and_rank(tmp_path: Path, changes: dict, message: str) -> None:
    """B38: unequal ranks, missing experts and missing layers, before any weight is read."""
    path = write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_placement(path, TOPOLOGY, 2)
    assert str(path) in str(caught.value)


def test_a_file_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.json\) cannot be read: No such file"):
        read_placement(tmp_path / "missing.json", TOPOLOGY, 2)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json\) is not valid JSON"):
        read_placement(tmp_path / "bad.json", TOPOLOGY, 2)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="another kind of file"):
        read_placement(tmp_path / "list.json", TOPOLOGY, 2)


def test_the_file_format_loads_no_torch() -> None:
    code = "import sys, trimtab.experts.placement_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
