"""The thread of a worker that moves experts: it exports, sends, receives and verifies; the runner's thread installs.

An expert may be read where it arrived, in staging, from its commit on. The thread then brings it home: a copy into the
slot's own memory, checked against what ranks have agreed on. The runner's thread turns the kernel to it, between two
forwards, and only then does staging open for the next layer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.delta import LayerDelta
from trimtab.experts.movement.communicator.base import Communicator, Header, MovementAbortedError, Status, Words
from trimtab.experts.movement.faults import Faults, NoFaults, Point
from trimtab.experts.movement.pacing import Pacer
from trimtab.experts.movement.staging import Arrival, Departure, LayerTraffic, plan_traffic
from trimtab.experts.movement.verify import SlotMismatchError, check_slots, exchange_slots
from trimtab.experts.placement import Placement
from trimtab.experts.ports import Failed, Loan, MoverReport, PreparedSlot, Quiescent, SlotStorage, Staged
from trimtab.kernels.checksum import checksum

logger = logging.getLogger(__name__)

_CLOSE_GRACE_S = 5.0  # beyond the communicator's own deadline, until a thread that does not end is called stuck


@dataclass(frozen=True, slots=True)
class MovementConfig:
    """`max_share_of_time`: the mover rests so long after each expert that it works at most this share of the time."""

    max_share_of_time: float = 0.2  # where all cores compute, ranks wait for the one whose mover works: steps feel it


@dataclass(slots=True)
class _Transaction:
    number: int
    placement: Placement
    deltas: dict[int, LayerDelta]
    aborted: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False  # the communicator knows of it
    failure: str = ""  # of the mover's thread: what it could not do, for headers and reports to come


class _StagedSlot(NamedTuple):
    slot: int  # of this rank, counted from 0
    expert: int
    row: int  # of staging; may feed several slots
    prepared: PreparedSlot


@dataclass(slots=True)
class _Homecoming:
    """Experts of a committed layer that kernels read in staging, on their way into their slots' own memory."""

    layer: int
    lent: list[tuple[_StagedSlot, Loan]]


class BackgroundMover:
    """Implements `ports.Mover` for one rank; `storages` are its kernels' in the order of MoE layers.

    The runner's thread gives orders through a queue and reads immutable reports; the mover's thread alone uses the
    communicator, whose peers write staging. Staged bytes stay as they are until the runner's thread has answered
    `installed` (or given up) and has found all experts at home that were lent from staging: only then is the next layer
    ordered, and only then is staging open again.
    """

    def __init__(
        self,
        storages: Sequence[SlotStorage],
        rank: int,
        communicator: Communicator,
        config: MovementConfig | None = None,
        *,
        weights_version: Callable[[], int] = lambda: 0,
        faults: Faults | None = None,
    ) -> None:
        assert rank == communicator.rank and storages
        self.rank = rank
        self.staging_nbytes = communicator.num_bytes
        self._storages = storages
        self._communicator = communicator
        self._pacer = Pacer((config or MovementConfig()).max_share_of_time)
        self._weights_version = weights_version
        self._faults = faults or NoFaults()
        self._checksums: Words | None = None  # [L, E]
        self._open: _Transaction | None = None  # as the runner's thread sees it
        self._layer: int | None = None  # ordered to be staged and not answered yet
        self._held: Callable[[], None] | None = None  # the order to stage it, until staging is free
        self._homecoming: _Homecoming | None = None
        self._hurry = threading.Event()  # experts come home without rests
        self._staged: dict[int, tuple[_StagedSlot, ...]] = {}  # staged layers, by the mover's thread
        self._reports: deque[MoverReport | _Homecoming] = deque()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._death: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name=f"trimtab mover {rank}", daemon=True)
        self._thread.start()

    # -- at start, and where waiting is allowed ------------------------------------------------------------------------

    def exchange(self, placement: Placement, timeout_s: float | None = None) -> None:
        """Agrees with the other ranks on layouts, and on what each expert's bytes are.

        Collective: every rank, at start and after new weights, no transaction open. Waits. Raises SlotMismatchError,
        and RankFailureError when a rank cannot tell or does not come within `timeout_s` (None: the communicator's own).
        Ranks stay in step whatever it raises.
        """
        assert self._open is None and self._homecoming is None, "a transaction is open"
        errors: list[Exception] = []

        def work() -> None:
            try:
                self._checksums = exchange_slots(self._storages, placement, self._communicator, timeout_s)
            except Exception as error:
                errors.append(error)

        self._order(work)
        self.settle()
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Waits until all that was ordered so far is done, well or not."""
        done = threading.Event()
        self._order(done.set)
        while not done.wait(1.0):
            self._check_alive()

    def check_slots(self, placement: Placement) -> None:
        """Reads every slot of this rank again: raises SlotMismatchError naming those that hold another expert's bytes.

        Called on: the runner's thread, between forwards.
        """
        check_slots(self._storages, placement, self.rank, self._table())

    # -- ports.Mover, called on the runner's thread --------------------------------------------------------------------

    def begin(self, transaction: int, placement: Placement, deltas: Sequence[LayerDelta]) -> None:
        assert self._open is None, f"transaction {self._open and self._open.number} is open"
        assert self._homecoming is None, f"experts of layer {self._homecoming.layer} are not at home"
        self._table()
        opened = self._open = _Transaction(transaction, placement, {delta.layer: delta for delta in deltas})
        self._order(lambda: self._begin(opened))

    def stage(self, layer: int) -> None:
        opened = self._transaction()
        assert self._layer is None, f"layer {self._layer} is in staging and was not answered"
        assert layer in opened.deltas, f"layer {layer} does not change in transaction {opened.number}"
        self._layer = layer
        if self._homecoming is None:
            self._order(lambda: self._stage(opened, layer))
        else:
            self._held = lambda: self._stage(opened, layer)

    def poll(self) -> list[MoverReport]:
        self._check_alive()
        return self._read_reports()

    def take(self, layer: int) -> Sequence[tuple[int, PreparedSlot]]:
        return [(staged.slot, staged.prepared) for staged in self._staged_slots(layer)]

    def installed(self, layer: int, loans: Mapping[int, Loan]) -> None:
        lent = [(staged, loans[staged.slot]) for staged in self._staged_slots(layer) if staged.slot in loans]
        del self._staged[layer]
        self._layer = None
        if lent:
            self._hurry.clear()
            coming = self._homecoming = _Homecoming(layer, lent)
            self._order(lambda: self._bring_home(coming))

    def finish(self) -> None:
        opened = self._transaction()
        assert self._layer is None, f"layer {self._layer} is in staging and was not answered"
        self._open = None
        self._order(lambda: self._end(opened, is_aborted=False))

    def abort(self) -> None:
        """Without an open transaction there is nothing to abort: at most experts that come home, now without rests."""
        self._hurry.set()
        if (opened := self._open) is None:
            return
        self._open = self._layer = self._held = None
        opened.aborted.set()
        self._order(lambda: self._end(opened, is_aborted=True))

    def close(self) -> None:
        """Raises RuntimeError when the thread does not end within the communicator's deadline and some seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._open is not None:
            self._open.aborted.set()
        self._hurry.set()
        self._open = self._layer = self._held = None
        self._communicator.interrupt()
        self._orders.put(None)
        self._thread.join(self._communicator.timeout_s + _CLOSE_GRACE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"rank {self.rank}: the mover's thread does not end; its memory is not given back")
        self._read_reports()  # who did not come home is read in staging, and its loan holds that memory
        self._staged.clear()
        self._communicator.close()

    def _read_reports(self) -> list[MoverReport]:
        reports: list[MoverReport] = []
        while self._reports:
            found = self._reports.popleft()
            if isinstance(found, _Homecoming):
                self._give_back(found)
            else:
                reports.append(found)
        return reports

    def _give_back(self, homecoming: _Homecoming) -> None:
        """All its experts are at home: staging is free."""
        for _, loan in homecoming.lent:
            loan.give_back()
        self._homecoming = None
        if (held := self._held) is not None:
            self._held = None
            self._order(held)

    def _staged_slots(self, layer: int) -> tuple[_StagedSlot, ...]:
        assert layer == self._layer and layer in self._staged, f"layer {layer} is not staged"
        return self._staged[layer]

    def _check_alive(self) -> None:
        if (death := self._death) is not None:
            raise RuntimeError(f"rank {self.rank}: the mover's thread has ended: {death}") from death

    def _transaction(self) -> _Transaction:
        assert self._open is not None, "no transaction is open"
        return self._open

    def _table(self) -> Words:
        assert self._checksums is not None, "ranks have not exchanged checksums"
        return self._checksums

    def _order(self, order: Callable[[], None]) -> None:
        assert not self._is_closed, "the mover is closed"
        self._orders.put(order)

    # -- the mover's thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            # Between orders it waits here: for the next layer, for experts to bring home, for the end.
            while (order := self._orders.get()) is not None:
                order()
                del order  # an order holds its transaction
        except BaseException as error:
            self._death = error
        finally:
            self._communicator.end(is_aborted=True)

    def _begin(self, opened: _Transaction) -> None:
        try:
            self._faults.reach(Point.BEGIN, -1, None, opened.aborted)
            self._communicator.begin(opened.number, opened.aborted)
            opened.has_begun = True
        except Exception as error:
            self._fail(opened, -1, error)

    def _stage(self, opened: _Transaction, layer: int) -> None:
        start = time.perf_counter()
        traffic = plan_traffic(opened.deltas[layer], opened.placement, self.rank)
        departures = deque(traffic.departures)
        try:
            if opened.failure:
                raise RuntimeError(opened.failure)
            self._faults.reach(Point.STAGE, layer, None, opened.aborted)
            self._check_room(layer, traffic)
            self._communicator.open_layer(
                layer, [(a.row, a.source_rank, self._nbytes(layer)) for a in traffic.arrivals]
            )
            for arrival in traffic.copies:
                self._copy(opened, layer, arrival)
            while departures:
                self._send(opened, layer, departures[0])
                departures.popleft()
            for arrival in traffic.arrivals:
                self._receive(opened, layer, arrival)
            prepared = self._prepare(opened, layer, traffic)
            self._faults.reach(Point.STAGED, layer, None, opened.aborted)
        except Exception as error:
            self._fail(opened, layer, error)
            self._refuse(opened, layer, departures)
            return
        if opened.aborted.is_set():
            return
        self._staged[layer] = prepared
        received = len(traffic.arrivals) * self._nbytes(layer)
        self._reports.append(Staged(self.rank, opened.number, layer, received, time.perf_counter() - start))

    def _copy(self, opened: _Transaction, layer: int, arrival: Arrival) -> None:
        row = self._row(layer, arrival.row)
        found = self._export(opened, layer, arrival.transfer.source_slot, row)
        self._faults.reach(Point.COPY, layer, row, opened.aborted)
        self._check_bytes(layer, arrival.transfer.expert, found, "this rank's own slot")
        self._pacer.rest(opened.aborted.wait)

    def _send(self, opened: _Transaction, layer: int, departure: Departure) -> None:
        def export(out: Tensor) -> int:
            exported = self._export(opened, layer, departure.transfer.source_slot, out)
            self._check_bytes(layer, departure.transfer.expert, exported, "this rank's own slot")
            self._faults.reach(Point.SENT, layer, out, opened.aborted)
            return exported

        header = self._header(opened, layer, departure.transfer.expert)
        self._communicator.send(departure.target_rank, departure.row, header, export)
        self._pacer.rest(opened.aborted.wait)

    def _receive(self, opened: _Transaction, layer: int, arrival: Arrival) -> None:
        expected = self._header(opened, layer, arrival.transfer.expert)
        found = self._communicator.receive(arrival.row, arrival.source_rank)
        whose = f"what rank {arrival.source_rank} sent"
        if found._replace(checksum=0, status=Status.OK) != expected:
            raise SlotMismatchError(f"{whose} is announced as {found}, expected {expected}")
        if found.status is Status.FAILED:
            raise RankFailureError(
                f"rank {arrival.source_rank} could not send expert {expected.expert} of layer {layer}"
            )
        row = self._row(layer, arrival.row)
        self._faults.reach(Point.ARRIVED, layer, row, opened.aborted)
        with self._pacer.work():
            arrived = checksum(row)
        if arrived != found.checksum:
            raise SlotMismatchError(
                f"expert {expected.expert} of layer {layer} did not arrive from rank {arrival.source_rank} as it was "
                f"sent (checksum {arrived:#018x}, sent {found.checksum:#018x})"
            )
        self._check_bytes(layer, expected.expert, arrived, whose)
        self._pacer.rest(opened.aborted.wait)

    def _prepare(self, opened: _Transaction, layer: int, traffic: LayerTraffic) -> tuple[_StagedSlot, ...]:
        """Each target slot gets an expert of its own, from the row that its rank received once."""
        storage = self._storages[layer]
        first = self.rank * storage.num_slots
        prepared = []
        for arrival in (*traffic.copies, *traffic.arrivals):
            for slot in arrival.transfer.target_slots:
                with self._pacer.work():
                    expert = storage.prepare(self._row(layer, arrival.row))
                prepared.append(_StagedSlot(slot - first, arrival.transfer.expert, arrival.row, expert))
                self._pacer.rest(opened.aborted.wait)
        return tuple(prepared)

    def _bring_home(self, homecoming: _Homecoming) -> None:
        """Nothing is caught: the layer is committed, and the rank must not go on with an expert that is another one."""
        layer = homecoming.layer
        for staged, loan in homecoming.lent:
            self._faults.reach(Point.HOME, layer, self._row(layer, staged.row), self._hurry)
            with self._pacer.work():
                found = loan.copy_home()
            self._check_bytes(layer, staged.expert, found, f"what slot {staged.slot} has read since the commit")
            self._pacer.rest(self._hurry.wait)
        self._reports.append(homecoming)

    def _refuse(self, opened: _Transaction, layer: int, departures: Sequence[Departure]) -> None:
        """Receivers need not wait for what will not come. What cannot even be said, they learn from the abort or from
        their deadline."""
        if not opened.has_begun:
            return
        headers = [(d.target_rank, d.row, self._header(opened, layer, d.transfer.expert)) for d in departures]
        try:
            self._communicator.refuse_layer(layer, headers)
        except (RankFailureError, MovementAbortedError) as error:
            logger.debug("rank %d: %s", self.rank, error)

    def _end(self, opened: _Transaction, *, is_aborted: bool) -> None:
        """Ordered after the way home of the last layer that was committed: loans are given back before `Quiescent`."""
        self._staged.clear()
        self._communicator.end(is_aborted=is_aborted)
        self._reports.append(Quiescent(self.rank, opened.number))

    def _fail(self, opened: _Transaction, layer: int, error: Exception) -> None:
        if opened.aborted.is_set():
            return  # the answer is Quiescent, which follows
        opened.failure = str(error) or type(error).__name__
        logger.warning("rank %d: transaction %d, layer %d: %s", self.rank, opened.number, layer, opened.failure)
        is_consequence = isinstance(error, RankFailureError)
        self._reports.append(Failed(self.rank, opened.number, layer, opened.failure, is_consequence))

    def _export(self, opened: _Transaction, layer: int, source_slot: int, out: Tensor) -> int:
        if opened.aborted.is_set():
            raise MovementAbortedError(f"rank {self.rank} was about to read a slot when the transaction was aborted")
        storage = self._storages[layer]
        with self._pacer.work():
            return storage.export_slot(source_slot - self.rank * storage.num_slots, out)

    def _header(self, opened: _Transaction, layer: int, expert: int) -> Header:
        return Header(opened.number, layer, expert, self._weights_version(), self._nbytes(layer))

    def _row(self, layer: int, row: int) -> Tensor:
        return self._communicator.staging[row][: self._nbytes(layer)]

    def _nbytes(self, layer: int) -> int:
        return self._storages[layer].slot_nbytes

    def _check_bytes(self, layer: int, expert: int, found: int, whose: str) -> None:
        expected = int(self._table()[layer, expert])
        if found != expected:
            raise SlotMismatchError(
                f"{whose} is not expert {expert} of layer {layer} as ranks agreed on it (checksum {found:#018x}, "
                f"agreed {expected:#018x})"
            )

    def _check_room(self, layer: int, traffic: LayerTraffic) -> None:
        rows, row_nbytes = self._communicator.staging.shape
        needed = len(traffic.copies) + len(traffic.arrivals)
        if needed > rows or self._nbytes(layer) > row_nbytes:
            raise ValueError(
                f"staging of {rows} rows of {row_nbytes} bytes is too small for {needed} experts of "
                f"{self._nbytes(layer)} bytes in layer {layer}"
            )
