"""Between ranks that see one memory: senders write straight into the receiver's staging. No receive is ever pending.

Each rank has an area: flags that it alone writes, one header per staging row, staging. Words of 8 bytes are written
whole and in order, which x86 promises: a header's first word, written last, says that the row is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.movement.communicator.base import (
    HEADER_WORDS,
    Export,
    Header,
    MovementAbortedError,
    Status,
)
from trimtab.experts.movement.staging import StagingSizes

# A rank's flags, by word.
_OPEN = 0  # the layer whose staging may be written, as `_layer_word`
_ABORTED = 1  # 1 + the transaction that this rank ended early
_GATHER = 2  # how far this rank is in which all_gather, as in `_meet`
_GATHER_BYTES = 3
_CLOSED = 4
_REFUSED = 5  # the layer that this rank's staging will not be opened for
_FLAG_WORDS = 16  # two cache lines
_ROW_WORDS = 8  # of a header: the layer's word, then the header
assert 1 + HEADER_WORDS <= _ROW_WORDS

_LAYER_BITS = 16
_PHASE_BITS = 32
_FIRST_PAUSE_S = 0.0001
_LAST_PAUSE_S = 0.002


def area_nbytes(sizes: StagingSizes) -> int:
    return 8 * (_FLAG_WORDS + _ROW_WORDS * sizes.slots_per_rank) + sizes.staging_nbytes


def memory_nbytes(sizes: StagingSizes) -> int:
    """Of all ranks together, zeroed before the first one opens it."""
    return sizes.num_ranks * area_nbytes(sizes)


class SharedMemoryCommunicator:
    """Keeps `memory` mapped as long as anything looks at a staging row."""

    name = "shared_memory"

    def __init__(self, memory: memoryview | bytearray, sizes: StagingSizes, rank: int, timeout_s: float) -> None:
        assert len(memory) >= memory_nbytes(sizes), f"{len(memory)} bytes are too few for {sizes}"
        self.rank = rank
        self.num_ranks = sizes.num_ranks
        self.timeout_s = timeout_s
        self.num_bytes = area_nbytes(sizes)
        self._is_closed = False
        self._interrupted = threading.Event()
        flags_nbytes, headers_nbytes = 8 * _FLAG_WORDS, 8 * _ROW_WORDS * sizes.slots_per_rank
        self._flags, self._headers, self._stagings = [], [], []
        for start in range(0, memory_nbytes(sizes), area_nbytes(sizes)):
            self._flags.append(np.frombuffer(memory, np.uint64, _FLAG_WORDS, start))
            words = np.frombuffer(memory, np.uint64, headers_nbytes // 8, start + flags_nbytes)
            self._headers.append(words.reshape(sizes.slots_per_rank, _ROW_WORDS))
            staging = torch.frombuffer(
                memory, dtype=torch.uint8, count=sizes.staging_nbytes, offset=start + flags_nbytes + headers_nbytes
            )
            self._stagings.append(staging.view(sizes.slots_per_rank, sizes.row_nbytes))
        self.staging = self._stagings[rank]
        self._transaction = 0
        self._layer_word = np.uint64(0)
        self._aborted = threading.Event()
        self._num_gathers = 0
        self._phase = 0  # of the last all_gather

    def begin(self, transaction: int, aborted: threading.Event) -> None:
        assert 0 <= transaction < 1 << (63 - _LAYER_BITS), f"transaction {transaction} has no room in a word"
        self._transaction = transaction
        self._aborted = aborted

    def open_layer(self, layer: int, arrivals: Sequence[tuple[int, int, int]]) -> None:
        self._layer_word = self._word_of(layer)
        self._flags[self.rank][_OPEN] = self._layer_word

    def send(self, target_rank: int, row: int, header: Header, export: Export) -> None:
        if not self._await_open(target_rank):
            raise RankFailureError(f"rank {target_rank} cannot take experts of layer {header.layer}")
        checksum = export(self._stagings[target_rank][row][: header.num_bytes])
        self._post(target_rank, row, header._replace(checksum=checksum, status=Status.OK))

    def refuse_layer(self, layer: int, departures: Sequence[tuple[int, int, Header]]) -> None:
        if self._layer_word != self._word_of(layer):
            self._layer_word = self._word_of(layer)
            self._flags[self.rank][_REFUSED] = self._layer_word
        for target_rank, row, header in departures:
            if self._await_open(target_rank):
                self._post(target_rank, row, header._replace(status=Status.FAILED))

    def receive(self, row: int, source_rank: int) -> Header:
        words = self._headers[self.rank][row]
        self._wait(
            lambda: words[0] == self._layer_word,
            f"rank {self.rank} waited for rank {source_rank} to send row {row}",
        )
        return Header.from_words(words[1:])

    def end(self, *, is_aborted: bool) -> None:
        flags = self._flags[self.rank]
        if is_aborted:
            flags[_ABORTED] = self._transaction + 1
        flags[_OPEN] = 0
        self._layer_word = np.uint64(0)
        self._aborted = threading.Event()

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Through staging, piece by piece: no further memory is needed."""
        self._num_gathers, self._phase = self._num_gathers + 1, 0
        flags, piece_nbytes = self._flags[self.rank], self.staging.numel()
        flags[_GATHER_BYTES] = len(data)
        gathered = [bytearray() for _ in range(self.num_ranks)]
        first, most = 0, 1
        while first < most:
            piece = np.frombuffer(data, np.uint8)[first : first + piece_nbytes]
            self.staging.view(-1)[: len(piece)].numpy()[:] = piece
            self._meet(timeout_s)  # all have written
            totals = [int(peer[_GATHER_BYTES]) for peer in self._flags]
            most = max(totals)
            for found, total, staging in zip(gathered, totals, self._stagings, strict=True):
                found += staging.view(-1)[: max(0, min(piece_nbytes, total - first))].numpy().tobytes()
            self._meet(timeout_s)  # all have read
            first += piece_nbytes
        return [bytes(found) for found in gathered]

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._flags[self.rank][_CLOSED] = 1
        del self.staging, self._stagings, self._headers, self._flags  # what looks at the memory holds it

    def _meet(self, timeout_s: float | None) -> None:
        self._phase += 1
        # Ranks that gave one up at different phases begin the next one together all the same.
        word = self._num_gathers << _PHASE_BITS | self._phase
        self._flags[self.rank][_GATHER] = word
        self._wait(
            lambda: all(int(flags[_GATHER]) >= word for flags in self._flags),
            f"rank {self.rank} waited for all ranks to exchange what they hold",
            timeout_s,
        )

    def _word_of(self, layer: int) -> np.uint64:
        assert 0 <= layer < (1 << _LAYER_BITS) - 1, f"layer {layer} has no room in a word"
        return np.uint64((self._transaction + 1) << _LAYER_BITS | (layer + 1))

    def _await_open(self, target_rank: int) -> bool:
        """False: it will not be opened."""
        flags = self._flags[target_rank]
        self._wait(
            lambda: self._layer_word in (flags[_OPEN], flags[_REFUSED]),
            f"rank {self.rank} waited for rank {target_rank}'s staging to be free",
        )
        return bool(flags[_OPEN] == self._layer_word)

    def _post(self, target_rank: int, row: int, header: Header) -> None:
        words = self._headers[target_rank][row]
        words[1 : 1 + HEADER_WORDS] = header.words()
        words[0] = self._layer_word

    def _wait(self, is_done: Callable[[], bool | np.bool_], what: str, timeout_s: float | None = None) -> None:
        timeout_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not is_done():
            if self._aborted.wait(pause_s):
                raise MovementAbortedError(f"{what} when the transaction was aborted")
            if self._interrupted.is_set():
                raise RankFailureError(f"{what} when it was told to stop")
            for peer, flags in enumerate(self._flags):
                if self._layer_word and flags[_ABORTED] == self._transaction + 1:
                    raise RankFailureError(f"{what}; rank {peer} has ended transaction {self._transaction} early")
                if flags[_CLOSED]:
                    raise RankFailureError(f"{what}; rank {peer} has closed")
            if time.monotonic() > deadline:
                raise RankFailureError(f"{what} for {timeout_s} s")
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


class LoopbackCommunicator(SharedMemoryCommunicator):
    """The only rank's: its experts move between its own slots, through staging in memory of its own."""

    name = "loopback"

    def __init__(self, sizes: StagingSizes, timeout_s: float) -> None:
        assert sizes.num_ranks == 1, "a loopback has one end"
        memory = torch.zeros(memory_nbytes(sizes), dtype=torch.uint8)  # in whole cache lines, which a bytearray is not
        super().__init__(memory.numpy().data, sizes, 0, timeout_s)
