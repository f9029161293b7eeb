"""What balancing has done and taken since the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.experts.control.gain import ASSUMED_BANDWIDTH, Changes
from trimtab.experts.control.transaction import Aborting, Committing, OpenState, State
from trimtab.experts.ports import Committed, Report, Staged


@dataclass
class Tally:
    """Seconds of staging and committing are the ranks' own, their mean."""

    slot_nbytes: int
    num_done: int = 0
    num_aborted: int = 0
    num_declined: int = 0
    num_failed: int = 0  # the policy's
    num_moves: int = 0  # slots that got another expert
    num_bytes: int = 0  # received from other ranks
    num_mixed_steps: int = 0  # with a forward, some of a transaction's layers old and some new
    planning_s: float = 0.0
    staging_s: float = 0.0
    committing_s: float = 0.0
    _received_bytes: int = 0  # what the bandwidth is measured by
    _received_s: float = 0.0
    _changes: Changes | None = None  # of the open transaction
    _seen: set[tuple[str, int, int]] = field(default_factory=set)  # its reports: a duplicate is not counted twice

    @property
    def bandwidth(self) -> float:
        """Bytes/s into a rank, measured over all moves so far."""
        return self._received_bytes / self._received_s if self._received_s > 0 else ASSUMED_BANDWIDTH

    def begin(self, changes: Changes) -> None:
        self._changes = changes
        self._seen = set()

    def count_step(self, state: State) -> None:
        """A plan with a forward goes out: are some of the transaction's layers new on the ranks, and some not?"""
        if isinstance(state, OpenState):
            is_sent = isinstance(state, Committing) or (isinstance(state, Aborting) and state.commit is not None)
            self.num_mixed_steps += 0 < state.work.num_committed + is_sent < len(state.work.layers)

    def count_commit(self, layer: int) -> None:
        assert self._changes is not None, "a commit without a transaction"
        self.num_moves += int(self._changes.num_moves[layer])
        self.num_bytes += int(self._changes.num_received[layer].sum()) * self.slot_nbytes

    def measure(self, reports: Sequence[Report], transaction: int, num_ranks: int) -> None:
        for report in reports:
            if not isinstance(report, Staged | Committed) or report.transaction != transaction:
                continue
            key = (type(report).__name__, report.rank, report.layer)
            if key in self._seen:
                continue
            self._seen.add(key)
            if isinstance(report, Committed):
                self.committing_s += report.seconds / num_ranks
                continue
            self.staging_s += report.seconds / num_ranks
            if report.num_bytes:
                self._received_bytes += report.num_bytes
                self._received_s += report.seconds
