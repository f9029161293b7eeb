"""Which dispatcher serves, why, and how controller and ranks open it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimtab.distributed.errors import RankFailureError
from trimtab.distributed.gloo import GlooTransport
from trimtab.distributed.segment import SharedSegment
from trimtab.distributed.transport import self_test
from trimtab.experts.data.dispatch.base import Dispatcher, RankPlace
from trimtab.experts.data.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher
from trimtab.experts.data.dispatch.local import LocalDispatcher
from trimtab.experts.data.dispatch.shared_memory import SharedMemoryDispatcher
from trimtab.kernels.native.exchange import (
    ExchangeSizes,
    NativeExchange,
    abort_segment,
    exchange_refusal,
    format_segment,
)

logger = logging.getLogger(__name__)

BACKENDS = ("shared_memory", "gloo")


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """What every rank needs to know to open its dispatcher: plain values, the same on all ranks but for the rank.

    `address`: the segment's path (shared_memory) or a private folder where ranks meet (gloo).
    """

    backend: str  # "local", "shared_memory" or "gloo"
    num_ranks: int = 1
    num_sharing: int = 1
    max_tokens: int = 0
    max_top_k: int = 0
    max_hidden_size: int = 0
    num_cores: int = 1
    timeout_s: float = 60.0
    address: str = ""

    @property
    def shared_bytes(self) -> int:
        """Memory that the ranks have in common."""
        return self.sizes().segment_bytes() if self.backend == "shared_memory" else 0

    def sizes(self) -> ExchangeSizes:
        most_sent = -(-self.max_tokens // self.num_sharing)  # ranks that share tokens send a part each
        return ExchangeSizes(self.num_ranks, most_sent, self.max_top_k, self.max_hidden_size)


def choose_dispatcher(
    *,
    num_ranks: int,
    num_sharing: int,
    max_tokens: int,
    max_top_k: int,
    max_hidden_size: int,
    backend: str | None = None,
    num_cores: int | None = None,
    timeout_s: float = 60.0,
) -> DispatchPlan:
    """The plan without an address, and its reason in one log line. `max_tokens` is what one rank computes per step.

    Raises ValueError when `backend` (all2all_backend) is unknown or cannot serve here.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"all2all_backend ({backend!r}) must be one of {', '.join(BACKENDS)}; leave it out to choose")
    refusal = exchange_refusal()
    if backend == "shared_memory" and refusal is not None:
        raise ValueError(f"all2all_backend ('shared_memory') cannot serve here: {refusal}; leave it out or use 'gloo'")
    if num_ranks == 1:
        chosen, reason = "local", "one rank holds every expert"
    elif backend is not None:
        chosen, reason = backend, "asked for by all2all_backend"
    elif refusal is None:
        chosen, reason = "shared_memory", "all ranks are on this machine"
    else:
        chosen, reason = "gloo", f"no native exchange: {refusal}"
    cores = num_cores or len(os.sched_getaffinity(0))
    plan = DispatchPlan(chosen, num_ranks, num_sharing, max_tokens, max_top_k, max_hidden_size, cores, timeout_s)
    size = f", {plan.sizes().segment_bytes() / 2**20:.1f} MiB shared" if chosen == "shared_memory" else ""
    logger.info("dispatcher: %s for %d ranks (%s)%s", chosen, num_ranks, reason, size)
    return plan


@dataclass(slots=True)
class DispatchResources:
    """What the controller holds while ranks run: give each of them `plan`, `abort` when one is lost, then `close`."""

    plan: DispatchPlan
    segment: SharedSegment | None = field(default=None)

    def abort(self) -> None:
        """Makes every rank that waits in the exchange fail at once. Gloo cannot: end its processes."""
        if self.segment is not None:
            abort_segment(self.segment.memory)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


def create_resources(plan: DispatchPlan, folder: str | Path, available_bytes: int | None = None) -> DispatchResources:
    """Called by the controller, before ranks start. `folder` is private (0700) and outlives the ranks' start.

    Raises ValueError naming the bytes that shared memory needs and those that are there.
    """

    if plan.backend == "local":
        return DispatchResources(plan)
    if plan.backend == "gloo":
        return DispatchResources(replace(plan, address=str(folder)))
    segment = SharedSegment.create(plan.sizes().segment_bytes(), available_bytes)
    format_segment(segment.memory, plan.sizes())
    return DispatchResources(replace(plan, address=segment.path), segment)


def open_dispatcher(plan: DispatchPlan, rank: int) -> Dispatcher:
    """Called by each rank, in its own process or thread. Collective for gloo: returns when all ranks are there.

    Raises RankFailureError when the controller or another rank is gone.
    """
    if plan.backend == "local":
        return LocalDispatcher()
    place = RankPlace(rank, plan.num_ranks, plan.num_sharing)
    if plan.backend == "gloo":
        transport = GlooTransport(plan.address, "dispatch", rank, plan.num_ranks, plan.timeout_s)
        self_test(transport)
        shares_all = plan.num_sharing == plan.num_ranks
        return (AllGatherDispatcher if shares_all else AllToAllDispatcher)(transport, place)
    try:
        segment = SharedSegment.attach(plan.address)
    except OSError as error:
        raise RankFailureError(f"rank {rank} finds no shared memory at {plan.address}: {error.strerror}") from error
    exchange = NativeExchange(segment.memory, plan.sizes(), rank, is_crowded=plan.num_ranks > plan.num_cores)
    segment.close()  # the exchange's tensors keep the memory; its descriptor is not needed any more
    return SharedMemoryDispatcher(exchange, place, plan.timeout_s)
