"""The native exchange under ThreadSanitizer: ranks as threads, every value checked, an abort at the end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trimtab.kernels.native.build import SOURCE_DIR, find_compiler

STRESS = Path(__file__).parents[2] / "native/exchange_stress.cpp"
# scripts/sanitize_native.sh asks for more.
LAYERS = os.environ.get("TRIMTAB_TEST_EXCHANGE_LAYERS", "300")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    target = tmp_path_factory.mktemp("stress") / "exchange_stress"
    sources = [str(STRESS), str(SOURCE_DIR / "exchange.cpp")]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    done = subprocess.run([compiler, *flags, *sources, "-o", str(target)], capture_output=True, text=True)
    if "tsan" in done.stderr and done.returncode:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_race_for_nothing_and_lose_no_value(stress: Path, num_ranks: int) -> None:
    run = subprocess.run([str(stress), str(num_ranks), LAYERS], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all values right" in run.stdout and "WARNING" not in run.stderr
