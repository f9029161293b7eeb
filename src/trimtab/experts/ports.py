"""The words between controller and workers, and the doors between the rooms. No torch at run time.

Commands ride on step plans: every rank executes those of a plan, in order, before its forward. Reports ride on step
outputs. Both name their transaction; a report of another transaction than the open one is dropped.
"""

# L MoE layers  E experts  P slots

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from trimtab.experts.delta import LayerDelta
    from trimtab.experts.placement import Placement

# -- commands: controller -> every worker ------------------------------------------------------------------------------


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Closes the load bucket that is open, if one is (each rank reports it with this step's output, without this step),
    and opens the next one, from this step on, where `on`."""

    on: bool


class Plan(msgspec.Struct, frozen=True, tag=True, eq=False):
    """A transaction begins: this placement is to follow the one whose digest is `start_digest`."""

    transaction: int
    slot_to_expert: np.ndarray  # int64 [L, P]
    shares: np.ndarray  # int64 [L, P]
    start_digest: str


class Stage(msgspec.Struct, frozen=True, tag=True):
    """The mover brings one layer's experts into staging."""

    transaction: int
    layer: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """One act before the forward: install what is staged, set the placement, refresh the lookup, answer the mover.

    A layer whose shares alone change is committed without having been staged. A `Stage` beside it waits on each rank
    until the layer's experts have come home, out of staging.
    """

    transaction: int
    layer: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nothing more of this transaction is staged or committed; each rank says `Quiescent` when its mover rests."""

    transaction: int
    reason: str


class CheckWeights(msgspec.Struct, frozen=True, tag=True):
    """Are the files at `path` whole and of this model's shapes? Nothing is changed. A rank that takes longer than
    `timeout_s` for it is taken for lost."""

    path: str
    weights_version: int
    timeout_s: float


class Refit(msgspec.Struct, frozen=True, tag=True):
    """New weights, between two steps: every slot is written by the placement in force. Follows `CheckWeights`, with the
    same limit; ranks wait for each other as long."""

    path: str
    weights_version: int
    timeout_s: float


Command = Collect | Plan | Stage | Commit | Abort | CheckWeights | Refit

# -- reports: each worker -> controller --------------------------------------------------------------------------------


class LoadReport(msgspec.Struct, frozen=True, tag=True, eq=False):
    """One rank's bucket of load, folded to logical experts; its own tokens only."""

    rank: int
    counts: np.ndarray  # int64 [L, E], token-expert pairs
    num_steps: int  # steps with a forward while the bucket was open
    num_recorded_steps: int  # those that were counted: the phase filter leaves some out
    step_s: float = 0.0  # time of those steps, and what of it went into experts and into waiting for other ranks
    experts_s: float = 0.0
    wait_s: float = 0.0


class Staged(msgspec.Struct, frozen=True, tag=True):
    """This rank's staging holds all it receives of the layer, headers and checksums right; all its sends are done."""

    rank: int
    transaction: int
    layer: int
    num_bytes: int = 0  # received from other ranks
    seconds: float = 0.0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The layer is wholly new on this rank, wherever its kernel reads it. `digest` is of the rank's whole placement."""

    rank: int
    transaction: int
    layer: int
    digest: str
    seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank cannot go on with the transaction; only the controller aborts it. `layer` -1: none in particular.

    `is_consequence`: it waited for another rank, which is more likely to know why.
    """

    rank: int
    transaction: int
    layer: int
    reason: str
    is_consequence: bool = False


class Quiescent(msgspec.Struct, frozen=True, tag=True):
    """A transaction is over on this rank: its mover rests, its kernels read slots alone and its staging is free.

    Follows the last `Commit`, or an `Abort` (also of a transaction that this rank does not know).
    """

    rank: int
    transaction: int


class WeightsChecked(msgspec.Struct, frozen=True, tag=True):
    """Answer to `CheckWeights`: `problem` is empty where the files can be loaded."""

    rank: int
    weights_version: int
    problem: str


class Refitted(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Refit`. `problem` is not empty where it failed after the first byte: the rank's weights are mixed."""

    rank: int
    weights_version: int
    problem: str


Report = LoadReport | Staged | Committed | Failed | Quiescent | WeightsChecked | Refitted
MoverReport = Staged | Failed | Quiescent


def answer_weights(
    command: CheckWeights | Refit, weights: Weights, rank: int, placement: Placement | None
) -> WeightsChecked | Refitted:
    """Executes a command about new weights, the same on every rank whether experts are balanced or not."""
    answer = WeightsChecked if isinstance(command, CheckWeights) else Refitted
    try:
        if isinstance(command, CheckWeights):
            problem = weights.check(command.path)
        else:
            weights.refit(command.path, placement, command.weights_version, command.timeout_s)
            problem = ""
    except Exception as error:  # whatever a file is, the engine lives; of mixed weights the controller must hear
        problem = f"{type(error).__name__}: {error}"
    return answer(rank, command.weights_version, problem)


# -- doors between the rooms -------------------------------------------------------------------------------------------


class PreparedSlot(Protocol):
    """An expert in the form that `SlotStorage.install` takes; what it is, only its storage knows."""


class Loan(Protocol):
    """A slot whose kernel reads staging until the slot's own memory holds the expert.

    1. `copy_home`, 2. `give_back`; both once.
    """

    def copy_home(self) -> int:
        """Copies the expert from staging into the slot's own memory -> `checksum` of what lies there then.

        Called on: the mover's thread, while forwards read staging.
        """
        ...

    def give_back(self) -> None:
        """The kernel reads the slot's own memory from now on. Called on: the runner's thread, between forwards."""
        ...


class SlotStorage(Protocol):
    """The data room's door for movement: the exact storage that one layer's kernel reads on this rank.

    Slots are counted from 0 on each rank. The bytes of a slot as they travel are `slot_nbytes` long, contiguous,
    self-contained (scales and biases included), and mean the same on every rank whose `layout` is the same.
    """

    num_slots: int
    slot_nbytes: int
    layout: str  # format, shape and packing; compared between all layers and ranks at start

    def export_slot(self, slot: int, out: Tensor) -> int:
        """Writes the bytes the kernel reads into out uint8 [slot_nbytes], every one -> `checksum` of what was written.

        Called on: the mover's thread.
        """
        ...

    def prepare(self, data: Tensor) -> PreparedSlot:
        """Whatever costs time (unpacking, repacking), so that `install` is short. Called on: the mover's thread.

        May keep a reference to data uint8 [slot_nbytes]: it stays as it is until the layer was dropped, or installed
        and all its loans given back.
        """
        ...

    def install(self, slot: int, prepared: PreparedSlot) -> Loan | None:
        """The kernel computes with this expert from now on. Takes microseconds, whatever the expert's size.

        A loan where the kernel reads what was given to `prepare` from now on; None where it keeps nothing of that.
        Called on: the runner's thread, between forwards.
        """
        ...


class Weights(Protocol):
    """New weights for a rank that serves. Called on: the runner's thread, between forwards."""

    def check(self, path: str) -> str:
        """Why the files at `path` cannot be loaded, or nothing. Changes nothing."""
        ...

    def refit(self, path: str, placement: Placement | None, weights_version: int, timeout_s: float) -> None:
        """Overwrites every weight; slots by `placement`, the one in force (None: slot e is expert e).

        Ranks wait for each other as long as `timeout_s`. What it raises leaves the rank with mixed weights.
        """
        ...


class Mover(Protocol):
    """The movement room's door: one per worker. Called on: the runner's thread; none of these waits for the mover.

    1. `begin` a transaction with what changes; 2. per layer `stage`, until `poll` brings its `Staged`;
    3. at the commit `take` the staged experts, install them, then answer `installed` with the loans they gave. Where
    there are none, staging is free; else its experts are on their way home, and staging is free when a `poll` has
    found them there and given back the loans. A layer that is ordered meanwhile is staged after that.
    4. `finish` after the last commit, or `abort`: `poll` brings `Quiescent`, after the experts have come home.
    """

    staging_nbytes: int  # allocated at start, never more

    def begin(self, transaction: int, placement: Placement, deltas: Sequence[LayerDelta]) -> None:
        """`placement` is the one in force: it says who holds what now."""
        ...

    def exchange(self, placement: Placement, timeout_s: float) -> None:
        """Agrees with all other ranks on what each expert's bytes are: at start, and after new weights. Waits for them.

        Raises where replicas differ or a rank does not come within `timeout_s`.
        """
        ...

    def stage(self, layer: int) -> None: ...

    def poll(self) -> list[MoverReport]:
        """What has come about since the last call; gives back loans of experts that are home. Between forwards.

        Raises where the mover cannot go on: above all where an expert did not come home as ranks agreed on it, with
        which the kernel has computed since the commit.
        """
        ...

    def take(self, layer: int) -> Sequence[tuple[int, PreparedSlot]]:
        """(slot of this rank counted from 0, expert to install there), for a layer that is staged on all ranks."""
        ...

    def installed(self, layer: int, loans: Mapping[int, Loan]) -> None:
        """`loans` by slot, of those that the kernel reads in staging now."""
        ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None:
        """Brings experts home, ends the thread and gives back what was opened, from every state; safe to call twice."""
        ...
