"""Which kernels serve, why, and what a user may force."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys

import pytest
from native_cases import load_kernels

from trimtab.kernels.native import library, status
from trimtab.kernels.native.build import SOURCE_DIR, SOURCE_FLAGS, BuildError, build, find_compiler
from trimtab.kernels.native.library import Format, Level, NativeCore, choose_kernels, requested_level

KERNELS = load_kernels()
CORE = KERNELS.core


@pytest.fixture
def chosen_anew(monkeypatch):
    library.native_kernels.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.native_kernels.cache_clear()


def test_the_choice_is_logged_in_one_line_with_its_reasons(chosen_anew, caplog):
    with caplog.at_level(logging.INFO, logger="trimtab.kernels.native.library"):
        choices = status()
        assert status() == choices
    lines = [record.message for record in caplog.records if record.message.startswith("native kernels:")]
    assert len(lines) == 1 and all(choice.reason in lines[0] for choice in choices)
    assert [choice.name for choice in choices] == ["native fp32", "native bf16", "native int8"]


def test_off_leaves_no_native_kernel(chosen_anew):
    chosen_anew.setenv("TRIMTAB_NATIVE", "off")
    assert library.native_kernels().levels == {}
    assert status() == (("native", "none", "TRIMTAB_NATIVE=off"),)


def test_avx2_can_be_forced(chosen_anew):
    chosen_anew.setenv("TRIMTAB_NATIVE", "avx2")
    assert set(library.native_kernels().levels.values()) == {Level.AVX2}
    assert all("TRIMTAB_NATIVE forces avx2" in choice.reason for choice in status())


def test_a_level_that_the_cpu_lacks_is_refused():
    with pytest.raises(ValueError, match="TRIMTAB_NATIVE=avx512, but this CPU lacks these instructions; unset it"):
        choose_kernels(CORE, Level.AVX512, frozenset({"avx2"}))


def test_a_feature_hidden_from_trimtab_is_hidden_from_the_native_kernels():
    assert choose_kernels(CORE, features=frozenset()).levels == {}


def test_an_unknown_level_is_refused_by_name():
    assert requested_level(None) is None and requested_level("") is None
    with pytest.raises(ValueError, match="TRIMTAB_NATIVE='sse' is not one of off, avx2, avx512"):
        requested_level("sse")


def test_a_checkout_without_the_built_core_falls_back(chosen_anew, tmp_path):
    chosen_anew.setattr(library, "CORE_PATH", tmp_path / "absent.so")
    assert library.native_kernels().core is None
    assert status() == (("native", "none", "not built; run python -m trimtab.kernels.native.build"),)
    chosen_anew.setenv("TRIMTAB_NATIVE", "avx2")
    library.native_kernels.cache_clear()
    with pytest.raises(ValueError, match="the native core is not built"):
        library.native_kernels()


def test_a_core_that_cannot_be_loaded_is_reported_and_not_used(chosen_anew, tmp_path, caplog):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    chosen_anew.setattr(library, "CORE_PATH", broken)
    with caplog.at_level(logging.WARNING):
        assert library.native_kernels().core is None
    assert "native core not loaded" in caplog.text


def test_another_library_is_not_taken_for_the_core():
    with pytest.raises(OSError, match="has no trimtab_version: it was built from other sources"):
        NativeCore(next(path for path in map(library.Path, _loaded_libraries()) if "libgomp" in path.name))


def _loaded_libraries() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line}


def test_the_core_joins_torchs_openmp_threads():
    """Two OpenMP runtimes in one process would fight for the cores with twice the threads."""
    script = (
        "from trimtab.kernels.native.library import native_kernels; import torch\n"
        "native_kernels(); torch.ones(1 << 20).sum()\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({m for m in maps if 'libgomp' in m or 'libomp' in m or 'libiomp' in m}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "1"


def test_a_failed_build_says_what_the_compiler_said_and_keeps_the_old_file(tmp_path):
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    target = tmp_path / "core.so"
    target.write_text("old")
    with pytest.raises(BuildError, match="no-such-flag"):
        build(target, extra_flags=["-no-such-flag"])
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_without_a_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(tmp_path / "core.so")


def test_every_format_has_a_named_kernel_at_every_level():
    names = {CORE.kernel_name(level, weight_format).decode() for level in Level for weight_format in Format}
    assert names == {"avx2_fp32", "avx2_bf16", "avx2_int8", "avx512_fp32", "avx512_bf16", "avx512_vnni"}


@pytest.mark.parametrize("name", [name for name, flags in SOURCE_FLAGS.items() if flags])
def test_a_file_for_one_instruction_set_shares_no_code_with_the_others(name, tmp_path):
    """The linker keeps one copy of an inline function; compiled for AVX-512 it would end an older CPU's process."""
    compiler = find_compiler()
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("no C++ compiler or no nm")
    target = tmp_path / "kernels.o"
    # Without optimisation every function that is used is also emitted.
    flags = ["-std=c++17", "-fopenmp", "-O0", "-w", *SOURCE_FLAGS[name]]
    subprocess.run([compiler, *flags, "-c", str(SOURCE_DIR / name), "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout.splitlines()
    shared = [line for line in symbols if line[17:18] in ("W", "V", "u") and "DW.ref" not in line]
    assert shared == []
