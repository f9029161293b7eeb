"""Transports move bytes, whatever they mean, and listen nowhere but on loopback."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.distributed.gloo import GlooTransport
from trimtab.distributed.transport import Transport, as_bytes, self_test
from trimtab.testing.loopback import LoopbackWorld
from trimtab.testing.ranks import run_ranks

Open = Callable[[int], Transport]


@pytest.fixture(params=["loopback", "gloo"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "loopback":
        return LoopbackWorld(3, 10.0).transport
    return lambda rank: GlooTransport(tmp_path, "test", rank, 3, 10.0)


DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_by_bit(opener: Open, dtype: torch.dtype) -> None:
    """B45: Gloo refuses some dtypes and sums others wrongly; it only ever sees bytes."""
    generator = torch.Generator().manual_seed(3)
    bits = [[torch.randint(256, (8 * (r + to),), generator=generator) for to in range(3)] for r in range(3)]
    sent = [[_of_bits(part, dtype) for part in row] for row in bits]

    def work(rank: int) -> None:
        arrived = opener(rank).all_to_all([as_bytes(part) for part in sent[rank]])
        for sender, part in enumerate(arrived):
            assert torch.equal(part, as_bytes(sent[sender][rank]))
            assert part.view(dtype).shape == sent[sender][rank].shape

    run_ranks(3, work)


def _of_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return values > 127
    return values.to(torch.uint8).view(dtype)


def test_the_self_test_passes_on_a_sound_transport_and_finds_a_lying_one(opener: Open) -> None:
    class Lying:
        def __init__(self, inner: Transport) -> None:
            self.inner, self.rank, self.num_ranks = inner, inner.rank, inner.num_ranks

        def all_to_all(self, parts: list[Tensor], sizes: list[int] | None = None) -> list[Tensor]:
            return [part.flip(0) for part in self.inner.all_to_all(parts, sizes)]

    def work(rank: int) -> None:
        transport = opener(rank)
        self_test(transport)
        transport.close()

    run_ranks(3, work)

    world = LoopbackWorld(2, 10.0)
    with pytest.raises(RuntimeError, match=r"rank 0 got wrong bytes of torch\.bfloat16 from rank"):
        run_ranks(2, lambda rank: self_test(Lying(world.transport(rank))))  # type: ignore[arg-type]


def test_gloo_listens_on_loopback_only(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        transport = GlooTransport(tmp_path, "test", rank, 2, 10.0)
        transport.all_to_all([torch.ones(1, dtype=torch.uint8)] * 2)
        listening = _listening_addresses()
        transport.all_to_all([torch.ones(1, dtype=torch.uint8)] * 2)  # nobody closes before all have looked
        return listening

    for addresses in run_ranks(2, work):
        assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}, addresses


def _listening_addresses() -> list[str]:
    """Local addresses of this process's listening TCP sockets, as the kernel writes them."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
        own |= {found[1]} if found else set()
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                addresses.append(fields[1].split(":")[0])
    return addresses


def test_gloo_says_who_is_alone_when_another_rank_never_comes(tmp_path: Path) -> None:
    with pytest.raises(RankFailureError, match=r"rank 0 could not connect with the other 1 ranks within 0\.5 s"):
        GlooTransport(tmp_path, "test", 0, 2, 0.5)


def test_a_gloo_group_that_failed_is_never_used_again(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        transport = GlooTransport(tmp_path, "test", rank, 2, 0.5)
        if rank == 1:
            return
        for words in ("could not exchange", "was closed or has failed"):
            with pytest.raises(RankFailureError, match=words):
                transport.all_to_all([torch.ones(1, dtype=torch.uint8)] * 2)

    run_ranks(2, work)


def test_gloo_passes_bytes_between_two_ranks_into_the_receivers_memory(tmp_path: Path) -> None:
    """Tags tell messages apart, in whatever order they are sent; nothing but the receive's own bytes is written."""

    def work(rank: int) -> None:
        transport = GlooTransport(tmp_path, "pair", rank, 2, 10.0)
        around = torch.zeros(12, dtype=torch.uint8)
        received = [transport.post_receive(around[4 * tag + 1 : 4 * tag + 4], 1 - rank, tag) for tag in range(3)]
        for tag in (2, 0, 1):
            transport.post_send(torch.full((3,), 10 * rank + tag + 1, dtype=torch.uint8), 1 - rank, tag).wait()
        for pending in received:
            pending.wait()
        sender = 10 * (1 - rank)
        assert around.tolist() == [0, *[sender + 1] * 3, 0, *[sender + 2] * 3, 0, *[sender + 3] * 3]
        transport.close()

    run_ranks(2, work)
    assert list(tmp_path.iterdir()) == []


def test_a_gloo_receive_fails_when_its_sender_closes_and_the_group_is_of_no_more_use(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        transport = GlooTransport(tmp_path, "pair", rank, 2, 60.0)
        if rank == 1:
            transport.close()
            return
        with pytest.raises(RankFailureError, match=r"rank 0 could not recv \(tag 0, rank 1\)"):
            transport.post_receive(torch.zeros(3, dtype=torch.uint8), 1, 0).wait()
        with pytest.raises(RankFailureError, match="its group was closed or has failed"):
            transport.post_send(torch.zeros(3, dtype=torch.uint8), 1, 0)

    run_ranks(2, work)
    assert list(tmp_path.iterdir()) == []
