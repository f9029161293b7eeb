"""A transport over Gloo, between processes (or threads) of this machine, on the loopback device only."""

# n ranks

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.errors import RankFailureError


class GlooTransport:
    """A group of its own, outside torch's global registry, so that several engines live in one process.

    Ranks meet through a file in `folder` (torch's TCPStore would listen on every interface) and talk over loopback.
    `name` tells groups of one folder apart. Collective: every rank. Raises RankFailureError when a rank is missing
    after `timeout_s`, which is also the deadline of every later operation. A group that saw a failure is never reused.
    """

    def __init__(self, folder: str | Path, name: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(Path(folder) / name), num_ranks)
        store.set_timeout(timeout)
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what is used here
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timeout
        try:
            self._group: Any = gloo(store, rank, num_ranks, options)
        except RuntimeError as error:
            raise self._failure("connect", error) from error

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        own_sizes = [part.numel() for part in parts]
        if sizes is None:
            counts = torch.empty(self.num_ranks, dtype=torch.int64)
            self._run("exchange sizes", counts, torch.tensor(own_sizes), [1] * self.num_ranks, [1] * self.num_ranks)
            sizes = counts.tolist()
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        self._run("exchange", arrived, torch.cat(list(parts)), list(sizes), own_sizes)
        return list(arrived.split(list(sizes)))

    def abort(self) -> None:
        """Gloo reaches no waiting rank: the others fail when they next need this one, or at their deadline."""
        self.close()

    def close(self) -> None:
        self._group = None

    def _run(self, what: str, out: Tensor, sent: Tensor, out_sizes: list[int], sent_sizes: list[int]) -> None:
        if self._group is None:
            raise RankFailureError(f"rank {self.rank} cannot {what}: its group was closed or has failed")
        try:
            self._group.alltoall_base(out, sent, out_sizes, sent_sizes, dist.AllToAllOptions()).wait()
        except RuntimeError as error:
            self.close()
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: RuntimeError) -> RankFailureError:
        return RankFailureError(
            f"rank {self.rank} could not {what} with the other {self.num_ranks - 1} ranks within {self.timeout_s} s: "
            f"{str(error).splitlines()[0]}"
        )
