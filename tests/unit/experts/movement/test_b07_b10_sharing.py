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

from trimtab.distributed.errors import RankFailureError
from trimtab.distributed.gloo import GlooTransport, Pending
from trimtab.experts.movement.choice import choose_communicator, create_resources, open_communicator
from trimtab.experts.movement.communicator.base import Communicator, Header
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


SENT = [
    torch.randint(0, 256, (LARGE_NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(row))
    for row in range(3)
]
ARRIVALS = [(row, 0, LARGE_NBYTES) for row in range(3)]


def header(row: int) -> Header:
    return Header(5, 2, row, 3, LARGE_NBYTES)


def send_and_leave(end: Communicator, left: threading.Event) -> None:
    """Rank 0's whole transaction, and its end."""
    try:
        end.begin(5, threading.Event())
        end.open_layer(2, [])
        for row in range(3):

            def export(out: Tensor, row: int = row) -> int:
                out.copy_(SENT[row])
                return row

            end.send(1, row, header(row), export)
        end.end(is_aborted=False)
        end.close()
    finally:
        left.set()


@contextmanager
def two_ends(communicator: str, folder: Path) -> Iterator[list[Communicator]]:
    plan = choose_communicator(
        num_ranks=2, slots_per_rank=3, slot_nbytes=LARGE_NBYTES, communicator=communicator, timeout_s=30.0
    )
    resources = create_resources(plan, folder)
    ends = [open_communicator(resources.plan, rank) for rank in range(2)]
    resources.close()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@every_communicator
def test_b10_a_sender_that_leaves_after_its_last_send_has_given_all_of_it(communicator: str, tmp_path: Path) -> None:
    """B10: sends are waited for before a rank ends its transaction and closes; the receiver looks only then."""
    left = threading.Event()

    def receive(end: Communicator) -> None:
        end.begin(5, threading.Event())
        end.open_layer(2, ARRIVALS)
        left.wait()
        for row in range(3):
            assert end.receive(row, 0) == header(row)._replace(checksum=row)
            assert torch.equal(end.staging[row][:LARGE_NBYTES], SENT[row])
        end.end(is_aborted=False)

    with two_ends(communicator, tmp_path) as ends:
        run_ranks(2, lambda rank: receive(ends[1]) if rank else send_and_leave(ends[0], left))


def test_b10_a_sender_that_waited_for_no_send_is_an_error_of_its_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above, and what its receiver would see: no bytes, and never silence."""
    left = threading.Event()
    post_send = GlooTransport.post_send

    class Forgotten:
        def __init__(self, pending: Pending) -> None:
            self.pending = pending  # not gone, so that nothing but the leaving ends it

        def wait(self) -> None:
            pass

    monkeypatch.setattr(GlooTransport, "post_send", lambda *arguments: Forgotten(post_send(*arguments)))

    def receive(end: Communicator) -> None:
        end.begin(5, threading.Event())
        left.wait()
        with pytest.raises(RankFailureError):
            end.open_layer(2, ARRIVALS)
            end.receive(0, 0)

    with two_ends("torch_gloo", tmp_path) as ends:
        run_ranks(2, lambda rank: receive(ends[1]) if rank else send_and_leave(ends[0], left))
