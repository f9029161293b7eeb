"""The contract of a dispatcher: tokens reach the ranks that hold their experts, and their sums come back."""

# T tokens  K top-k  H hidden size  S slots/rank

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trimtab.experts.data.kernels.base import ExpertKernel


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands: `num_sharing` neighbouring ranks form a token group and hold the same tokens.

    One (data parallel): every rank has its own tokens. All of them (tensor parallel): all ranks have the same ones.
    """

    rank: int = 0
    num_ranks: int = 1
    num_sharing: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.num_ranks and self.num_ranks % self.num_sharing == 0, self

    @property
    def group(self) -> range:
        """The ranks that hold the same tokens as this one."""
        first = self.rank // self.num_sharing * self.num_sharing
        return range(first, first + self.num_sharing)

    def part(self, tensor: Tensor, share: slice) -> Tensor:
        """A share of the group's rows; the tensor itself where it is all of them, for a slice costs microseconds."""
        return tensor if self.num_sharing == 1 else tensor[share]

    def share(self, num_tokens: int, rank: int) -> slice:
        """The tokens that `rank` sends for its group: each token is sent, and its experts computed, once."""
        member = rank % self.num_sharing
        return slice(num_tokens * member // self.num_sharing, num_tokens * (member + 1) // self.num_sharing)


@dataclass(slots=True)
class DispatchTimes:
    """Seconds since the last `take`. Where a backend cannot tell waiting from sending, all counts as `exchange_s`."""

    num_layers: int = 0
    exchange_s: float = 0.0  # dispatch and combine, without waiting for other ranks
    wait_s: float = 0.0
    experts_s: float = 0.0

    def take(self) -> DispatchTimes:
        """What was counted; counting starts anew."""
        taken = DispatchTimes(self.num_layers, self.exchange_s, self.wait_s, self.experts_s)
        self.num_layers, self.exchange_s, self.wait_s, self.experts_s = 0, 0.0, 0.0, 0.0
        return taken


class CollectiveLog(Protocol):
    """Sees each collective operation before it starts: its name and the sizes that all ranks must agree on."""

    def record(self, operation: str, sizes: tuple[int, ...]) -> None: ...


class NoCollectiveLog:
    """Logging that is off."""

    def record(self, operation: str, sizes: tuple[int, ...]) -> None:
        return None


class Dispatcher(Protocol):
    """The tokens of all ranks through a MoE layer's experts: dispatch -> experts -> combine. One serves all layers.

    1. dispatch: each token's row goes once to every rank that holds one of its slots; rank r owns slots
       [r * S, (r + 1) * S) with S = kernel.num_slots. Slot ids of -1 send nothing.
    2. experts: each (token, slot) is computed once, on the slot's owner, which knows from the dispatcher where every
       row came from; nobody infers that from a length.
    3. combine: fp32 outputs come back to the token's rank, which weights and sums them in k order and rounds once:
       bitwise the result of one process that holds every slot.

    Collective: every rank, once per MoE layer, in layer order; a rank without tokens calls it with zero rows. Raises
    RankFailureError when another rank gives up or does not come in time; the dispatcher is then of no more use.
    Called on: the runner's thread.
    """

    name: str
    place: RankPlace
    times: DispatchTimes
    log: CollectiveLog

    def run_experts(self, kernel: ExpertKernel, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        """hidden [T, H], slot_ids [T, K] int64 over all ranks' slots, gate_weights [T, K] -> [T, H] of hidden's dtype.

        Ranks of a token group bring the same tensors and all get the result.
        """
        ...

    def abort(self) -> None:
        """Makes the other ranks fail as soon as the backend allows. From any thread."""
        ...

    def close(self) -> None:
        """Gives back what was opened; safe to call twice."""
        ...


def check_slot_ids(slot_ids: Tensor, num_slots: int) -> None:
    """Raises RuntimeError for an id that no rank owns: nobody would ever answer it."""
    if slot_ids.numel() and not (int(slot_ids.min()) >= -1 and int(slot_ids.max()) < num_slots):
        raise RuntimeError(f"a slot id is below -1 or not below num_slots ({num_slots})")
