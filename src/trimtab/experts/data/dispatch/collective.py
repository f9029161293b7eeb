"""Dispatch over a transport that moves bytes: Gloo between processes, loopback between threads."""

# T tokens  K top-k  N pairs that chose this rank's slots  H hidden size  R rows in a message  P pairs in a message

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.distributed.transport import Transport, as_bytes
from trimtab.experts.data.dispatch.base import (
    CollectiveLog,
    DispatchTimes,
    NoCollectiveLog,
    RankPlace,
    check_slot_ids,
)
from trimtab.experts.data.kernels.base import ExpertKernel


class _Pairs(NamedTuple):
    """This rank's (token, k) pairs that have a slot, sorted by the rank that owns it, then by token and k."""

    pair_ids: Tensor  # t * K + k
    slot_ids: Tensor  # over all ranks' slots
    counts: list[int]  # per destination rank


def _sort_pairs(slot_ids: Tensor, slots_per_rank: int, num_ranks: int) -> _Pairs:
    check_slot_ids(slot_ids, slots_per_rank * num_ranks)
    flat = slot_ids.reshape(-1)
    pair_ids = (flat >= 0).nonzero().squeeze(1)
    owners = flat[pair_ids] // slots_per_rank
    pair_ids = pair_ids[owners.argsort(stable=True)]
    return _Pairs(pair_ids, flat[pair_ids], torch.bincount(owners, minlength=num_ranks).tolist())


@dataclass(slots=True)
class Arrivals:
    """What a rank computes, and the map back: whose pairs these are, and where answers of its own pairs belong."""

    rows: Tensor  # [N, H]
    slot_ids: Tensor  # [N], counted from this rank's first slot
    counts: list[int]  # pairs per sending rank, in the order of `rows`
    own: _Pairs  # what this rank waits for


class _CollectiveDispatcher:
    """What the variants share: the story around `_dispatch` and `_return`."""

    name: str

    def __init__(self, transport: Transport, place: RankPlace) -> None:
        assert transport.rank == place.rank and transport.num_ranks == place.num_ranks
        self.place = place
        self.times = DispatchTimes()
        self.log: CollectiveLog = NoCollectiveLog()
        self._transport = transport

    def run_experts(self, kernel: ExpertKernel, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        try:
            started = time.perf_counter()
            self.log.record(self.name, (slot_ids.shape[1], hidden.shape[1]))
            arrivals = self._dispatch(hidden, slot_ids, kernel.num_slots)
            dispatched = time.perf_counter()
            outputs = kernel.experts(arrivals.rows, arrivals.slot_ids)
            computed = time.perf_counter()
            out = self._combine(kernel, arrivals, outputs, hidden, slot_ids, gate_weights)
        except BaseException:
            self.abort()
            raise
        self.times.num_layers += 1
        self.times.experts_s += computed - dispatched
        self.times.exchange_s += time.perf_counter() - started - (computed - dispatched)
        return out

    def _dispatch(self, hidden: Tensor, slot_ids: Tensor, slots_per_rank: int) -> Arrivals:
        raise NotImplementedError

    def _combine(
        self,
        kernel: ExpertKernel,
        arrivals: Arrivals,
        outputs: Tensor,
        hidden: Tensor,
        slot_ids: Tensor,
        gate_weights: Tensor,
    ) -> Tensor:
        raise NotImplementedError

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()


class AllToAllDispatcher(_CollectiveDispatcher):
    """Every rank sends each other one message per layer: the rows it needs, once each, and which slots they chose.

    Ranks that share tokens split them, and pass the finished rows around among themselves.
    """

    name = "all_to_all"

    def _dispatch(self, hidden: Tensor, slot_ids: Tensor, slots_per_rank: int) -> Arrivals:
        share = self.place.share(len(hidden), self.place.rank)
        own = _sort_pairs(slot_ids[share], slots_per_rank, self.place.num_ranks)
        tokens = own.pair_ids // slot_ids.shape[1]
        messages = [
            _write_message(hidden[share], part_tokens, part_slots)
            for part_tokens, part_slots in zip(tokens.split(own.counts), own.slot_ids.split(own.counts), strict=True)
        ]
        read = [_read_message(message, hidden.shape[1]) for message in self._transport.all_to_all(messages)]
        # A message without rows says nothing about their dtype.
        rows = [part for part, _ in read if len(part)] or [hidden[:0]]
        if len({part.dtype for part in rows}) > 1:
            raise RuntimeError("ranks sent hidden states of different dtypes")
        return Arrivals(
            torch.cat(rows),
            torch.cat([slots for _, slots in read]) - self.place.rank * slots_per_rank,
            [len(slots) for _, slots in read],
            own,
        )

    def _combine(
        self,
        kernel: ExpertKernel,
        arrivals: Arrivals,
        outputs: Tensor,
        hidden: Tensor,
        slot_ids: Tensor,
        gate_weights: Tensor,
    ) -> Tensor:
        share = self.place.share(len(hidden), self.place.rank)
        row_bytes = hidden.shape[1] * 4
        own = arrivals.own
        answers = self._transport.all_to_all(
            [as_bytes(part) for part in outputs.split(arrivals.counts)], [count * row_bytes for count in own.counts]
        )
        mine = _sum_answers(kernel, answers, own, slot_ids[share], gate_weights[share], hidden[share])
        return mine if self.place.num_sharing == 1 else self._share_rows(mine, len(hidden))

    def _share_rows(self, mine: Tensor, num_tokens: int) -> Tensor:
        """Finished rows of the group's shares -> all rows [T, H]."""
        group = self.place.group
        nothing = torch.empty(0, dtype=torch.uint8)
        sizes = [0] * self.place.num_ranks
        for rank in group:
            part = self.place.share(num_tokens, rank)
            sizes[rank] = (part.stop - part.start) * mine.shape[1] * mine.itemsize
        parts = [as_bytes(mine) if rank in group else nothing for rank in range(self.place.num_ranks)]
        arrived = self._transport.all_to_all(parts, sizes)
        return torch.cat(arrived).view(mine.dtype).view(num_tokens, mine.shape[1])


class AllGatherDispatcher(_CollectiveDispatcher):
    """For ranks that all hold the same tokens: rows need not travel, only outputs, from each rank to all."""

    name = "all_gather"

    def __init__(self, transport: Transport, place: RankPlace) -> None:
        assert place.num_sharing == place.num_ranks, "all-gather needs the same tokens on every rank"
        super().__init__(transport, place)

    def _dispatch(self, hidden: Tensor, slot_ids: Tensor, slots_per_rank: int) -> Arrivals:
        pairs = _sort_pairs(slot_ids, slots_per_rank, self.place.num_ranks)
        first = sum(pairs.counts[: self.place.rank])
        here = slice(first, first + pairs.counts[self.place.rank])
        rows = hidden.index_select(0, pairs.pair_ids[here] // slot_ids.shape[1])
        return Arrivals(rows, pairs.slot_ids[here] - self.place.rank * slots_per_rank, pairs.counts, pairs)

    def _combine(
        self,
        kernel: ExpertKernel,
        arrivals: Arrivals,
        outputs: Tensor,
        hidden: Tensor,
        slot_ids: Tensor,
        gate_weights: Tensor,
    ) -> Tensor:
        # Gloo's all-gather takes equal sizes only and is the slowest of its collectives; one part for all does as well.
        answers = self._transport.all_to_all(
            [as_bytes(outputs)] * self.place.num_ranks, [count * hidden.shape[1] * 4 for count in arrivals.counts]
        )
        return _sum_answers(kernel, answers, arrivals.own, slot_ids, gate_weights, hidden)


# What rows may be, by their number in a message.
_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEAD_BYTES = 3 * 8


def _write_message(hidden: Tensor, tokens: Tensor, slot_ids: Tensor) -> Tensor:
    """tokens [P] ascending, slot_ids [P] -> bytes: R, P, dtype, each pair's row, its slot; then R rows, each once."""
    rows, row_of_pair = tokens.unique_consecutive(return_inverse=True)
    head = torch.tensor([len(rows), len(tokens), _ROW_DTYPES.index(hidden.dtype)])
    body = as_bytes(hidden.index_select(0, rows))
    # Messages are received one after the other, and each begins with integers: keep those aligned.
    padding = torch.zeros(-body.numel() % 8, dtype=torch.uint8)
    return torch.cat([as_bytes(head), as_bytes(row_of_pair), as_bytes(slot_ids), body, padding])


def _read_message(message: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """A message -> rows [P, H] and slot ids [P]."""
    num_rows, num_pairs, scalar = message[:_HEAD_BYTES].view(torch.int64).tolist()
    dtype = _ROW_DTYPES[scalar]
    end = _HEAD_BYTES + 16 * num_pairs
    row_of_pair, slot_ids = message[_HEAD_BYTES:end].view(torch.int64).view(2, num_pairs)
    rows = message[end : end + num_rows * hidden_size * dtype.itemsize].view(dtype).view(num_rows, hidden_size)
    return rows.index_select(0, row_of_pair), slot_ids


def _sum_answers(
    kernel: ExpertKernel, answers: list[Tensor], pairs: _Pairs, slot_ids: Tensor, gate_weights: Tensor, hidden: Tensor
) -> Tensor:
    """answers: per rank, the fp32 outputs of `pairs` as bytes -> [T, H] of hidden's dtype."""
    num_tokens, top_k = slot_ids.shape
    hidden_size = hidden.shape[1]
    outputs = torch.empty(num_tokens * top_k, hidden_size, dtype=torch.float32)
    outputs[pairs.pair_ids] = torch.cat(answers).view(torch.float32).view(-1, hidden_size)
    out = torch.empty_like(hidden)
    kernel.combine(outputs.view(num_tokens, top_k, hidden_size), slot_ids, gate_weights, out)
    return out
