"""The mover's life: what it reports and refuses, and that whatever goes wrong ends in a state and no wrong byte."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from byte_ranks import (
    FIRST,
    NUM_LAYERS,
    SECOND,
    SLOT_NBYTES,
    TOPOLOGY,
    byte_ranks,
    every_communicator,
    mover_threads,
    only,
    wrong_slots,
)

from trimtab.experts.delta import LayerDelta, Transfer, diff
from trimtab.experts.movement import mover as mover_module
from trimtab.experts.movement.communicator.shared_memory import LoopbackCommunicator
from trimtab.experts.movement.faults import Point
from trimtab.experts.movement.mover import BackgroundMover, MovementConfig
from trimtab.experts.movement.staging import StagingSizes
from trimtab.experts.movement.verify import SlotMismatchError
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Failed, Quiescent, Staged
from trimtab.testing.movement import (
    ByteSlots,
    MovingRanks,
    ScriptedFaults,
    bring_home,
    corrupts,
    install_staged,
    never_ready,
    raises,
    random_placement,
    waits_for,
)


@every_communicator
def test_a_transaction_reports_what_was_staged_and_moves_every_byte(communicator: str, tmp_path: Path) -> None:
    with byte_ranks(tmp_path, communicator=communicator) as ranks:
        transaction = ranks.begin(SECOND)
        assert ranks.settled() == [[], []]
        for layer in range(NUM_LAYERS):
            received = [0, 0]
            for transfer in diff(FIRST, SECOND)[layer].transfers:
                if transfer.source_rank(FIRST) != (target := transfer.target_rank(FIRST)):
                    received[target] += SLOT_NBYTES
            for rank, reports in enumerate(ranks.stage(layer)):
                report = only(reports)
                assert isinstance(report, Staged) and report.seconds > 0
                assert (report.rank, report.transaction, report.layer) == (rank, transaction, layer)
                assert report.num_bytes == received[rank] > 0
            assert wrong_slots(ranks) == []  # staged is not installed
            ranks.commit(layer)
            assert wrong_slots(ranks) == []
            ranks.check_slots()
        for mover in ranks.movers:
            mover.finish()
        assert ranks.settled() == [[Quiescent(0, transaction)], [Quiescent(1, transaction)]]
        assert ranks.placement == SECOND
    assert mover_threads() == [] and list(tmp_path.iterdir()) == []


def test_layers_are_staged_in_any_order_and_unchanged_ones_not_at_all(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        ranks.rearrange(SECOND, order=[1, 0])
        assert wrong_slots(ranks) == []
        half = Placement(TOPOLOGY, [FIRST.slot_to_expert[0], SECOND.slot_to_expert[1]])
        ranks.begin(half)
        with pytest.raises(AssertionError, match="layer 1 does not change"):
            ranks.movers[0].stage(1)


def test_one_layer_at_a_time_and_one_transaction_at_a_time(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        ranks.begin(SECOND)
        with pytest.raises(AssertionError, match="transaction 1 is open"):
            ranks.movers[0].begin(2, FIRST, [])
        ranks.stage(0)
        for refused in (lambda: ranks.movers[0].stage(1), ranks.movers[0].finish):
            with pytest.raises(AssertionError, match="layer 0 is in staging and was not answered"):
                refused()
        with pytest.raises(AssertionError, match="layer 1 is not staged"):
            ranks.movers[0].take(1)


def test_nothing_moves_before_ranks_have_agreed_on_checksums(tmp_path: Path) -> None:
    with (
        byte_ranks(tmp_path, exchange=False) as ranks,
        pytest.raises(AssertionError, match="have not exchanged checksums"),
    ):
        ranks.begin(SECOND)


# -- staging and its answer --------------------------------------------------------------------------------------------


def answer_early(ranks: MovingRanks) -> None:
    """The order that rule 7 forbids: staging is given back, and used by the next layer, before the installation."""
    ranks.begin(SECOND)
    ranks.stage(0)
    taken = [list(mover.take(0)) for mover in ranks.movers]
    for mover in ranks.movers:
        mover.installed(0, {})
    ranks.stage(1)
    for rank, experts in enumerate(taken):
        for slot, prepared in experts:
            ranks.storages[rank][0].install(slot, prepared)
    ranks._advance(0)


def answer_without_loans(ranks: MovingRanks) -> None:
    """Installed, but staging is given back and used by the next layer while kernels read it."""
    ranks.begin(SECOND)
    ranks.stage(0)
    for rank, mover in enumerate(ranks.movers):
        assert install_staged(mover, ranks.storages[rank][0], 0)
        mover.installed(0, {})
    ranks._advance(0)
    ranks.stage(1)


@every_communicator
@pytest.mark.parametrize("early", [answer_early, answer_without_loans])
def test_rule_08_answering_early_corrupts_and_is_found(
    communicator: str, early: Callable[[MovingRanks], None], tmp_path: Path
) -> None:
    """Negative control: that staging is reused only after its answer, and its loans, is what keeps bytes right."""
    with byte_ranks(tmp_path, communicator=communicator) as ranks:
        early(ranks)
        wrong = wrong_slots(ranks)
        assert wrong and all(layer == 0 for layer, _ in wrong)
        with pytest.raises(SlotMismatchError, match=r"rank 0: \d slots do not hold .*: layer 0 slot 0 \(expert 1\)"):
            ranks.movers[0].check_slots(ranks.placement)


def test_rule_08_two_slots_that_swap_on_one_rank_keep_both_experts(tmp_path: Path) -> None:
    topology = Topology(2, 0, 1)
    first = Placement(topology, [[0, 1]])
    with byte_ranks(tmp_path, placement=first) as ranks:
        assert ranks.rearrange(Placement(topology, [[1, 0]])) == 0
        assert wrong_slots(ranks) == []
        ranks.check_slots()


def test_a_rank_that_has_not_installed_is_not_written_by_one_that_is_a_layer_ahead(tmp_path: Path) -> None:
    """{Commit l, Stage l+1} may stand in one plan, and one rank may execute it long before the other."""
    with byte_ranks(tmp_path) as ranks:
        ranks.begin(SECOND)
        ranks.stage(0)
        ahead, behind = ranks.movers
        ahead.installed(0, install_staged(ahead, ranks.storages[0][0], 0))
        ahead.stage(1)
        assert bring_home(ahead) == []  # now waits for the other's staging
        behind.installed(0, install_staged(behind, ranks.storages[1][0], 0))
        ranks._advance(0)
        behind.stage(1)
        assert wrong_slots(ranks) == []
        assert bring_home(behind) == []
        assert all(isinstance(only(reports), Staged) for reports in ranks.settled())
        ranks.commit(1)
        ranks.finish()
        assert wrong_slots(ranks) == []


def test_staging_is_allocated_once(tmp_path: Path) -> None:
    """B52: its memory is the same over a hundred rearrangements."""
    generator = torch.Generator().manual_seed(5)
    with byte_ranks(tmp_path) as ranks:
        addresses = [mover._communicator.staging.data_ptr() for mover in ranks.movers]
        sizes = [mover.staging_nbytes for mover in ranks.movers]
        for _ in range(100):
            ranks.rearrange(random_placement(TOPOLOGY, NUM_LAYERS, generator))
        assert [mover._communicator.staging.data_ptr() for mover in ranks.movers] == addresses
        assert [mover.staging_nbytes for mover in ranks.movers] == sizes == [3 * 704 + 3 * 64 + 128] * 2


def test_plans_are_let_go(tmp_path: Path) -> None:
    """B53: after many rearrangements the movers hold no placement, no delta and no staged expert."""
    generator = torch.Generator().manual_seed(5)

    def alive() -> int:
        gc.collect()
        return sum(type(found) in (Placement, LayerDelta, Transfer) for found in gc.get_objects())

    with byte_ranks(tmp_path) as ranks:
        counts = []
        for _ in range(2):
            for _ in range(20):
                ranks.rearrange(random_placement(TOPOLOGY, NUM_LAYERS, generator))
                ranks.begin(random_placement(TOPOLOGY, NUM_LAYERS, generator))
                ranks.abort()
            counts.append(alive())
        assert counts[0] == counts[1]
        assert all(not mover._staged and not mover._reports for mover in ranks.movers)


def test_five_hundred_rearrangements_while_threads_switch_all_the_time(tmp_path: Path) -> None:
    """B47: orders are seen whole, whichever thread comes first."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        generator = torch.Generator().manual_seed(5)
        one_layer = Placement(TOPOLOGY, FIRST.slot_to_expert[:1])
        with byte_ranks(tmp_path, placement=one_layer) as ranks:
            for _ in range(500):
                ranks.rearrange(random_placement(TOPOLOGY, 1, generator))
                assert wrong_slots(ranks) == []
    finally:
        sys.setswitchinterval(interval)


# -- faults ------------------------------------------------------------------------------------------------------------


@every_communicator
@pytest.mark.parametrize("point", [Point.STAGE, Point.COPY, Point.SENT, Point.ARRIVED, Point.STAGED])
def test_rule_15_a_mover_that_raises_fails_by_name_and_the_next_transaction_succeeds(
    communicator: str, point: Point, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = ScriptedFaults({point: raises("the disk is on fire")})
    with byte_ranks(tmp_path, communicator=communicator, faults={0: faults}, timeout_s=5.0) as ranks:
        transaction = ranks.begin(SECOND)
        assert ranks.settled() == [[], []]  # all have met
        own, other = ranks.stage(0)
        assert only(own) == Failed(0, transaction, 0, "the disk is on fire")
        assert "rank 0: transaction 1, layer 0: the disk is on fire" in caplog.text
        # What rank 0 had planned to send is announced as failed; what it had sent already is there.
        if point in (Point.STAGE, Point.COPY, Point.SENT):
            report = only(other)
            assert isinstance(report, Failed) and report.layer == 0
            assert "rank 0" in report.reason
        else:
            assert isinstance(only(other), Staged)
        assert ranks.abort() == [[Quiescent(0, transaction)], [Quiescent(1, transaction)]]
        assert wrong_slots(ranks) == []
        faults.actions.clear()
        ranks.rearrange(SECOND)
        assert wrong_slots(ranks) == []


def test_peers_of_a_failed_mover_learn_from_headers_and_not_from_a_deadline(tmp_path: Path) -> None:
    faults = ScriptedFaults({Point.SENT: raises("no")})
    with byte_ranks(tmp_path, faults={0: faults}, timeout_s=3_600.0) as ranks:
        ranks.begin(SECOND)
        _, other = ranks.stage(0)
        report = only(other)
        assert isinstance(report, Failed)
        assert report.reason == "rank 0 could not send expert 2 of layer 0"


def test_a_failed_mover_refuses_every_later_layer_too(tmp_path: Path) -> None:
    faults = ScriptedFaults({Point.BEGIN: raises("no group")})
    with byte_ranks(tmp_path, faults={0: faults}, timeout_s=0.5) as ranks:
        transaction = ranks.begin(SECOND)
        assert ranks.settled() == [[Failed(0, transaction, -1, "no group")], []]
        own, other = ranks.stage(1)
        assert only(own) == Failed(0, transaction, 1, "no group")
        assert isinstance(only(other), Failed)
        assert ranks.abort() == [[Quiescent(0, transaction)], [Quiescent(1, transaction)]]
        faults.actions.clear()
        ranks.rearrange(SECOND)
        assert wrong_slots(ranks) == []


@every_communicator
def test_bytes_corrupted_on_the_way_fail_with_layer_expert_and_sender(communicator: str, tmp_path: Path) -> None:
    with byte_ranks(tmp_path, communicator=communicator, faults={0: ScriptedFaults({Point.SENT: corrupts})}) as ranks:
        ranks.begin(SECOND)
        own, other = ranks.stage(0)
        assert isinstance(only(own), Staged)
        report = only(other)
        assert isinstance(report, Failed)
        assert report.reason.startswith("expert 2 of layer 0 did not arrive from rank 0 as it was sent (checksum 0x")
        ranks.abort()
        assert wrong_slots(ranks) == []


def test_bytes_corrupted_in_the_receivers_staging_fail(tmp_path: Path) -> None:
    with byte_ranks(tmp_path, faults={1: ScriptedFaults({Point.ARRIVED: corrupts})}) as ranks:
        ranks.begin(SECOND)
        _, other = ranks.stage(0)
        assert isinstance(report := only(other), Failed) and "did not arrive from rank 0" in report.reason


def test_a_slot_that_went_bad_is_not_spread(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        storage = ranks.storages[0][0]
        assert isinstance(storage, ByteSlots)
        storage.slots[2, 5] ^= 1  # expert 2 of layer 0, which rank 0 is to send
        ranks.begin(SECOND)
        own, other = ranks.stage(0)
        assert isinstance(report := only(own), Failed)
        assert report.reason.startswith("this rank's own slot is not expert 2 of layer 0 as ranks agreed on it")
        assert isinstance(only(other), Failed)


def test_weights_of_another_version_are_not_accepted(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        ranks.weights_version[0] = 1
        ranks.begin(SECOND)
        for report in map(only, ranks.stage(0)):
            assert isinstance(report, Failed) and "weights_version=" in report.reason and "expected" in report.reason


@pytest.mark.parametrize("staging", [{"staging_slot_nbytes": 64}, {"slots_per_rank": 1}], ids=["narrow", "few rows"])
def test_staging_too_small_fails_with_both_sizes(staging: dict[str, int], tmp_path: Path) -> None:
    with byte_ranks(tmp_path, timeout_s=3_600.0, **staging) as ranks:  # type: ignore[arg-type]
        ranks.begin(SECOND)
        own, other = map(only, ranks.stage(0))
        assert isinstance(own, Failed) and isinstance(other, Failed)
        assert f"is too small for 3 experts of {SLOT_NBYTES} bytes in layer 0" in own.reason
        ranks.abort()
        assert wrong_slots(ranks) == []


def test_a_slow_mover_is_ready_only_after_the_last_byte(tmp_path: Path) -> None:
    """B48: no rank calls a layer staged that one of them has not sent."""
    go = threading.Event()
    with byte_ranks(tmp_path, faults={0: ScriptedFaults({Point.SENT: waits_for(go)})}) as ranks:
        ranks.begin(SECOND)
        for mover in ranks.movers:
            mover.stage(0)
        assert [mover.poll() for mover in ranks.movers] == [[], []]
        go.set()
        assert all(isinstance(only(reports), Staged) for reports in ranks.settled())
        ranks.commit(0)
        assert wrong_slots(ranks) == []


def test_rule_15_a_mover_that_is_never_ready_is_quiescent_after_an_abort(tmp_path: Path) -> None:
    faults = ScriptedFaults({Point.STAGED: never_ready})
    with byte_ranks(tmp_path, faults={1: faults}) as ranks:
        transaction = ranks.begin(SECOND)
        for mover in ranks.movers:
            mover.stage(0)
        ranks.movers[0].settle()
        assert isinstance(only(ranks.movers[0].poll()), Staged)
        assert ranks.movers[1].poll() == []
        assert ranks.abort() == [[Quiescent(0, transaction)], [Quiescent(1, transaction)]]
        faults.actions.clear()
        ranks.rearrange(SECOND)
        assert wrong_slots(ranks) == []


# -- aborts, shutdown --------------------------------------------------------------------------------------------------


@every_communicator
@pytest.mark.parametrize("state", ["planned", "staging", "ready", "one layer committed"])
def test_rule_18_an_abort_in_every_state_leaves_layers_whole_and_the_mover_ready(
    state: str, communicator: str, tmp_path: Path
) -> None:
    with byte_ranks(tmp_path, communicator=communicator) as ranks:
        transaction = ranks.begin(SECOND)
        if state == "staging":
            for mover in ranks.movers:
                mover.stage(0)
        elif state != "planned":
            ranks.stage(0)
        if state == "one layer committed":
            ranks.commit(0)
            for mover in ranks.movers:
                mover.stage(1)
        for reports in ranks.abort():
            assert reports[-1] == Quiescent(reports[-1].rank, transaction)
            assert not any(isinstance(report, Failed) for report in reports)
        assert wrong_slots(ranks) == []
        committed = int(state == "one layer committed")
        assert [d.layer for d in diff(FIRST, ranks.placement)] == list(range(committed))
        ranks.rearrange(SECOND)
        assert ranks.placement == SECOND and wrong_slots(ranks) == []
        ranks.check_slots()


def test_an_abort_without_a_transaction_says_nothing(tmp_path: Path) -> None:
    with byte_ranks(tmp_path) as ranks:
        assert ranks.abort() == [[], []]
        ranks.rearrange(SECOND)
        assert ranks.abort() == [[], []]


@every_communicator
@pytest.mark.parametrize("state", ["idle", "planned", "waiting", "ready", "failed", "aborted"])
def test_rule_18_close_from_every_state_leaves_nothing(state: str, communicator: str, tmp_path: Path) -> None:
    faults = ScriptedFaults({Point.STAGE: raises("no")} if state == "failed" else {})
    with byte_ranks(tmp_path, communicator=communicator, faults={0: faults}, timeout_s=2.0) as ranks:
        if state != "idle":
            ranks.begin(SECOND)
        if state == "waiting":
            ranks.movers[0].stage(0)  # and rank 1 never does
        elif state in ("ready", "failed", "aborted"):
            ranks.stage(0)
        if state == "aborted":
            ranks.abort()
    for mover in ranks.movers:
        mover.close()
    assert mover_threads() == [] and list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="the mover is closed"):
        ranks.movers[0].begin(9, FIRST, [])


def test_a_thread_that_ended_is_no_silence(tmp_path: Path) -> None:
    def exits(layer: int, data: torch.Tensor | None, aborted: threading.Event) -> None:
        raise SystemExit("gone")

    with byte_ranks(tmp_path, faults={0: ScriptedFaults({Point.STAGE: exits})}) as ranks:
        ranks.begin(SECOND)
        mover = ranks.movers[0]
        mover.stage(0)
        mover._thread.join()
        for ask in (mover.poll, mover.settle):
            with pytest.raises(RuntimeError, match="rank 0: the mover's thread has ended"):
                ask()


def test_a_thread_that_does_not_end_is_said_and_its_memory_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it may still write must not be given back under it."""
    go = threading.Event()
    with byte_ranks(tmp_path, faults={0: ScriptedFaults({Point.STAGE: waits_for(go)})}, timeout_s=0.02) as ranks:
        ranks.begin(SECOND)
        mover = ranks.movers[0]
        mover.stage(0)
        monkeypatch.setattr(mover_module, "_CLOSE_GRACE_S", 0.0)
        with pytest.raises(RuntimeError, match="rank 0: the mover's thread does not end"):
            mover.close()
        assert mover._communicator.staging.numel() > 0
        go.set()
        mover._thread.join()
        mover._communicator.close()


def test_rests_are_cut_short_by_an_abort(tmp_path: Path) -> None:
    """A rate limit that would rest for a year does not hold up the state QUIESCENT."""
    config = MovementConfig(max_share_of_time=1e-9)
    with byte_ranks(tmp_path, config=config) as ranks:
        transaction = ranks.begin(SECOND)
        for mover in ranks.movers:
            mover.stage(0)
        assert [reports[-1] for reports in ranks.abort()] == [Quiescent(rank, transaction) for rank in (0, 1)]


def test_one_rank_needs_no_transport() -> None:
    topology = Topology(3, 1, 1)
    old, new = Placement(topology, [[0, 1, 2, 0]]), Placement(topology, [[2, 2, 1, 0]])
    slots = ByteSlots(4, 100)
    slots.slots.copy_(torch.tensor([0, 1, 2, 0], dtype=torch.uint8)[:, None].expand(4, 100))
    mover = BackgroundMover([slots], 0, LoopbackCommunicator(StagingSizes(1, 4, 100), 5.0))
    mover.exchange(old)
    mover.begin(7, old, diff(old, new))
    mover.stage(0)
    mover.settle()
    assert isinstance(only(mover.poll()), Staged)
    mover.installed(0, install_staged(mover, slots, 0))
    mover.finish()
    assert bring_home(mover) == [Quiescent(0, 7)]
    assert slots.slots[:, 0].tolist() == [2, 2, 1, 0]
    mover.check_slots(new)
    mover.close()
