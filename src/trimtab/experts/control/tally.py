"""What balancing has done and taken since the start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.experts.control.gain import ASSUMED_BANDWIDTH, Changes
from trimtab.experts.control.transaction import Aborting, Committing, OpenState, State
from trimtab.experts.ports import Committed, Report, Staged

# Upper bounds (s) of the classes that step times are counted in; a last class holds what is longer.
STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass
class Durations:
    """How often and how long, in classes."""

    total_s: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self.counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1

    def numbers(self) -> dict[str, Any]:
        """`counts[i]`: those of at most `bounds_s[i]` and longer than the bound before; the last of any length."""
        return {"num": sum(self.counts), "total_s": self.total_s, "bounds_s": STEP_BOUNDS_S, "counts": [*self.counts]}


@dataclass
class Tally:
    """Seconds of staging and committing are the ranks' own, their mean."""

    slot_nbytes: int
    num_done: int = 0
    num_aborted: int = 0
    num_declined: int = 0
    num_failed: int = 0  # the policy's
    num_moves: int = 0  # slots that got another expert
    num_received: int = 0  # of them: the expert came from another rank; the others were copied on their own
    num_bytes: int = 0  # received from other ranks
    num_mixed_steps: int = 0  # with a forward, some of a transaction's layers old and some new
    planning_s: float = 0.0
    staging_s: float = 0.0
    committing_s: float = 0.0
    steps_at_rest: Durations = field(default_factory=Durations)
    steps_rearranging: Durations = field(default_factory=Durations)  # a transaction was open when they were sent
    _received_bytes: int = 0  # what the bandwidth is measured by
    _received_s: float = 0.0
    _changes: Changes | None = None  # of the open transaction
    _seen: set[tuple[str, int, int]] = field(default_factory=set)  # its reports: a duplicate is not counted twice

    @property
    def bandwidth(self) -> float:
        """Bytes/s into a rank, measured over all moves so far."""
        return self._received_bytes / self._received_s if self._received_s > 0 else ASSUMED_BANDWIDTH

    def numbers(self) -> dict[str, Any]:
        """As plain data, by the names that `LLM.eplb_stats` gives them."""
        num_copied = self.num_moves - self.num_received
        return {
            "rearrangements": {
                "done": self.num_done,
                "aborted": self.num_aborted,
                "declined": self.num_declined,
                "failed": self.num_failed,
            },
            "moves": self.num_moves,
            "moves_by_kind": {"received": self.num_received, "copied": num_copied},
            "bytes": self.num_bytes,
            "bytes_by_kind": {"received": self.num_bytes, "copied": num_copied * self.slot_nbytes},
            "mixed_layer_steps": self.num_mixed_steps,
            "planning_s": self.planning_s,
            "staging_s": self.staging_s,
            "committing_s": self.committing_s,
            "step_times": {"at_rest": self.steps_at_rest.numbers(), "rearranging": self.steps_rearranging.numbers()},
            "bandwidth": self.bandwidth,
        }

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
        num_received = int(self._changes.num_received[layer].sum())
        self.num_moves += int(self._changes.num_moves[layer])
        self.num_received += num_received
        self.num_bytes += num_received * self.slot_nbytes

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
