"""Which communicator moves experts, why, and how controller and ranks open it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimtab.distributed.errors import RankFailureError
from trimtab.distributed.segment import SharedSegment
from trimtab.experts.movement.communicator.base import Communicator
from trimtab.experts.movement.communicator.gloo import GlooCommunicator
from trimtab.experts.movement.communicator.shared_memory import (
    LoopbackCommunicator,
    SharedMemoryCommunicator,
    memory_nbytes,
)
from trimtab.experts.movement.staging import StagingSizes
from trimtab.kernels.features import is_x86

logger = logging.getLogger(__name__)

COMMUNICATORS = ("shared_memory", "torch_gloo")


@dataclass(frozen=True, slots=True)
class MovementPlan:
    """What every rank needs to know to open its communicator: plain values, the same on all ranks.

    `address`: the segment's path (shared_memory) or a private folder where ranks meet (torch_gloo). `timeout_s` is the
    longest that a rank waits for another one.
    """

    communicator: str  # "loopback", "shared_memory" or "torch_gloo"
    num_ranks: int
    slots_per_rank: int
    slot_nbytes: int
    timeout_s: float
    address: str = ""

    def sizes(self) -> StagingSizes:
        return StagingSizes(self.num_ranks, self.slots_per_rank, self.slot_nbytes)

    @property
    def shared_bytes(self) -> int:
        """Memory that the ranks have in common: all their staging."""
        return memory_nbytes(self.sizes()) if self.communicator == "shared_memory" else 0

    @property
    def rank_bytes(self) -> int:
        """Memory of each rank's own: staging where it is not shared, and an expert on its way out."""
        sizes = self.sizes()
        if self.communicator == "loopback":
            return memory_nbytes(sizes)
        return sizes.staging_nbytes + sizes.row_nbytes if self.communicator == "torch_gloo" else 0

    @property
    def num_bytes(self) -> int:
        """All of it, over all ranks."""
        return self.shared_bytes + self.num_ranks * self.rank_bytes


def choose_communicator(
    *, num_ranks: int, slots_per_rank: int, slot_nbytes: int, communicator: str | None = None, timeout_s: float
) -> MovementPlan:
    """The plan without an address, and its reason in one log line; all ranks are on this machine.

    Raises ValueError when `communicator` (of eplb_config) is unknown or cannot serve here.
    """
    if communicator is not None and communicator not in COMMUNICATORS:
        raise ValueError(
            f"communicator ({communicator!r}) must be one of {', '.join(COMMUNICATORS)}; leave it out to choose"
        )
    if communicator == "shared_memory" and not is_x86():
        raise ValueError("communicator ('shared_memory') needs an x86-64 machine; leave it out or use 'torch_gloo'")
    if num_ranks == 1:
        chosen, reason = "loopback", "one rank holds every expert"
    elif communicator is not None:
        chosen, reason = communicator, "asked for by communicator"
    elif is_x86():
        chosen, reason = "shared_memory", "all ranks are on this machine"
    else:
        chosen, reason = "torch_gloo", "this machine may reorder writes to shared memory"
    plan = MovementPlan(chosen, num_ranks, slots_per_rank, slot_nbytes, timeout_s)
    logger.info(
        "experts move by %s between %d ranks (%s); staging %.1f MiB per rank",
        chosen, num_ranks, reason, plan.sizes().staging_nbytes / 2**20,
    )  # fmt: skip
    return plan


@dataclass(slots=True)
class MovementResources:
    """What the controller holds while ranks start: give each of them `plan`, then `close`; the ranks hold it then."""

    plan: MovementPlan
    segment: SharedSegment | None = field(default=None)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


def create_resources(plan: MovementPlan, folder: str | Path, available_bytes: int | None = None) -> MovementResources:
    """Called by the controller, before ranks start. `folder` is private (0700) and outlives the ranks.

    Raises ValueError naming the bytes that shared memory needs and those that are there.
    """
    if plan.communicator == "shared_memory":
        segment = SharedSegment.create(
            plan.shared_bytes, available_bytes, remedy="lower num_redundant_experts or use communicator='torch_gloo'"
        )
        return MovementResources(replace(plan, address=segment.path), segment)
    return MovementResources(replace(plan, address=str(folder)))


def open_communicator(plan: MovementPlan, rank: int) -> Communicator:
    """Called by each rank, in its own process or thread. Raises RankFailureError when the controller is gone."""
    if plan.communicator == "loopback":
        return LoopbackCommunicator(plan.sizes(), plan.timeout_s)
    if plan.communicator == "torch_gloo":
        return GlooCommunicator(plan.address, plan.sizes(), rank, plan.timeout_s)
    try:
        segment = SharedSegment.attach(plan.address)
    except OSError as error:
        raise RankFailureError(f"rank {rank} finds no shared memory at {plan.address}: {error.strerror}") from error
    communicator = SharedMemoryCommunicator(segment.memory, plan.sizes(), rank, plan.timeout_s)
    segment.close()  # the communicator's views keep the memory; its descriptor is not needed any more
    return communicator
