"""What this process may really use: instructions, cores and memory, as the cgroup and the affinity mask allow."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Our names for the flags the kernel prints in /proc/cpuinfo.
FEATURE_FLAGS: dict[str, str] = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "avx512_vnni",
    "amx": "amx_bf16",
}
FEATURES_VARIABLE = "TRIMTAB_CPU_FEATURES"

# A cgroup without a limit shows a number near 2**63 (v1) or "max" (v2).
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes this process may use in all, and what is left of them now."""

    limit_bytes: int
    available_bytes: int


def cpu_features() -> frozenset[str]:
    """Features of this CPU; TRIMTAB_CPU_FEATURES (comma-separated, may be empty) keeps only those it names.

    The variable can hide a feature, never claim one: an illegal instruction ends the process without a word (B126).
    """
    allowed = os.environ.get(FEATURES_VARIABLE)
    if allowed is None:
        return _hardware_features()
    named = {name.strip() for name in allowed.split(",") if name.strip()}
    if unknown := sorted(named - FEATURE_FLAGS.keys()):
        raise ValueError(
            f"{FEATURES_VARIABLE} ({allowed!r}) names {unknown[0]!r}; "
            f"use a comma-separated subset of {', '.join(FEATURE_FLAGS)}"
        )
    return _hardware_features() & named


@cache
def _hardware_features() -> frozenset[str]:
    return parse_features(_read(Path("/proc/cpuinfo")) or "")


def parse_features(cpuinfo: str) -> frozenset[str]:
    """Features named by the first `flags` line of /proc/cpuinfo's text."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
            return frozenset(name for name, flag in FEATURE_FLAGS.items() if flag in flags)
    return frozenset()


def has_bf16_instructions(features: frozenset[str]) -> bool:
    return bool(features & {"avx512_bf16", "amx"})


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def usable_cores(root: Path = Path("/")) -> int:
    """Whole cores this process may use: the affinity mask, cut by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_cpu_quota(root)
    # A quota of 2.5 cores keeps two threads busy all the time; a third would be throttled half of it.
    return max(1, cores if quota is None else min(cores, int(quota)))


def default_num_threads(environment: Mapping[str, str] | None = None, num_processes: int = 1) -> int:
    """Threads for one of `num_processes` processes sharing the usable cores; the user's OMP_NUM_THREADS wins (B125)."""
    value = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "")
    first = value.split(",")[0].strip()  # OpenMP allows a list, one number per nesting level
    if first:
        if not first.isdigit() or int(first) < 1:
            raise ValueError(f"OMP_NUM_THREADS ({value!r}) must be a positive integer; unset it to use every core")
        return int(first)
    return max(1, usable_cores() // num_processes)


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time per period the cgroup grants; None without a limit. The tightest ancestor counts."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        if text := _read(folder / "cpu.max"):
            quota, _, period = text.strip().partition(" ")
            if quota != "max":
                quotas.append(int(quota) / int(period or 100_000))
        elif text := _read(folder / "cpu.cfs_quota_us"):
            period = _read(folder / "cpu.cfs_period_us") or "100000"
            if int(text) > 0:
                quotas.append(int(text) / int(period))
    return min(quotas, default=None)


def memory(root: Path = Path("/")) -> Memory:
    """Memory by the tightest of /proc/meminfo and the cgroups; page cache the kernel can drop counts as available."""
    info = _meminfo(root)
    limit, available = info["MemTotal"], info.get("MemAvailable", info.get("MemFree", 0))
    for folder in _cgroup_folders(root, "memory"):
        group_limit = _bytes(folder / "memory.max") or _bytes(folder / "memory.limit_in_bytes")
        if group_limit is None:
            continue
        used = _bytes(folder / "memory.current") or _bytes(folder / "memory.usage_in_bytes") or 0
        limit = min(limit, group_limit)
        available = min(available, group_limit - used + _inactive_file_bytes(folder))
    return Memory(limit, max(0, available))


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's group and its ancestors, v2 or v1; a container often sees its group as the root."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = base / path.lstrip("/")
        folders += [folder for folder in (group, *group.parents) if folder == base or base in folder.parents]
    return folders


def _inactive_file_bytes(folder: Path) -> int:
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _meminfo(root: Path) -> dict[str, int]:
    text = _read(root / "proc/meminfo")
    if text is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"MemTotal": total, "MemAvailable": total}
    entries = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in entries if len(words) >= 2}


def _bytes(path: Path) -> int | None:
    """The number in a cgroup file; None when it is absent or says there is no limit."""
    text = (_read(path) or "").strip()
    if not text.isdigit() or int(text) >= _UNLIMITED_BYTES:
        return None
    return int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def describe_kernels() -> list[tuple[str, str, str]]:
    """(what, choice, reason) for each decision taken from the CPU's features; for `trimtab inspect --kernels`."""
    # Both decide by the features of this module.
    from trimtab.kernels.linear import describe_linear
    from trimtab.kernels.native import status

    found = cpu_features()
    reason = f"{FEATURES_VARIABLE} hides others" if found != _hardware_features() else "from /proc/cpuinfo"
    return [("instructions", ", ".join(sorted(found)) or "baseline", reason), *status(), *describe_linear()]
