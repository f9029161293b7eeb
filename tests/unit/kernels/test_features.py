"""Features, cores and memory are read from what the process may use, on fake machines of a few files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.kernels import features
from trimtab.kernels.features import (
    cgroup_cpu_quota,
    cpu_features,
    default_num_threads,
    describe_kernels,
    has_bf16_instructions,
    memory,
    parse_features,
    usable_cores,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_flags_of_the_cpu_are_read_by_whole_words() -> None:
    text = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 avx512_vnnix\n"
    assert parse_features(text) == {"avx2", "avx512f", "avx512_bf16", "amx"}
    assert parse_features("") == frozenset()


def test_the_variable_hides_features_and_never_claims_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """B126: a feature the CPU lacks must not be claimed; the process would die of an illegal instruction."""
    monkeypatch.setattr(features, "_hardware_features", lambda: frozenset({"avx2", "avx512f"}))
    monkeypatch.setenv("TRIMTAB_CPU_FEATURES", "avx2,avx512_bf16")
    assert cpu_features() == {"avx2"}
    monkeypatch.setenv("TRIMTAB_CPU_FEATURES", "")
    assert cpu_features() == frozenset()
    monkeypatch.delenv("TRIMTAB_CPU_FEATURES")
    assert cpu_features() == {"avx2", "avx512f"}


def test_an_unknown_feature_name_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CPU_FEATURES", "avx2,sse9")
    with pytest.raises(ValueError, match=r"names 'sse9'; use a comma-separated subset of avx2, avx512f"):
        cpu_features()


@pytest.mark.parametrize(
    ("found", "expected"), [({"avx2", "avx512f"}, False), ({"avx512_bf16"}, True), ({"amx"}, True)]
)
def test_bf16_multiplication_needs_its_own_instructions(found: set[str], expected: bool) -> None:
    """B124: AVX-512 alone emulates bf16 and is far slower than fp32."""
    assert has_bf16_instructions(frozenset(found)) is expected


def test_cores_are_cut_by_the_cgroup_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B125."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cores(tmp_path) == 8
    write(tmp_path, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "250000 100000\n"})
    assert cgroup_cpu_quota(tmp_path) == 2.5
    assert usable_cores(tmp_path) == 2
    write(tmp_path, {"sys/fs/cgroup/box/cpu.max": "max 100000\n"})
    assert usable_cores(tmp_path) == 8
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert usable_cores(tmp_path) == 1, "an ancestor's limit binds too, and one core is the least"


def test_quota_of_a_version_1_cgroup_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n2:memory:/other\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert cgroup_cpu_quota(tmp_path) == 4.0


def test_threads_are_shared_between_processes_and_the_users_number_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """B125."""
    monkeypatch.setattr(features, "usable_cores", lambda: 8)
    assert default_num_threads({}) == 8
    assert default_num_threads({}, num_processes=3) == 2
    assert default_num_threads({}, num_processes=16) == 1
    assert default_num_threads({"OMP_NUM_THREADS": "5"}, num_processes=3) == 5
    assert default_num_threads({"OMP_NUM_THREADS": "6,2"}) == 6
    with pytest.raises(ValueError, match=r"OMP_NUM_THREADS \('all'\) must be a positive integer"):
        default_num_threads({"OMP_NUM_THREADS": "all"})


MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    found = memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (32 * GIB, 16 * GIB)


def test_memory_is_the_cgroups_where_that_is_less_and_its_page_cache_is_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
        },
    )
    found = memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (8 * GIB, 5 * GIB)


def test_memory_of_a_version_1_cgroup_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    found = memory(tmp_path)
    assert (found.limit_bytes, found.available_bytes) == (4 * GIB, 1 * GIB)


def test_this_machine_has_cores_and_memory() -> None:
    found = memory()
    assert usable_cores() >= 1
    assert 0 < found.available_bytes <= found.limit_bytes


def test_the_kernels_are_described_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """B126: the chosen level can be seen."""
    monkeypatch.setenv("TRIMTAB_CPU_FEATURES", "avx2")
    rows = {what: (choice, reason) for what, choice, reason in describe_kernels()}
    assert "linear bfloat16" in rows
    assert "float32" in rows["linear bfloat16"][0]
    assert all(reason for _, reason in rows.values())
