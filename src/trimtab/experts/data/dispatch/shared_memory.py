"""Ranks of one machine exchange tokens through memory that all of them map: the native exchange, no collective."""

# T tokens  K top-k  N pairs that chose this rank's slots  H hidden size

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.data.dispatch.base import CollectiveLog, DispatchTimes, NoCollectiveLog, RankPlace
from trimtab.experts.data.kernels.base import ExpertKernel, in_place_experts
from trimtab.kernels.native.exchange import ExchangeAbortedError, NativeExchange, Phase, Senders

# From so many own pairs per slot on, products take so much longer than reading weights that reading some twice costs
# next to nothing.
MANY_PAIRS_PER_SLOT = 32


class _Order(NamedTuple):
    """When a rank computes which pairs. Slots are counted from the rank's first."""

    before: range  # own tokens' pairs with these slots, before all have sent
    between: Senders  # what is left of all slots, once all have sent; then the rank answers
    after: range  # own tokens' pairs with these slots, after it has answered


def _all_at_once(num_slots: int) -> _Order:
    return _Order(range(0), Senders.ALL, range(0))


def _own_around_others(num_slots: int) -> _Order:
    """Ranks are never equally fast; with own work on both sides, one that is ahead by less than that waits for nobody.
    Each rank decides for itself: when its own pairs are computed changes no bit, by row invariance, and concerns nobody
    else, unless others read this rank's inbox, as ranks that share tokens do."""
    return _Order(range(num_slots // 2), Senders.OTHERS, range(num_slots // 2, num_slots))


class SharedMemoryDispatcher:
    """A token's row is written once, where every rank can read it; outputs are written where their token's rank sums
    them. `timeout_s` is how long a rank waits for the others in one layer. With many tokens, a rank that shares them
    with none computes them around those of the others."""

    name = "shared_memory"

    def __init__(self, exchange: NativeExchange, place: RankPlace, timeout_s: float) -> None:
        assert exchange.rank == place.rank and exchange.sizes.num_ranks == place.num_ranks
        self.place = place
        self.times = DispatchTimes()
        self.log: CollectiveLog = NoCollectiveLog()
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._many_pairs_per_slot = MANY_PAIRS_PER_SLOT
        self._order_of_many = _own_around_others if place.num_sharing == 1 else _all_at_once

    def run_experts(self, kernel: ExpertKernel, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        try:
            return self._run(kernel, hidden, slot_ids, gate_weights)
        except ExchangeAbortedError as error:
            raise RankFailureError(str(error)) from error
        except BaseException:
            self.abort()  # whoever waits for this rank's rows would wait in vain
            raise

    def _run(self, kernel: ExpertKernel, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        exchange, place = self._exchange, self.place
        num_tokens, top_k = slot_ids.shape
        hidden_size = hidden.shape[1]
        self.log.record("shared_memory", (top_k, hidden_size))

        started = time.perf_counter()
        own = place.share(num_tokens, place.rank)
        num_all_slots = kernel.num_slots * place.num_ranks
        exchange.send(place.part(hidden, own), place.part(slot_ids, own), num_all_slots)
        is_many = (own.stop - own.start) * top_k >= self._many_pairs_per_slot * num_all_slots
        order = (self._order_of_many if is_many else _all_at_once)(kernel.num_slots)
        computed = self._compute(kernel, Senders.OWN, order.before, top_k, hidden_size)
        waited = self._wait(Phase.SENT)
        computed += self._compute(kernel, order.between, range(kernel.num_slots), top_k, hidden_size)
        exchange.answer()
        computed += self._compute(kernel, Senders.OWN, order.after, top_k, hidden_size)
        waited += self._wait(Phase.ANSWERED)
        out = torch.empty_like(hidden)
        for rank in place.group:
            share = place.share(num_tokens, rank)
            outputs = exchange.inbox(rank, share.stop - share.start, top_k, hidden_size)
            kernel.combine(
                outputs, place.part(slot_ids, share), place.part(gate_weights, share), place.part(out, share)
            )
        ended = time.perf_counter()

        self.times.num_layers += 1
        self.times.wait_s += waited
        self.times.experts_s += computed
        self.times.exchange_s += ended - started - computed - waited
        return out

    def _compute(self, kernel: ExpertKernel, senders: Senders, slots: range, top_k: int, hidden_size: int) -> float:
        """Outputs of the pairs that chose `slots`, into the inboxes; seconds that the experts took."""
        if not slots:
            return 0.0
        exchange, first_slot = self._exchange, self.place.rank * kernel.num_slots
        arrivals = exchange.arrivals(senders, first_slot, slots, top_k, hidden_size)
        started = time.perf_counter()
        if (in_place := in_place_experts(kernel, arrivals.dtype)) is not None:
            in_place.experts_in_place(
                arrivals.dtype, arrivals.row_addresses, arrivals.slot_ids, arrivals.output_addresses
            )
        else:
            exchange.scatter(kernel.experts(exchange.gather(arrivals, hidden_size), arrivals.slot_ids), arrivals)
        return time.perf_counter() - started

    def _wait(self, phase: Phase) -> float:
        """Seconds until all ranks were there."""
        started = time.perf_counter()
        while (missing := self._exchange.wait(phase)) is not None:
            if time.perf_counter() - started > self._timeout_s:
                did = "sent its tokens" if phase is Phase.SENT else "answered"
                raise RankFailureError(
                    f"rank {missing} has not {did} in a MoE layer's exchange within {self._timeout_s} s "
                    f"(seen by rank {self.place.rank})"
                )
        return time.perf_counter() - started

    def abort(self) -> None:
        self._exchange.abort()

    def close(self) -> None:
        return None
