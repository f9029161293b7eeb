"""From the current placement by few moves: local search that weighs balance against what moves.

Per layer, starting from the placement in force and, where that leaves a gap, from a repaired one (the best replica
counts, every replica that can stay kept, the rest dealt to the lightest ranks), the most loaded rank is relieved step
by step: it swaps an expert with another rank, or an expert gets a replica in a redundant slot. Of all placements on
the way the one with the least `max load + price * moves` is taken; staying is among them.
"""

# L MoE layers  E experts  P slots  n ranks  S slots/rank  C candidates

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.experts.control.policy.base import (
    IntArray,
    PolicySettings,
    better_layers,
    check_load,
    scaled_counts,
)
from trimtab.experts.control.policy.default import plan_rows, replicate, separate_duplicates
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement

PRICE_DIVISOR = 1000  # a move must lower the most loaded rank by a thousandth of a rank's mean load
EPSILON_DIVISOR = 1000  # this near to the bound nothing is sought any more
PATIENCE = 24  # steps without a new best


class IncrementalPolicy:
    """Even dispatch: an expert's replicas take equal parts of its load."""

    is_movement_aware = True

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        check_load(load, current)
        scaled = scaled_counts(load)
        rows = current.slot_to_expert.copy()
        for layer, weights in enumerate(scaled):
            if weights.any():
                rows[layer] = self._plan_layer(load, current, layer, weights)
        return better_layers(load, current, rows)

    def _plan_layer(self, load: ExpertLoad, current: Placement, layer: int, weights: IntArray) -> IntArray:
        settings, topology = self.settings, current.topology
        row = current.slot_to_expert[layer]
        if settings.num_nodes == 1 or settings.hierarchy_refusal(topology):
            return _plan(weights, row, topology.num_ranks, settings.max_moves_per_layer)
        nodes = _experts_by_node(row, settings)
        if nodes is None:  # groups are spread over nodes: bring them home first
            if settings.max_moves_per_layer is not None:
                return row
            one = ExpertLoad(load.counts[layer : layer + 1], load.num_steps)
            return plan_rows(one, topology, settings)[0]
        planned = row.copy().reshape(settings.num_nodes, -1)
        ranks_per_node, allowed = topology.num_ranks // settings.num_nodes, settings.max_moves_per_layer
        for node, experts in enumerate(nodes):
            before = np.searchsorted(experts, planned[node])
            after = _plan(weights[experts], before, ranks_per_node, allowed)
            if allowed is not None:
                allowed -= _moves(_holders(before, len(experts), ranks_per_node), after)
            planned[node] = experts[after]
        return planned.reshape(-1)


def _experts_by_node(row: IntArray, settings: PolicySettings) -> list[IntArray] | None:
    """The experts of each node, if every group is on one node alone."""
    nodes = [np.unique(slots) for slots in row.reshape(settings.num_nodes, -1)]
    group_size = (int(row.max()) + 1) // settings.num_groups
    homes: dict[int, int] = {}
    for node, experts in enumerate(nodes):
        for group in np.unique(experts // group_size).tolist():
            if homes.setdefault(group, node) != node:
                return None
    return nodes


def _holders(row: IntArray, num_experts: int, num_ranks: int) -> IntArray:
    """[n, E]: how many slots of each rank hold each expert."""
    held = np.zeros((num_ranks, num_experts), dtype=np.int64)
    np.add.at(held, (np.repeat(np.arange(num_ranks), len(row) // num_ranks), row), 1)
    return held


def _moves(old_held: IntArray, row: IntArray) -> int:
    """Slots that hold an expert its rank did not hold."""
    ranks = np.repeat(np.arange(len(old_held)), len(row) // len(old_held))
    return int((old_held[ranks, row] == 0).sum())


def _plan(weights: IntArray, row: IntArray, num_ranks: int, max_moves: int | None) -> IntArray:
    """weights [E], row [P] -> the row to follow; `row` itself where moves do not pay."""
    if not weights.any() or len(row) > num_ranks * len(weights):  # with room for every expert on every rank and more
        return row
    mean_load = int(weights.sum()) // num_ranks
    counts = replicate(weights[None], len(row), num_ranks)[1][0]  # those that make the heaviest replica lightest
    bound = max(mean_load, int((weights // counts).max()))
    target = bound + bound // EPSILON_DIVISOR
    old_held = _holders(row, len(weights), num_ranks)
    best = _Best(row, int((old_held @ (weights // old_held.sum(axis=0))).max()), mean_load // PRICE_DIVISOR, max_moves)
    if old_held.max() == 1:
        _search(_Layer(weights, row.copy(), old_held), best, target)
    num_missing = int(np.maximum(counts - old_held.sum(axis=0), 0).sum())
    if best.max_load > target and best.may_improve(bound, num_missing):
        _search(_Layer(weights, _repair(weights, row, num_ranks, counts), old_held), best, target)
    return best.row


@dataclass
class _Best:
    """The cheapest row so far by `max load + price * moves`."""

    row: IntArray
    max_load: int
    price: int
    max_moves: int | None
    num_moves: int = 0

    @property
    def objective(self) -> int:
        return int(self.max_load) + self.price * self.num_moves

    def may_improve(self, max_load: int, num_moves: int) -> bool:
        within = self.max_moves is None or num_moves <= self.max_moves
        return within and max_load + self.price * num_moves < self.objective

    def offer(self, row: IntArray, max_load: int, num_moves: int) -> bool:
        if not self.may_improve(max_load, num_moves):
            return False
        self.row, self.max_load, self.num_moves = row.copy(), max_load, num_moves
        return True


class _Layer:
    """One layer's search state: `row` and everything derived from it, kept up to date by `overwrite`."""

    def __init__(self, weights: IntArray, row: IntArray, old_held: IntArray) -> None:
        self.weights, self.row, self.old_held = weights, row, old_held
        self.num_ranks = len(old_held)
        self.ranks = np.repeat(np.arange(self.num_ranks), len(row) // self.num_ranks)  # [P]
        self.held = _holders(row, len(weights), self.num_ranks)  # [n, E]
        self.derive()

    def derive(self) -> None:
        self.counts = self.held.sum(axis=0)
        self.units = self.weights // self.counts  # [E]
        self.loads = self.held @ self.units  # [n]

    def overwrite(self, slots: list[int], experts: list[int]) -> None:
        for slot, expert in zip(slots, experts, strict=True):
            self.held[self.ranks[slot], self.row[slot]] -= 1
            self.row[slot] = expert
            self.held[self.ranks[slot], expert] += 1
        self.derive()


def _search(layer: _Layer, best: _Best, target: int) -> None:
    """Relieves the most loaded rank until nothing helps, offering each row on the way."""
    stale = 0
    for _ in range(3 * len(layer.row)):
        max_load = int(layer.loads.max())
        stale = 0 if best.offer(layer.row, max_load, _moves(layer.old_held, layer.row)) else stale + 1
        if max_load <= target or stale > PATIENCE:
            return
        least_gain = max(1, int(layer.loads.sum()) // layer.num_ranks // 100_000)
        steps = [step for step in (_best_swap(layer), _best_replica(layer)) if step.gain >= least_gain]
        if not steps:
            return
        step = max(steps, key=lambda step: step.score)  # of equals the swap
        layer.overwrite(step.slots, step.experts)


@dataclass(frozen=True, slots=True)
class _Step:
    """`gain`: by how much the most loaded of the ranks concerned gets lighter. `score`: gain per move."""

    gain: int
    score: int
    slots: list[int]
    experts: list[int]


NO_STEP = _Step(0, 0, [], [])


def _best(gains: IntArray, costs: IntArray) -> tuple[tuple[int, ...], int, int]:
    """The place, gain and score of the best: the highest gain per move, of equals the first. A move that is free, or is
    undone, counts as a quarter."""
    scores = np.where(gains > 0, gains * 4 // np.maximum(costs * 4, 1), 0)
    place = np.unravel_index(int(np.argmax(scores)), scores.shape)
    return tuple(int(index) for index in place), int(gains[place]), int(scores[place])


def _best_swap(layer: _Layer) -> _Step:
    """An expert of the most loaded rank changes places with a lighter one of another rank."""
    hot = int(layer.loads.argmax())
    mine = np.flatnonzero(layer.ranks == hot)  # [S]
    ours, theirs = layer.row[mine], layer.row
    difference = layer.units[ours][:, None] - layer.units[theirs][None, :]  # [S, P]
    other = layer.loads[layer.ranks][None, :]
    gains = np.minimum(difference, layer.loads[hot] - other - difference)
    allowed = (layer.held[layer.ranks][:, ours].T == 0) & (layer.held[hot, theirs] == 0)[None, :]
    gains = np.where(allowed & (difference > 0), gains, 0)
    is_new = layer.old_held == 0
    leaves_me = is_new[hot, ours].astype(np.int64)[:, None]
    arrives_there = is_new[layer.ranks][:, ours].T.astype(np.int64)
    leaves_there = is_new[layer.ranks, theirs].astype(np.int64)[None, :]
    arrives_here = is_new[hot, theirs].astype(np.int64)[None, :]
    (i, slot), gain, score = _best(gains, arrives_there - leaves_me + arrives_here - leaves_there)
    if gain <= 0:
        return NO_STEP
    return _Step(gain, score, [int(mine[i]), slot], [int(theirs[slot]), int(ours[i])])


def _best_replica(layer: _Layer) -> _Step:
    """A redundant replica makes room for one of another expert: elsewhere, for one of the most loaded rank's experts;
    or on that rank, which loses its part of a replicated one."""
    hot = int(layer.loads.argmax())
    spare = np.flatnonzero(layer.counts[layer.row] > 1)
    if not spare.size:
        return NO_STEP
    is_mine = layer.ranks[spare] == hot
    elsewhere = _replica_candidates(layer, hot, spare[~is_mine], np.unique(layer.row[layer.ranks == hot]))
    here = _replica_candidates(layer, hot, spare[is_mine], np.arange(len(layer.weights)))
    return max((elsewhere, here), key=lambda step: step.score)


def _replica_candidates(layer: _Layer, hot: int, slots: IntArray, experts: IntArray) -> _Step:
    """The best of: expert g takes over slot s, which holds a replica of f. slots [s], experts [g]."""
    experts = experts[layer.counts[experts] < layer.num_ranks]
    if not slots.size or not experts.size:
        return NO_STEP
    given_up, ranks = layer.row[slots], layer.ranks[slots]
    fewer = layer.weights[given_up] // (layer.counts[given_up] - 1) - layer.units[given_up]  # [s]: others carry more
    more = layer.weights[experts] // (layer.counts[experts] + 1)  # [g]: a replica's load then
    loses = layer.held[:, given_up].T * fewer[:, None]  # [s, n]
    at = np.arange(len(slots))
    loses[at, ranks] -= fewer + layer.units[given_up]
    relieves = layer.held[:, experts].T * (more - layer.units[experts])[:, None]  # [g, n]
    concerned = (layer.held[:, given_up].T > 0)[:, None, :] | (np.arange(layer.num_ranks) == hot)
    after = layer.loads + loses[:, None, :] + relieves[None, :, :]  # [s, g, n]
    after[at, :, ranks] += more[None, :]
    heaviest = np.where(concerned, after, 0).max(axis=-1)  # [s, g]
    gains = np.where(layer.held[ranks][:, experts] == 0, layer.loads[hot] - heaviest, 0)
    is_new = layer.old_held == 0
    costs = is_new[ranks][:, experts].astype(np.int64) - is_new[ranks, given_up].astype(np.int64)[:, None]
    (s, g), gain, score = _best(gains, costs)
    return _Step(gain, score, [int(slots[s])], [int(experts[g])]) if gain > 0 else NO_STEP


def _repair(weights: IntArray, row: IntArray, num_ranks: int, counts: IntArray) -> IntArray:
    """A row with counts [E] replicas of each expert, none twice on a rank: replicas stay where they can, surplus ones
    go from the most loaded ranks, missing ones come to the lightest, the heaviest first."""
    units = weights // counts
    slots_per_rank = len(row) // num_ranks
    after = np.full_like(row, -1)
    held = np.zeros((num_ranks, len(weights)), dtype=bool)
    for slot, expert in enumerate(row.tolist()):
        rank = slot // slots_per_rank
        if not held[rank, expert]:
            held[rank, expert], after[slot] = True, expert
    loads = held @ units
    for expert in np.flatnonzero(held.sum(axis=0) > counts).tolist():
        for _ in range(int(held[:, expert].sum() - counts[expert])):
            rank = int(np.where(held[:, expert], loads, -1).argmax())
            held[rank, expert] = False
            loads[rank] -= units[expert]
            slots = after[rank * slots_per_rank : (rank + 1) * slots_per_rank]
            slots[slots == expert] = -1
    missing = counts - held.sum(axis=0)
    for expert in np.argsort(-units, kind="stable").tolist():
        for _ in range(int(missing[expert])):
            is_free = (after.reshape(num_ranks, -1) < 0).any(axis=1)
            is_open = is_free & ~held[:, expert] if (is_free & ~held[:, expert]).any() else is_free
            rank = int(np.where(is_open, loads, np.iinfo(np.int64).max).argmin())
            held[rank, expert] = True
            loads[rank] += units[expert]
            after[rank * slots_per_rank + int((after.reshape(num_ranks, -1)[rank] < 0).argmax())] = expert
    separate_duplicates(after, units, num_ranks)
    return after
