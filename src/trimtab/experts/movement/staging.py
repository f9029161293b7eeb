"""Where a layer's experts wait between their arrival and the commit, and who sends what into which row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trimtab.experts.delta import LayerDelta, Transfer
from trimtab.experts.placement import Placement

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StagingSizes:
    """One row per slot of a rank: every slot may change in a layer, and one layer is staged at a time."""

    num_ranks: int
    slots_per_rank: int
    slot_nbytes: int

    @property
    def row_nbytes(self) -> int:
        return -(-self.slot_nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def staging_nbytes(self) -> int:
        """Of one rank."""
        return self.slots_per_rank * self.row_nbytes


class Arrival(NamedTuple):
    """An expert that fills a staging row of this rank; `source_rank` may be this rank."""

    row: int
    source_rank: int
    transfer: Transfer


class Departure(NamedTuple):
    """An expert that this rank sends to a staging row of another."""

    target_rank: int
    row: int
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """One layer as one rank sees it. Rows count up in the order of the delta, so that all ranks number them alike."""

    copies: tuple[Arrival, ...]  # from this rank's own slots: they go through staging too, or a swap would lose one
    departures: tuple[Departure, ...]  # the next rank's first, so that not all ranks send to one
    arrivals: tuple[Arrival, ...]  # from other ranks


def plan_traffic(delta: LayerDelta, placement: Placement, rank: int) -> LayerTraffic:
    """`placement` is the one that the delta starts from."""
    num_ranks = placement.topology.num_ranks
    rows = [0] * num_ranks
    incoming, departures = [], []
    for transfer in delta.transfers:
        source, target = transfer.source_rank(placement), transfer.target_rank(placement)
        row = rows[target]
        rows[target] += 1
        if target == rank:
            incoming.append(Arrival(row, source, transfer))
        elif source == rank:
            departures.append(Departure(target, row, transfer))
    departures.sort(key=lambda departure: ((departure.target_rank - rank) % num_ranks, departure.row))
    return LayerTraffic(
        tuple(arrival for arrival in incoming if arrival.source_rank == rank),
        tuple(departures),
        tuple(arrival for arrival in incoming if arrival.source_rank != rank),
    )
