"""The contract of a transport: bytes between ranks, for exchanges that have no memory in common."""

# n ranks

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Transport(Protocol):
    """Moves uint8 tensors; their senders know what they mean (B45: a backend never sees bf16 or fp8).

    Collective: every rank calls the same operations in the same order. Each returns when this rank's part is done,
    raises RankFailureError when another rank does not come within the transport's deadline, and is then of no more
    use. `abort` makes waiting ranks fail where the backend can reach them; `close` may be called twice.
    """

    rank: int
    num_ranks: int

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """parts[r] [bytes] goes to rank r -> what each rank sent here. `sizes`: their bytes, where already known."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes [tensor.nbytes], without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_DTYPES = (
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.int8, torch.uint8, torch.bool, torch.int64,
)  # fmt: skip


def self_test(transport: Transport) -> None:
    """Every dtype that travels, with parts of unequal and of no length. Raises RuntimeError naming what arrived wrong.

    Collective: every rank, once, at start (B45).
    """
    for dtype in _DTYPES:
        parts = [as_bytes(_pattern(transport.rank, to, dtype)) for to in range(transport.num_ranks)]
        for sender, found in enumerate(transport.all_to_all(parts)):
            if not torch.equal(found, as_bytes(_pattern(sender, transport.rank, dtype))):
                raise RuntimeError(f"rank {transport.rank} got wrong bytes of {dtype} from rank {sender} at start")


def _pattern(sender: int, receiver: int, dtype: torch.dtype) -> Tensor:
    length = (3 * sender + 5 * receiver) % 7
    return (torch.arange(length) + sender + 2 * receiver).to(dtype)
