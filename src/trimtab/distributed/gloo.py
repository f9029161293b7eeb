"""A transport over Gloo, between processes (or threads) of this machine, on the loopback device only."""

# n ranks

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.distributed.errors import RankFailureError


class Pending:
    """A send or receive that was posted; its tensor is the group's until `wait` has returned."""

    def __init__(self, work: Any, tensor: Tensor, fail: Callable[[RuntimeError], RankFailureError]) -> None:
        self._work = work
        self._tensor = tensor  # kept alive
        self._fail = fail

    def wait(self) -> None:
        """Raises RankFailureError when the other rank closes its group or does not come in time. Holds no GIL."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._fail(error) from error


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
        self._meeting_point = Path(folder) / name
        store = dist.FileStore(str(self._meeting_point), num_ranks)
        store.set_timeout(timeout)
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what is used here
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._timeout = timeout
        self._group: Any = None
        try:
            self._group = gloo(store, rank, num_ranks, options)
        except RuntimeError as error:
            self.close()
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

    def post_send(self, data: Tensor, to: int, tag: int) -> Pending:
        """data uint8, contiguous, to the receive that rank `to` posts under `tag`."""
        return self._post("send", data, to, tag)

    def post_receive(self, out: Tensor, source: int, tag: int) -> Pending:
        """Into out uint8, contiguous; first posted, first filled. Raises as `Pending.wait` does."""
        return self._post("recv", out, source, tag)

    def _post(self, operation: str, tensor: Tensor, rank: int, tag: int) -> Pending:
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous(), "a transport moves bytes"
        self._check_open(operation)

        def fail(error: RuntimeError) -> RankFailureError:
            self.close()
            return self._failure(f"{operation} (tag {tag}, rank {rank})", error)

        try:
            work = getattr(self._group, operation)([tensor], rank, tag)
        except RuntimeError as error:
            raise fail(error) from error
        return Pending(work, tensor, fail)

    def abort(self) -> None:
        """Gloo reaches no waiting rank: the others fail when they next need this one, or at their deadline."""
        self.close()

    def close(self) -> None:
        self._group = None
        # torch's store removes its file, but one rank's last look at it may bring it back.
        self._meeting_point.unlink(missing_ok=True)

    def _run(self, what: str, out: Tensor, sent: Tensor, out_sizes: list[int], sent_sizes: list[int]) -> None:
        self._check_open(what)
        try:
            self._group.alltoall_base(out, sent, out_sizes, sent_sizes, dist.AllToAllOptions()).wait()
        except RuntimeError as error:
            self.close()
            raise self._failure(what, error) from error

    def _check_open(self, what: str) -> None:
        if self._group is None:
            raise RankFailureError(f"rank {self.rank} cannot {what}: its group was closed or has failed")

    def _failure(self, what: str, error: RuntimeError) -> RankFailureError:
        return RankFailureError(
            f"rank {self.rank} could not {what} with the other {self.num_ranks - 1} ranks within {self.timeout_s} s: "
            f"{str(error).splitlines()[0]}"
        )
