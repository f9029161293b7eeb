"""Ranks of one machine exchange tokens through memory that all of them map: the native exchange, no collective."""

# T tokens  K top-k  N pairs that chose this rank's slots  H hidden size

from __future__ import annotations

import time

import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.data.dispatch.base import CollectiveLog, DispatchTimes, NoCollectiveLog, RankPlace
from trimtab.experts.data.kernels.base import ExpertKernel, in_place_experts
from trimtab.kernels.native.exchange import ExchangeAbortedError, NativeExchange, Phase


class SharedMemoryDispatcher:
    """A token's row is written once, where every rank can read it; outputs are written where their token's rank sums
    them. `timeout_s` is how long a rank waits for the others in one layer."""

    name = "shared_memory"

    def __init__(self, exchange: NativeExchange, place: RankPlace, timeout_s: float) -> None:
        assert exchange.rank == place.rank and exchange.sizes.num_ranks == place.num_ranks
        self.place = place
        self.times = DispatchTimes()
        self.log: CollectiveLog = NoCollectiveLog()
        self._exchange = exchange
        self._timeout_s = timeout_s

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
        first_slot = place.rank * kernel.num_slots
        self.log.record("shared_memory", (top_k, hidden_size))

        started = time.perf_counter()
        own = place.share(num_tokens, place.rank)
        exchange.send(place.part(hidden, own), place.part(slot_ids, own), kernel.num_slots * place.num_ranks)
        waited = self._wait(Phase.SENT)
        arrivals = exchange.arrivals(range(first_slot, first_slot + kernel.num_slots), top_k, hidden_size)
        dispatched = time.perf_counter()
        if (in_place := in_place_experts(kernel, arrivals.dtype)) is not None:
            in_place.experts_in_place(
                arrivals.dtype, arrivals.row_addresses, arrivals.slot_ids, arrivals.output_addresses
            )
        else:
            exchange.scatter(kernel.experts(exchange.gather(arrivals, hidden_size), arrivals.slot_ids), arrivals)
        computed = time.perf_counter()
        exchange.answer()
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
        self.times.experts_s += computed - dispatched
        self.times.exchange_s += ended - started - (computed - dispatched) - waited
        return out

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
