"""The machine a measurement was taken on, and the time and memory of this process, as Linux tells them."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_SELF_STAT = Path("/proc/self/stat")
_START_TIME_FIELD = 19  # of the fields behind the command name, proc(5): starttime, in clock ticks since boot


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name; "unknown" where the kernel does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def process_age_s(stat: Path = _SELF_STAT) -> float:
    """Seconds since this process was started, interpreter start-up included; exact to a clock tick (10 ms)."""
    behind_name = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(behind_name[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def peak_memory_bytes() -> int:
    """The most memory this process has had resident (ru_maxrss, which Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory_of_children_bytes() -> int:
    """The most memory that each living child process has had resident (VmHWM), added up: an engine's ranks."""
    children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    return sum(_high_water_mark(Path(f"/proc/{pid}/status")) for pid in children)


def _high_water_mark(status: Path) -> int:
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0  # it has ended meanwhile
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)  # none: a zombie
