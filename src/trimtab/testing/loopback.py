"""A transport between threads of one process, in plain Python: what the collective dispatchers are tested with."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError


class LoopbackWorld:
    """What the ranks' ends have in common; each thread takes its own `transport(rank)`."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._barrier = threading.Barrier(num_ranks)
        self._mail: list[list[Tensor]] = [[] for _ in range(num_ranks)]

    def transport(self, rank: int) -> LoopbackTransport:
        return LoopbackTransport(self, rank)

    def exchange(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        self._mail[rank] = [part.clone() for part in parts]
        self._meet()
        arrived = [mail[rank] for mail in self._mail]
        self._meet()  # only now may a mailbox be filled again
        return arrived

    def abort(self) -> None:
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError as error:
            raise RankFailureError(
                f"a rank gave up, or did not come to an exchange within {self.timeout_s} s"
            ) from error


class LoopbackTransport:
    """One rank's end."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.rank = rank
        self.num_ranks = world.num_ranks
        self._world = world

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        assert all(part.dtype == torch.uint8 for part in parts), "a transport moves bytes"
        arrived = self._world.exchange(self.rank, parts)
        assert sizes is None or [part.numel() for part in arrived] == list(sizes), "ranks disagree about sizes"
        return arrived

    def abort(self) -> None:
        self._world.abort()

    def close(self) -> None:
        return None
