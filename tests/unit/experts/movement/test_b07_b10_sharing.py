"""Movement takes its share and no more, and leaves nothing half sent: what other engines' users met (B07, B10)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from byte_ranks import FIRST, SECOND, byte_ranks, wrong_slots
from torch import Tensor

from trimtab.experts.movement.choice import choose_communicator, create_resources, open_communicator
from trimtab.experts.movement.communicator.base import Header
from trimtab.experts.movement.mover import MovementConfig
from trimtab.experts.movement.pacing import Pacer
from trimtab.testing.ranks import run_ranks

every_communicator = pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
LARGE_NBYTES = 8 * 2**20  # more than sockets hold on the way


class CountedPacer(Pacer):
    """Each piece of work takes one second of a clock that nothing else moves; rests are noted and not waited for."""

    def __init__(self, max_share: float) -> None:
        super().__init__(max_share, clock=self._tick)
        self._now = 0.0
        self._since_rest = 0
        self.num_pieces = 0
        self.pieces_between_rests: list[int] = []
        self.rests: list[float] = []

    def _tick(self) -> float:
        self._now += 1.0
        return self._now

    @contextmanager
    def work(self) -> Iterator[None]:
        self.num_pieces += 1
        self._since_rest += 1
        with super().work():
            yield

    def rest(self, wait: Callable[[float], object]) -> None:
        assert self._since_rest > 0, "nothing to rest from"
        self.pieces_between_rests.append(self._since_rest)
        self._since_rest = 0
        super().rest(self.rests.append)

    @property
    def is_rested(self) -> bool:
        return self._since_rest == 0


@every_communicator
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_b07_movers_rest_after_every_expert_so_long_that_they_keep_their_share(
    communicator: str, share: float, tmp_path: Path
) -> None:
    """B07: background movement that runs all the time takes a bounded part of what a forward needs, in pieces of one
    expert, whatever kinds of moves there are."""
    with byte_ranks(tmp_path, communicator=communicator, config=MovementConfig(max_share_of_time=share)) as ranks:
        pacers = []
        for mover in ranks.movers:
            assert mover._pacer._rest_per_work == pytest.approx(1.0 / share - 1.0), "the setting reaches the pacer"
            mover._pacer = CountedPacer(share)
            pacers.append(mover._pacer)
        for placement in (SECOND, FIRST, SECOND):
            ranks.rearrange(placement)
        assert wrong_slots(ranks) == []
        for pacer in pacers:
            assert pacer.num_pieces > 20 and max(pacer.pieces_between_rests) == 1 and pacer.is_rested
            assert pacer.num_pieces / (pacer.num_pieces + sum(pacer.rests)) == pytest.approx(share)


@every_communicator
def test_b10_a_sender_that_leaves_after_its_last_send_has_given_all_of_it(communicator: str, tmp_path: Path) -> None:
    """B10: sends are waited for before a rank ends its transaction and closes; the receiver looks only then."""
    plan = choose_communicator(
        num_ranks=2, slots_per_rank=3, slot_nbytes=LARGE_NBYTES, communicator=communicator, timeout_s=30.0
    )
    resources = create_resources(plan, tmp_path)
    ends = [open_communicator(resources.plan, rank) for rank in range(2)]
    resources.close()
    left = threading.Event()
    sent = [
        torch.randint(0, 256, (LARGE_NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(row))
        for row in range(3)
    ]

    def header(row: int) -> Header:
        return Header(5, 2, row, 3, LARGE_NBYTES)

    def export(row: int) -> Callable[[Tensor], int]:
        def write(out: Tensor) -> int:
            out.copy_(sent[row])
            return row

        return write

    def send() -> None:
        try:
            ends[0].begin(5, threading.Event())
            ends[0].open_layer(2, [])
            for row in range(3):
                ends[0].send(1, row, header(row), export(row))
            ends[0].end(is_aborted=False)
            ends[0].close()
        finally:
            left.set()

    def receive() -> None:
        ends[1].begin(5, threading.Event())
        ends[1].open_layer(2, [(row, 0, LARGE_NBYTES) for row in range(3)])
        left.wait()
        for row in range(3):
            assert ends[1].receive(row, 0) == header(row)._replace(checksum=row)
            assert torch.equal(ends[1].staging[row][:LARGE_NBYTES], sent[row])
        ends[1].end(is_aborted=False)

    try:
        run_ranks(2, lambda rank: receive() if rank else send())
    finally:
        for end in ends:
            end.close()
