"""The house stays as ARCHITECTURE.md draws it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_path_that_the_documents_name_exists():
    missing = []
    for document in ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples|scripts)/[\w./-]+)`", text):
            if not (ROOT / path).exists():
                missing.append(f"{document}: {path}")
    assert not missing, missing


def test_importing_the_package_does_not_import_torch():
    code = "import sys, trimtab, trimtab.config, trimtab.sampling_params; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_no_room_reaches_across_the_experts_planes():
    """experts/control, experts/data and experts/movement share words, never each other."""
    planes = ("control", "data", "movement")
    crossings = []
    for plane in planes:
        for file in (ROOT / "src/trimtab/experts" / plane).rglob("*.py"):
            for other in set(planes) - {plane}:
                if f"trimtab.experts.{other}" in file.read_text():
                    crossings.append(f"{file.relative_to(ROOT)} -> {other}")
    assert not crossings, crossings


def test_no_source_file_of_ours_carries_pickle_or_remote_code():
    """Checkpoints are data: nothing is unpickled, no code of a checkpoint is run."""
    offenders = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "src").rglob("*.py")
        if re.search(r"torch\.load\(|pickle\.loads?\(|trust_remote_code=True", file.read_text())
    ]
    assert not offenders, offenders
