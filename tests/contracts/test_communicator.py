"""What every communicator must do, by itself and under movers; one joins with a line in CASES. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.delta import diff
from trimtab.experts.movement.choice import MovementPlan, choose_communicator, create_resources, open_communicator
from trimtab.experts.movement.communicator.base import Communicator, Header, MovementAbortedError, Status
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import SlotStorage
from trimtab.testing.movement import ByteSlots, MovingRanks, random_placement
from trimtab.testing.ranks import run_ranks

SEED = 20_261_130
SLOT_NBYTES = 1_003  # no multiple of anything
NUM_EXPERTS, NUM_LAYERS = 8, 3
CASES: list[tuple[str | None, int]] = [
    (None, 1),
    ("shared_memory", 2),
    ("shared_memory", 4),
    ("torch_gloo", 2),
    ("torch_gloo", 4),
]
every_case = pytest.mark.parametrize(("name", "num_ranks"), CASES)
several_ranks = pytest.mark.parametrize(("name", "num_ranks"), [("shared_memory", 2), ("torch_gloo", 2)])
Opened = Callable[..., list[Communicator]]


def expert_bytes(layer: int, expert: int) -> Tensor:
    """The oracle: what an expert is, wherever it lies."""
    generator = torch.Generator().manual_seed(1_000 * layer + expert)
    return torch.randint(0, 256, (SLOT_NBYTES,), dtype=torch.uint8, generator=generator)


def load(storage: SlotStorage, layer: int, slot: int, expert: int) -> None:
    assert isinstance(storage, ByteSlots)
    storage.slots[slot] = expert_bytes(layer, expert)


def assert_every_slot_holds_its_expert(ranks: MovingRanks) -> None:
    topology = ranks.placement.topology
    for layer in range(ranks.placement.num_layers):
        for slot, expert in enumerate(ranks.placement.slot_to_expert[layer].tolist()):
            storage = ranks.storages[topology.rank_of(slot)][layer]
            assert isinstance(storage, ByteSlots)
            found = storage.slots[slot % topology.slots_per_rank]
            assert torch.equal(found, expert_bytes(layer, expert)), (layer, slot)


def plan_of(name: str | None, num_ranks: int, slots_per_rank: int = 3, timeout_s: float = 30.0) -> MovementPlan:
    return choose_communicator(
        num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_nbytes=SLOT_NBYTES, communicator=name,
        timeout_s=timeout_s,
    )  # fmt: skip


@every_case
def test_random_placements_there_and_back_put_every_byte_in_its_place(
    name: str | None, num_ranks: int, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    topology = Topology(NUM_EXPERTS, 4, num_ranks)
    first = Placement.identity(topology, NUM_LAYERS)
    ranks = MovingRanks(
        plan_of(name, num_ranks, topology.slots_per_rank), first, tmp_path,
        lambda layer, rank: ByteSlots(topology.slots_per_rank, SLOT_NBYTES), load,
    )  # fmt: skip
    try:
        ranks.exchange()
        num_moves = num_bytes = expected_bytes = num_commits = 0

        def check() -> None:
            nonlocal num_commits
            num_commits += 1
            assert_every_slot_holds_its_expert(ranks)
            ranks.check_slots()

        for placement in [*(random_placement(topology, NUM_LAYERS, generator) for _ in range(5)), first]:
            for delta in diff(ranks.placement, placement):
                num_moves += delta.num_slots
                for transfer in delta.transfers:
                    crosses = transfer.source_rank(ranks.placement) != transfer.target_rank(ranks.placement)
                    expected_bytes += SLOT_NBYTES * crosses
            num_bytes += ranks.rearrange(placement, check)
        assert ranks.placement == first
        assert num_bytes == expected_bytes
        assert num_moves > 50 and num_commits == 6 * NUM_LAYERS
        assert (expected_bytes > 0) == (num_ranks > 1)
    finally:
        ranks.close()
    assert not [thread.name for thread in threading.enumerate() if "mover" in thread.name]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    held: list[Communicator] = []

    def open_all(name: str | None, num_ranks: int, **options: float) -> list[Communicator]:
        resources = create_resources(plan_of(name, num_ranks, **options), tmp_path)  # type: ignore[arg-type]
        ends = [open_communicator(resources.plan, rank) for rank in range(num_ranks)]
        resources.close()  # as the controller does
        held.extend(ends)
        return ends

    yield open_all
    for end in held:
        end.close()
        end.close()


def header(row: int = 0, layer: int = 2, transaction: int = 5) -> Header:
    return Header(transaction, layer, 7 + row, 3, SLOT_NBYTES)


def fill(value: int) -> Callable[[Tensor], int]:
    def export(out: Tensor) -> int:
        out.fill_(value)
        return 2**64 - value

    return export


@every_case
def test_staged_experts_lie_as_slots_do(name: str | None, num_ranks: int, opened: Opened) -> None:
    """Kernels read them there until they have come home: from a cache line on, or every load would touch two."""
    for end in opened(name, num_ranks):
        assert [row.data_ptr() % 64 for row in end.staging] == [0] * len(end.staging)


@every_case
@pytest.mark.parametrize("length", [0, 1, 5_000, 20_000])
def test_all_gather_brings_everyones_data_whatever_its_length(
    name: str | None, num_ranks: int, length: int, opened: Opened
) -> None:
    ends = opened(name, num_ranks)
    data = [bytes([rank] * (length + 100 * rank if length else 0)) for rank in range(num_ranks)]

    def work(rank: int) -> None:
        for _ in range(2):
            assert ends[rank].all_gather(data[rank]) == data

    run_ranks(num_ranks, work)


@several_ranks
def test_an_all_gather_that_ranks_gave_up_at_different_times_spoils_none_after_it(
    name: str, num_ranks: int, opened: Opened
) -> None:
    """A refit that failed for a slow rank is followed by one that succeeds, with nothing of the first one's data."""
    ends = opened(name, num_ranks)
    for end in ends:  # one after the other: each finds what those before it left, and gets further
        with pytest.raises(RankFailureError):
            end.all_gather(b"old %d" % end.rank, 0.05)
    data = [b"new %d" % rank for rank in range(num_ranks)]

    def work(rank: int) -> None:
        for _ in range(2):
            assert ends[rank].all_gather(data[rank]) == data

    run_ranks(num_ranks, work)


@several_ranks
def test_headers_arrive_whole_and_a_refusal_needs_no_bytes(name: str, num_ranks: int, opened: Opened) -> None:
    ends = opened(name, num_ranks)

    def work(rank: int) -> None:
        end = ends[rank]
        end.begin(5, threading.Event())
        end.open_layer(2, [(row, 1 - rank, SLOT_NBYTES) for row in range(3)])
        end.send(1 - rank, 0, header(0), fill(11))
        end.send(1 - rank, 2, header(2), fill(13))
        end.refuse_layer(2, [(1 - rank, 1, header(1))])
        for row, value in ((2, 13), (0, 11)):
            assert end.receive(row, 1 - rank) == header(row)._replace(checksum=2**64 - value)
            assert end.staging[row][:SLOT_NBYTES].eq(value).all()
            assert end.staging[row][SLOT_NBYTES:].eq(0).all()
        assert end.receive(1, 1 - rank).status is Status.FAILED
        end.end(is_aborted=False)

    run_ranks(num_ranks, work)


@several_ranks
def test_nothing_is_written_before_the_receivers_staging_is_open(name: str, num_ranks: int, opened: Opened) -> None:
    """Rule 8: a fast sender of the next layer waits for a rank that has not installed the last one yet."""
    ends = opened(name, num_ranks, timeout_s=0.3)
    ends[1].staging.fill_(1)  # the last layer's bytes
    run_ranks(2, lambda rank: ends[rank].begin(5, threading.Event()))
    ends[0].open_layer(2, [])
    with pytest.raises(RankFailureError):
        ends[0].send(1, 0, header(), fill(9))
    assert ends[1].staging.eq(1).all()


@several_ranks
def test_senders_do_not_wait_for_a_rank_that_cannot_take_the_layer(name: str, num_ranks: int, opened: Opened) -> None:
    ends = opened(name, num_ranks, timeout_s=60.0)
    run_ranks(num_ranks, lambda rank: ends[rank].begin(5, threading.Event()))

    def work(rank: int) -> None:
        if rank == 1:
            ends[1].refuse_layer(2, [])
            return
        ends[0].open_layer(2, [])
        with pytest.raises(RankFailureError, match="rank 1"):
            ends[0].send(1, 0, header(), fill(9))

    run_ranks(num_ranks, work)


@several_ranks
def test_ranks_that_all_refuse_do_not_wait_for_each_other(name: str, num_ranks: int, opened: Opened) -> None:
    ends = opened(name, num_ranks, timeout_s=60.0)
    run_ranks(num_ranks, lambda rank: ends[rank].begin(5, threading.Event()))

    def work(rank: int) -> None:
        ends[rank].refuse_layer(2, [(1 - rank, 0, header())])

    run_ranks(num_ranks, work)


@several_ranks
def test_a_rank_that_does_not_come_is_named_at_the_deadline(name: str, num_ranks: int, opened: Opened) -> None:
    ends = opened(name, num_ranks, timeout_s=0.3)
    run_ranks(2, lambda rank: ends[rank].begin(5, threading.Event()))
    ends[0].open_layer(2, [(0, 1, SLOT_NBYTES)])
    with pytest.raises(RankFailureError, match=r"rank 1.* 0\.3 s"):
        ends[0].receive(0, 1)


@several_ranks
def test_a_rank_that_ends_the_transaction_early_wakes_those_that_wait_for_it(
    name: str, num_ranks: int, opened: Opened
) -> None:
    ends = opened(name, num_ranks, timeout_s=60.0)
    run_ranks(num_ranks, lambda rank: ends[rank].begin(5, threading.Event()))

    def work(rank: int) -> None:
        ends[rank].open_layer(2, [(0, 1 - rank, SLOT_NBYTES)])
        if rank == 1:
            ends[1].end(is_aborted=True)
            return
        with pytest.raises(RankFailureError, match="rank 1"):
            ends[0].receive(0, 1)
        ends[0].end(is_aborted=True)

    run_ranks(num_ranks, work)


def test_an_own_abort_wakes_a_wait_in_shared_memory(opened: Opened) -> None:
    ends = opened("shared_memory", 2)
    aborted = threading.Event()
    ends[0].begin(5, aborted)
    ends[0].open_layer(2, [(0, 1, SLOT_NBYTES)])
    threading.Timer(0.02, aborted.set).start()
    with pytest.raises(MovementAbortedError, match=r"rank 0 waited for rank 1 to send row 0 when .* aborted"):
        ends[0].receive(0, 1)


def test_an_interrupt_and_a_closed_peer_end_waits_in_shared_memory(opened: Opened) -> None:
    ends = opened("shared_memory", 2)
    threading.Timer(0.02, ends[0].interrupt).start()
    with pytest.raises(RankFailureError, match="told to stop"):
        ends[0].all_gather(b"1234")
    ends[0].close()
    with pytest.raises(RankFailureError, match="rank 0 has closed"):
        ends[1].all_gather(b"1234")


@several_ranks
def test_the_bytes_of_a_transaction_are_no_others(name: str, num_ranks: int, opened: Opened) -> None:
    """What an aborted transaction left behind, headers and bytes, is not what the next one receives."""
    ends = opened(name, num_ranks)

    def work(rank: int) -> None:
        end = ends[rank]
        end.begin(5, threading.Event())
        end.open_layer(2, [(0, 0, SLOT_NBYTES)] if rank == 1 else [])
        if rank == 0:
            end.send(1, 0, header(), fill(66))
        else:
            end.receive(0, 0)
        met.wait()
        end.end(is_aborted=True)
        met.wait()  # the controller: all quiescent
        end.begin(6, threading.Event())
        end.open_layer(2, [(0, 0, SLOT_NBYTES)] if rank == 1 else [])
        if rank == 0:
            end.send(1, 0, header(transaction=6), fill(77))
        else:
            assert end.receive(0, 0) == header(transaction=6)._replace(checksum=2**64 - 77)
            assert end.staging[0][:SLOT_NBYTES].eq(77).all()
        met.wait()
        end.end(is_aborted=False)

    met = threading.Barrier(num_ranks)
    run_ranks(num_ranks, work)


@every_case
def test_memory_is_what_the_plan_says(name: str | None, num_ranks: int, opened: Opened) -> None:
    """B52: one layer of staging, rounded to cache lines, whatever is moved."""
    plan = plan_of(name, num_ranks)
    ends = opened(name, num_ranks)
    assert plan.shared_bytes + num_ranks * plan.rank_bytes == sum(end.num_bytes for end in ends)
    payload = 3 * SLOT_NBYTES + (SLOT_NBYTES if name == "torch_gloo" else 0)
    assert payload <= ends[0].num_bytes <= payload + 4 * 64 + 3 * 64 + 128
    assert all(end.staging.shape == (3, 1_024) for end in ends)


@pytest.mark.parametrize(
    ("asked", "num_ranks", "chosen"),
    [(None, 1, "loopback"), ("torch_gloo", 1, "loopback"), (None, 2, "shared_memory"), ("torch_gloo", 2, "torch_gloo")],
)
def test_the_choice_is_by_ranks_and_wish(asked: str | None, num_ranks: int, chosen: str) -> None:
    assert plan_of(asked, num_ranks).communicator == chosen


def test_unknown_communicators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"communicator \('nccl'\) must be one of shared_memory, torch_gloo; leave it"):
        plan_of("nccl", 2)


def test_staging_that_does_not_fit_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs \d+ bytes, and 10 bytes are available; lower num_redundant_experts"):
        create_resources(plan_of("shared_memory", 2), tmp_path, available_bytes=10)


def test_a_rank_without_a_controller_says_so() -> None:
    with pytest.raises(RankFailureError, match="rank 1 finds no shared memory"):
        open_communicator(replace(plan_of("shared_memory", 2), address="/proc/1/fd/none"), 1)
