"""A receive left pending by an aborted transaction swallows the next one's bytes: the fault, and why it is not ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from byte_ranks import FIRST, SECOND, TOPOLOGY, byte_ranks, wrong_slots
from torch import Tensor

from trimtab.distributed.gloo import GlooTransport
from trimtab.experts.movement.choice import MovementPlan
from trimtab.experts.movement.communicator.base import Communicator
from trimtab.experts.movement.communicator.gloo import GlooCommunicator
from trimtab.experts.movement.faults import Point
from trimtab.experts.placement import Placement
from trimtab.experts.ports import Failed, Quiescent, Staged
from trimtab.testing.movement import MovingRanks, ScriptedFaults
from trimtab.testing.ranks import run_ranks

# In layer 0 rank 1 receives expert 2 in row 0, as it does in SECOND, and copies one of its own.
OTHER = Placement(TOPOLOGY, [[0, 1, 2, 3, 3, 2], [0, 1, 2, 3, 2, 1]])


class OneGroupForAll(GlooCommunicator):
    """The naive one: its group lives as long as it does, whatever became of the transactions before."""

    _kept: ClassVar[list[object]] = []  # receives stay posted, as those of a thread that was given up do

    def begin(self, transaction: int, aborted: threading.Event) -> None:
        if self._transport is None:
            super().begin(0, aborted)
        self._aborted = aborted

    def end(self, *, is_aborted: bool) -> None:
        self._kept.append(self._expected)
        self._expected = {}

    def close(self) -> None:
        super().close()
        super().end(is_aborted=True)


def naive(plan: MovementPlan, rank: int) -> Communicator:
    return OneGroupForAll(plan.address, plan.sizes(), rank, plan.timeout_s)


def test_gloo_gives_the_next_bytes_to_a_receive_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    """The fault itself, without any of our protocol: messages of a pair have an order and no names."""
    met = threading.Barrier(2)

    def work(rank: int) -> list[int]:
        transport = GlooTransport(tmp_path, "one", rank, 2, 10.0)
        first, second, third = (torch.zeros(1, dtype=torch.uint8) for _ in range(3))
        if rank == 1:
            stale = transport.post_receive(first, 0, 0)  # of a transaction that was aborted before rank 0 sent
            arrives = transport.post_receive(second, 0, 0)  # of the next one
            met.wait()
            arrives.wait()
            stale.wait()
        else:
            met.wait()
            for value in (77, 78):
                third[0] = value
                transport.post_send(third, 1, 0).wait()
        met.wait()
        transport.close()
        return [int(first[0]), int(second[0])]

    assert run_ranks(2, work)[1] == [77, 78]  # 77 was the first byte meant for `second`


@contextmanager
def with_receives_pending(folder: Path, **options: Any) -> Iterator[MovingRanks]:
    """Rank 1 had opened layer 0 and rank 0 never came to send when the transaction ended."""
    opened = threading.Event()

    def says_so(layer: int, data: Tensor | None, aborted: threading.Event) -> None:
        opened.set()
        aborted.wait()

    faults = ScriptedFaults({Point.COPY: says_so})
    with byte_ranks(folder, faults={1: faults}, **options) as ranks:
        ranks.begin(OTHER)
        ranks.movers[1].stage(0)
        opened.wait()
        assert ranks.abort() == [[Quiescent(rank, 1)] for rank in (0, 1)]
        faults.actions.clear()
        yield ranks


def test_negative_control_a_group_that_is_kept_gives_a_transaction_the_bytes_of_another(tmp_path: Path) -> None:
    """Rank 1's stale receives take what the second transaction sends, and those who wait for it wait in vain."""
    with with_receives_pending(tmp_path, communicator="torch_gloo", opener=naive, timeout_s=0.5) as ranks:
        ranks.begin(SECOND)
        reports = ranks.stage(0)
        (report,) = reports[1]
        assert isinstance(report, Failed) and "rank 1 could not recv (tag 0, rank 0)" in report.reason
        ranks.abort()
        assert wrong_slots(ranks) == []


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
def test_no_bytes_of_an_aborted_transaction_reach_the_next_one(communicator: str, tmp_path: Path) -> None:
    with with_receives_pending(tmp_path, communicator=communicator) as ranks:
        ranks.begin(SECOND)
        for layer in range(2):
            assert all(isinstance(report, Staged) for (report,) in ranks.stage(layer))
            ranks.commit(layer)
            assert wrong_slots(ranks) == []
        ranks.finish()
        ranks.check_slots()


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
def test_no_bytes_that_an_aborted_transaction_had_staged_reach_the_next_one(communicator: str, tmp_path: Path) -> None:
    """Ten times: a layer fully staged and dropped, then another plan for the same layer, on the same rows."""
    with byte_ranks(tmp_path, communicator=communicator) as ranks:
        for _ in range(10):
            ranks.begin(OTHER)
            assert all(isinstance(report, Staged) for (report,) in ranks.stage(0))
            ranks.abort()
            ranks.rearrange(SECOND)
            assert wrong_slots(ranks) == []
            ranks.rearrange(FIRST)
            assert wrong_slots(ranks) == []
