"""Between ranks that have no memory in common: a fresh Gloo group for every transaction, thrown away at its end.

A group that saw an abort would hold receives that nobody answered any more, and the next transaction's bytes would go
into them. A wait inside Gloo cannot be woken by its own rank: it ends when the awaited rank ends its group, which all
do on an abort, or at the deadline. For the others to come, which may take longest, ranks wait outside of Gloo.
"""

# S slots/rank

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.distributed.gloo import GlooTransport, Pending
from trimtab.experts.movement.communicator.base import HEADER_WORDS, Export, Header, MovementAbortedError, Status
from trimtab.experts.movement.staging import StagingSizes

_PAUSE_S = 0.0005


class _Expected(NamedTuple):
    """Receives that are posted for one staging row."""

    header: Tensor  # uint8 [8 * HEADER_WORDS]
    header_arrives: Pending
    bytes_arrive: Pending


class GlooCommunicator:
    """Ranks meet in `folder`, which is private (0700) and outlives the communicator."""

    name = "gloo"

    def __init__(self, folder: str | Path, sizes: StagingSizes, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = sizes.num_ranks
        self.timeout_s = timeout_s
        self.staging = torch.zeros(sizes.slots_per_rank, sizes.row_nbytes, dtype=torch.uint8)
        self._outgoing = torch.zeros(sizes.row_nbytes, dtype=torch.uint8)  # one expert on its way out
        self.num_bytes = self.staging.numel() + self._outgoing.numel()
        self._folder = Path(folder)
        self._arrival: Path | None = None  # says to the others that this rank has come
        self._transport: GlooTransport | None = None
        self._aborted = threading.Event()
        self._expected: dict[int, _Expected] = {}
        self._open_layer = -1
        self._num_gathers = 0
        self._interrupted = threading.Event()

    def begin(self, transaction: int, aborted: threading.Event) -> None:
        assert self._transport is None, "the last transaction was not ended"
        self._aborted = aborted
        self._check()
        self._transport = self._connect(f"transaction-{transaction}", self.timeout_s, aborted)

    def open_layer(self, layer: int, arrivals: Sequence[tuple[int, int, int]]) -> None:
        # All at once, before anything is sent: a send is done only when its receive has been posted.
        self._open_layer = layer
        self._expected = {}
        for row, source_rank, num_bytes in arrivals:
            header = torch.empty(8 * HEADER_WORDS, dtype=torch.uint8)
            self._expected[row] = _Expected(
                header,
                self._group().post_receive(header, source_rank, 2 * row),
                self._group().post_receive(self.staging[row][:num_bytes], source_rank, 2 * row + 1),
            )

    def send(self, target_rank: int, row: int, header: Header, export: Export) -> None:
        self._check()
        data = self._outgoing[: header.num_bytes]
        header = header._replace(checksum=export(data), status=Status.OK)
        self._announce(target_rank, row, header)
        self._group().post_send(data, target_rank, 2 * row + 1).wait()

    def refuse_layer(self, layer: int, departures: Sequence[tuple[int, int, Header]]) -> None:
        if self._open_layer != layer:
            self.end(is_aborted=True)  # two ranks that refuse would wait for each other's receives
            return
        for target_rank, row, header in departures:
            # The receive of the bytes stays posted: this group has seen a failure and will be thrown away.
            self._announce(target_rank, row, header._replace(status=Status.FAILED))

    def receive(self, row: int, source_rank: int) -> Header:
        self._check()
        expected = self._expected[row]
        expected.header_arrives.wait()
        header = Header.from_words(expected.header.numpy().view(np.uint64))
        if header.status is Status.OK:
            expected.bytes_arrive.wait()
        return header

    def end(self, *, is_aborted: bool) -> None:
        self._expected = {}
        self._open_layer = -1
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        self._num_gathers += 1
        transport = self._connect(f"gather-{self._num_gathers}", timeout_s or self.timeout_s, threading.Event())
        try:
            part = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
            return [found.numpy().tobytes() for found in transport.all_to_all([part] * self.num_ranks)]
        finally:
            transport.close()

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self.interrupt()
        self.end(is_aborted=True)
        self._withdraw()
        with contextlib.suppress(FileNotFoundError):  # the folder has gone: nobody waits any more
            self._closed(self.rank).touch()
            marks = [self._closed(rank) for rank in range(self.num_ranks)]
            if all(mark.exists() for mark in marks):
                for mark in marks:
                    mark.unlink(missing_ok=True)

    def _connect(self, name: str, timeout_s: float, aborted: threading.Event) -> GlooTransport:
        self._meet(name, timeout_s, aborted)
        transport = GlooTransport(self._folder, name, self.rank, self.num_ranks, timeout_s)
        self._withdraw()  # the group is formed, so all have met
        return transport

    def _meet(self, name: str, timeout_s: float, aborted: threading.Event) -> None:
        """Until all ranks have come to form the group."""
        self._withdraw()  # from a group that was never formed
        self._arrival = self._folder / f"{name}.rank-{self.rank}"
        self._arrival.touch()
        what = f"rank {self.rank} waited for rank"
        deadline = time.monotonic() + timeout_s
        for rank in range(self.num_ranks):
            while not (self._folder / f"{name}.rank-{rank}").exists():
                if aborted.wait(_PAUSE_S):
                    raise MovementAbortedError(f"{what} {rank} when the transaction was aborted")
                if self._interrupted.is_set():
                    raise RankFailureError(f"{what} {rank} when it was told to stop")
                if self._closed(rank).exists():
                    raise RankFailureError(f"{what} {rank}, which has closed")
                if time.monotonic() > deadline:
                    raise RankFailureError(f"{what} {rank} to connect for {timeout_s} s")

    def _withdraw(self) -> None:
        if self._arrival is not None:
            self._arrival.unlink(missing_ok=True)
            self._arrival = None

    def _closed(self, rank: int) -> Path:
        return self._folder / f"closed-{rank}"

    def _group(self) -> GlooTransport:
        if self._transport is None:
            raise RankFailureError(f"rank {self.rank} has no group: it was closed or never formed")
        return self._transport

    def _announce(self, target_rank: int, row: int, header: Header) -> None:
        self._check()
        words = torch.from_numpy(header.words().view(np.uint8))
        self._group().post_send(words, target_rank, 2 * row).wait()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise MovementAbortedError(f"rank {self.rank} was about to exchange when the transaction was aborted")
        if self._interrupted.is_set():
            raise RankFailureError(f"rank {self.rank} was about to exchange when it was told to stop")
