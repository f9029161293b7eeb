"""The contract of a communicator: experts' bytes from a slot of one rank into a staging row of another."""

# S slots/rank

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Words = npt.NDArray[np.uint64]
Export = Callable[[Tensor], int]  # writes a slot into uint8 [slot_nbytes], gives its checksum


class Status(IntEnum):
    OK = 1
    FAILED = 2  # the sender could not send; no bytes follow


class Header(NamedTuple):
    """What every expert that travels is announced by."""

    transaction: int
    layer: int
    expert: int
    weights_version: int
    num_bytes: int
    checksum: int = 0
    status: Status = Status.OK

    def words(self) -> Words:
        return np.array(self, dtype=np.uint64)

    @classmethod
    def from_words(cls, words: Words) -> Header:
        header = cls(*words[: len(cls._fields)].tolist())
        return header._replace(status=Status(header.status))


HEADER_WORDS = len(Header._fields)


class MovementAbortedError(RuntimeError):
    """This rank's own part of the transaction was aborted while it waited."""


class Communicator(Protocol):
    """One rank's end. All calls come from the mover's thread but for `interrupt`, which may come from any.

    1. `begin` a transaction. Collective where a group must be formed: every rank, for the same transaction.
    2. For each layer `open_layer`: this rank's staging is free and may be written from now on. Then `send` each
       departure and `receive` each arrival, in any order: sends wait for the receiver's staging to be open. A rank
       that cannot go on, opened or not, calls `refuse_layer` instead, so that nobody waits for it.
    3. `end` the transaction, finished or aborted. Nothing of it can be written into staging afterwards, provided every
       rank has ended it before one begins the next.

    Every wait ends with RankFailureError after `timeout_s`, or when another rank ended the transaction early, and with
    MovementAbortedError soon after the `aborted` given to `begin` is set, where the backend can be woken.
    """

    name: str
    rank: int
    num_ranks: int
    timeout_s: float
    staging: Tensor  # uint8 [S, row bytes], at least slot_nbytes long each, from a cache line on; where arrivals lie
    num_bytes: int  # all memory that this end holds, staging included

    def begin(self, transaction: int, aborted: threading.Event) -> None: ...

    def open_layer(self, layer: int, arrivals: Sequence[tuple[int, int, int]]) -> None:
        """`arrivals`: (row, source rank, bytes) of all that other ranks send here."""
        ...

    def send(self, target_rank: int, row: int, header: Header, export: Export) -> None:
        """Fills the row there, then announces it by the header with export's checksum. Returns when that is done."""
        ...

    def refuse_layer(self, layer: int, departures: Sequence[tuple[int, int, Header]]) -> None:
        """Announces that those of (target rank, row, header) will not come. If the layer was not opened here, those who
        wait for this rank's staging fail too."""
        ...

    def receive(self, row: int, source_rank: int) -> Header:
        """Waits for the row to be announced; its bytes lie in `staging` then, unless FAILED."""
        ...

    def end(self, *, is_aborted: bool) -> None:
        """Safe to call when no transaction has begun."""
        ...

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Every rank's data, by rank. Collective, outside of transactions: at start and after new weights.

        Ranks call it equally often, also after one that failed: who has nothing to give gives word of that.

        At such times ranks come far apart: `timeout_s` may allow for more than the communicator's own.
        """
        ...

    def interrupt(self) -> None:
        """Makes present and later waits end with RankFailureError, as soon as the backend can be woken."""
        ...

    def close(self) -> None:
        """Gives back what was opened; other ranks that wait for this one fail. Safe to call twice."""
        ...
