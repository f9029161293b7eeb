"""What a rearrangement would bring and what it would cost, in numbers that are shown also when the answer is no."""

# L MoE layers  n ranks

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.experts.control.policy.base import rank_loads, scaled_counts
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement

ASSUMED_BANDWIDTH = 1e9  # bytes/s into a rank, until a move was measured


def balancedness(load: ExpertLoad, placement: Placement) -> npt.NDArray[np.float64]:
    """[L]: mean over max of the ranks' loads, 1 where all carry the same; a layer without load counts as even (B29)."""
    loads = rank_loads(scaled_counts(load), placement).astype(np.float64)
    heaviest = loads.max(axis=1)
    return np.divide(loads.mean(axis=1), heaviest, out=np.ones_like(heaviest), where=heaviest > 0)


def mean_balancedness(load: ExpertLoad, by_layer: npt.NDArray[np.float64]) -> float:
    """by_layer [L] averaged over the layers that had traffic; 1 where none had (B29)."""
    has_traffic = load.counts.any(axis=1)
    return float(by_layer[has_traffic].mean()) if has_traffic.any() else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What a placement changes, counted; who sends what to whom is `delta.diff`'s, and every rank's own to find."""

    layers: tuple[int, ...]  # those whose slots or shares change
    num_moves: npt.NDArray[np.int64]  # [L]: slots that get another expert
    num_received: npt.NDArray[np.int64]  # [L, n]: experts that come to a rank from another one


def count_changes(current: Placement, proposed: Placement) -> Changes:
    """In a few array operations: it runs beside a step (B37)."""
    differs = current.slot_to_expert != proposed.slot_to_expert
    is_changed = differs.any(axis=1) | (current.shares != proposed.shares).any(axis=1)
    arrives = _held(proposed) & ~_held(current)
    return Changes(tuple(np.flatnonzero(is_changed).tolist()), differs.sum(axis=1), arrives.sum(axis=2))


def _held(placement: Placement) -> npt.NDArray[np.bool_]:
    """[L, n, E]: whether a rank holds an expert."""
    topology, num_layers = placement.topology, placement.num_layers
    held = np.zeros((num_layers, topology.num_ranks, topology.num_experts), dtype=np.bool_)
    ranks = np.arange(topology.num_slots) // topology.slots_per_rank
    held[np.arange(num_layers)[:, None], ranks, placement.slot_to_expert] = True
    return held


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """A proposed placement against the one in force. Times are of the slowest rank."""

    by_layer: npt.NDArray[np.float64]  # [L]: balancedness now, over the window
    balancedness: float  # its mean
    predicted_balancedness: float
    experts_share: float  # of step time: experts and waiting for other ranks; 1 while it was not measured
    step_s: float  # mean; 0 while it was not measured
    num_moves: int  # slots that get another expert
    num_bytes: int  # received by all ranks together
    busiest_rank_bytes: int
    bandwidth: float  # bytes/s into a rank
    horizon_steps: int
    gain: float  # part of step time that would be saved
    cost: float  # part of the horizon's time that the moves take on the busiest rank
    min_gain: float

    @property
    def pays(self) -> bool:
        return self.min_gain == 0 or self.gain - self.cost >= self.min_gain

    def numbers(self) -> dict[str, Any]:
        """What a log line and a metric show."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "by_layer"}


def look_ahead(
    load: ExpertLoad,
    times: npt.NDArray[np.float64],
    current: Placement,
    proposed: Placement,
    changes: Changes,
    *,
    slot_nbytes: int,
    bandwidth: float,
    horizon_steps: int,
    min_gain: float,
) -> Outlook:
    """times [n, 3]: seconds of steps, experts and waiting over the load's steps."""
    evenness = balancedness(load, current)
    proposed_evenness = balancedness(load, proposed)
    # Layers are passed one after the other, and in each all ranks wait for the most loaded one.
    totals = load.counts.sum(axis=1).astype(np.float64)
    now, then = float((totals / evenness).sum()), float((totals / proposed_evenness).sum())
    received = changes.num_received.sum(axis=0) * slot_nbytes
    share, step_s = 1.0, 0.0
    if times[:, 0].max(initial=0.0) > 0 and load.num_steps:
        step_s = float(times[:, 0].max()) / load.num_steps
        share = float(min(1.0, ((times[:, 1] + times[:, 2]) / np.maximum(times[:, 0], 1e-12)).max()))
    busiest = int(received.max(initial=0))
    horizon_s = horizon_steps * step_s
    return Outlook(
        by_layer=evenness,
        balancedness=mean_balancedness(load, evenness),
        predicted_balancedness=mean_balancedness(load, proposed_evenness),
        experts_share=share,
        step_s=step_s,
        num_moves=int(changes.num_moves.sum()),
        num_bytes=int(received.sum()),
        busiest_rank_bytes=busiest,
        bandwidth=bandwidth,
        horizon_steps=horizon_steps,
        gain=share * (1 - then / now) if now else 0.0,
        cost=busiest / bandwidth / horizon_s if horizon_s else 0.0,
        min_gain=min_gain,
    )
