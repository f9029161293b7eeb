"""Memory that several processes see, without a file that could be left behind."""

from __future__ import annotations

import fcntl
import mmap
import os

from trimtab.kernels.features import memory

_REMEDY = "lower max_num_batched_tokens or choose all2all_backend='gloo'"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedSegment:
    """1. One process creates a segment, zeroed, and keeps it. 2. Others attach by its path. 3. Each closes its own.

    An anonymous file (memfd): readable by this user's processes only, not limited by the size of /dev/shm, never to
    be unlinked; it is gone with the last process that maps it, however that process ends (B127). All its pages are
    taken when it is created, so that running short of memory is an error then and not a bus error later.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, num_bytes)
        self.num_bytes = num_bytes
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    @classmethod
    def create(cls, num_bytes: int, available_bytes: int | None = None, remedy: str = _REMEDY) -> SharedSegment:
        """Raises ValueError, naming both numbers and the remedy, where fewer than `num_bytes` are free.

        `available_bytes` None: as the cgroup says.
        """
        # Asked first: the system would give anonymous files whatever they want, until it must kill someone.
        if available_bytes is None:
            available_bytes = memory().available_bytes
        if num_bytes > available_bytes:
            raise ValueError(_too_large(num_bytes, f"{available_bytes} bytes are available", remedy))
        descriptor = os.memfd_create("trimtab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise ValueError(_too_large(num_bytes, f"the system gives fewer ({error.strerror})", remedy)) from error

    @classmethod
    def attach(cls, path: str) -> SharedSegment:
        """Maps what another process created; that process must still hold it. Raises OSError when it is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(descriptor, os.fstat(descriptor).st_size)

    @property
    def memory(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        """Safe to call twice. Memory still in use by tensors is returned with the last of them."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        try:
            self._map.close()
        except BufferError:
            return


def _too_large(num_bytes: int, reason: str, remedy: str) -> str:
    return f"shared memory between ranks needs {num_bytes} bytes, and {reason}; {remedy}"
