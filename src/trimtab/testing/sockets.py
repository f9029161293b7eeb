"""Who listens on a network: the TCP sockets in listening state of some processes, as Linux tells it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """Addresses that these processes accept TCP connections at, IPv4 and IPv6."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                found.append(_address(fields[1].partition(":")[0], family))
    return sorted(found)


def _socket_inodes(pid: int) -> list[str]:
    inodes = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that this very loop reads the folder with
            if (target := os.readlink(link)).startswith("socket:["):
                inodes.append(target[8:-1])
    return inodes


def _address(text: str, family: socket.AddressFamily) -> str:
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]  # each in the machine's byte order
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
