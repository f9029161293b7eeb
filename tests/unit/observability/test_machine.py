"""What Linux says about the machine and this process."""

import os
import subprocess
import sys

from trimtab.observability.machine import (
    cpu_model,
    peak_memory_bytes,
    peak_memory_of_children_bytes,
    process_age_s,
)


def test_the_cpu_is_the_first_model_name(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 2GHz\nmodel name\t: other\n")
    assert cpu_model(cpuinfo) == "Fast CPU @ 2GHz"
    assert cpu_model(tmp_path / "missing") == "unknown"


def test_the_age_of_the_process_counts_from_its_start_ticks_and_a_name_with_brackets_is_no_trap(tmp_path):
    import time

    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 50) * os.sysconf("SC_CLK_TCK"))
    stat = tmp_path / "stat"
    stat.write_text("1 (odd) name) S " + " ".join(["0"] * 18) + f" {ticks} 0 0\n")
    assert 49 < process_age_s(stat) < 60
    assert process_age_s() > 0


def test_peak_memory_holds_what_was_touched():
    before = peak_memory_bytes()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    assert peak_memory_bytes() >= before
    assert peak_memory_bytes() > 64 << 20


def test_the_peak_memory_of_children_is_theirs_alone_and_gone_with_them():
    before = peak_memory_of_children_bytes()
    code = "block = bytes(96 << 20) + b'x'; del block; print('done', flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "done\n"
        grown = peak_memory_of_children_bytes() - before
        child.communicate("\n")
    assert 96 << 20 < grown < 256 << 20
    assert peak_memory_of_children_bytes() == before
