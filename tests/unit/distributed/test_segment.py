"""Memory between processes: its size is sure from the start, and nothing is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from trimtab.distributed.segment import SharedSegment


def test_what_one_writes_the_other_reads() -> None:
    creator = SharedSegment.create(5000)
    other = SharedSegment.attach(creator.path)
    assert other.num_bytes == 5000 and bytes(other.memory) == bytes(5000)
    other.memory[4999] = 7
    assert creator.memory[4999] == 7
    other.close()
    other.close()
    creator.close()


def test_it_cannot_grow_or_shrink_and_is_this_users_alone() -> None:
    segment = SharedSegment.create(4096)
    status = os.stat(segment.path)
    assert status.st_mode & 0o777 == 0o600 and status.st_uid == os.getuid()
    for size in (0, 8192):
        with pytest.raises(PermissionError), open(segment.path, "r+b") as file:
            file.truncate(size)
    segment.close()


@pytest.mark.parametrize(("num_bytes", "available"), [(1000, 999), (2**62, None)])
def test_too_little_memory_is_refused_at_the_start_naming_what_is_needed(num_bytes: int, available: int | None) -> None:
    """B127: never a bus error later. The size of /dev/shm plays no part."""
    with pytest.raises(ValueError, match=rf"needs {num_bytes} bytes, and .*; lower max_num_batched_tokens"):
        SharedSegment.create(num_bytes, available)


def test_a_segment_larger_than_dev_shm_is_served() -> None:
    """B127: containers often have 64 MB there. Seen from a mount namespace with so small a one, every page touched."""
    code = (
        "import os; from trimtab.distributed.segment import SharedSegment;"
        "assert os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize == 64 << 20;"
        "s = SharedSegment.create(100 << 20); view = s.memory; view[:] = bytes([7]) * (100 << 20); print(view[-1])"
    )
    inside = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -c "{code}"'
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    ):
        pytest.skip("no mount namespaces here")
    run = subprocess.run(["unshare", "--mount", "sh", "-c", inside], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "7\n", run.stderr


def test_it_is_gone_when_its_creator_is_and_the_name_leads_nowhere() -> None:
    segment = SharedSegment.create(4096)
    path = segment.path
    attached = SharedSegment.attach(path)
    segment.close()
    with pytest.raises(OSError):
        SharedSegment.attach(path)
    attached.memory[0] = 1  # those who have it keep it
    attached.close()


def test_tensors_keep_closed_memory_alive() -> None:
    segment = SharedSegment.create(4096)
    tensor = torch.frombuffer(segment.memory, dtype=torch.float32)
    segment.close()
    tensor.fill_(2.0)
    assert tensor.sum() == 2048


def test_a_killed_creator_leaves_nothing_behind() -> None:
    """B127: after SIGKILL there is no segment to be found, in /dev/shm or elsewhere."""
    before = set(os.listdir("/dev/shm"))
    code = (
        "from trimtab.distributed.segment import SharedSegment; s = SharedSegment.create(1 << 20);"
        "print(s.path, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        path = run.stdout.readline().strip()
        attached = SharedSegment.attach(path)
        run.send_signal(signal.SIGKILL)
        run.wait()
    with pytest.raises(OSError):
        SharedSegment.attach(path)
    attached.close()
    assert set(os.listdir("/dev/shm")) <= before
