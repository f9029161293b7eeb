"""The published DeepSeek algorithm (github.com/deepseek-ai/EPLB), with two repairs: an expert has at most one replica
per rank, and ties are explicit, so that every machine gives the same placement.

Hierarchical: groups of experts are packed to nodes, hot experts replicated within their node, replicas packed to the
node's ranks. Where groups, nodes and ranks do not divide, the same with one node: experts are balanced over all ranks.
"""

# L MoE layers  E experts  P slots  n ranks

from __future__ import annotations

import numpy as np

from trimtab.experts.control.policy.base import (
    IntArray,
    PolicySettings,
    better_layers,
    check_load,
    scaled_counts,
)
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology


class DefaultPolicy:
    """Plans from the load alone: balance is as good as the algorithm's, and most slots move."""

    is_movement_aware = False

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def rebalance(self, load: ExpertLoad, current: Placement) -> Placement:
        check_load(load, current)
        return better_layers(load, current, plan_rows(load, current.topology, self.settings))


def plan_rows(load: ExpertLoad, topology: Topology, settings: PolicySettings) -> IntArray:
    """[L, P]: which expert each slot holds, by the load alone."""
    if settings.hierarchy_refusal(topology):
        settings = PolicySettings()
    num_nodes = settings.num_nodes
    num_groups = settings.num_groups if num_nodes > 1 else 1
    weights = scaled_counts(load)
    num_layers, num_experts = weights.shape
    group_size, experts_per_node = num_experts // num_groups, num_experts // num_nodes

    # 1. Groups to nodes: node_experts[l] lists the experts node by node.
    group_loads = weights.reshape(num_layers, num_groups, group_size).sum(axis=-1)
    node, place = pack(group_loads, num_nodes)
    first = (node * (num_groups // num_nodes) + place) * group_size
    position = (first[:, :, None] + np.arange(group_size)).reshape(num_layers, num_experts)
    node_experts = np.argsort(position, axis=1, kind="stable")

    # 2. Hot experts are replicated within their node; from here on a node of a layer is a row of its own.
    node_weights = np.take_along_axis(weights, node_experts, axis=1).reshape(-1, experts_per_node)
    ranks_per_node = topology.num_ranks // num_nodes
    replicas, counts = replicate(node_weights, topology.num_slots // num_nodes, ranks_per_node)

    # 3. Replicas to the node's ranks.
    unit_loads = np.take_along_axis(node_weights // counts, replicas, axis=1)
    rank, place = pack(unit_loads, ranks_per_node)
    slots = np.argsort(rank * topology.slots_per_rank + place, axis=1, kind="stable")
    local = np.take_along_axis(replicas, slots, axis=1)
    for row, units in zip(local, node_weights // counts, strict=True):
        separate_duplicates(row, units, ranks_per_node)

    offsets = np.tile(np.arange(num_nodes) * experts_per_node, num_layers)[:, None]
    return np.take_along_axis(node_experts, (local + offsets).reshape(num_layers, -1), axis=1)


def pack(weights: IntArray, num_packs: int) -> tuple[IntArray, IntArray]:
    """weights [X, N] -> each item's pack [X, N] and place in it [X, N]: N // num_packs items per pack, the heaviest
    item first, each to the lightest pack that has room (the first of equals)."""
    num_rows, num_items = weights.shape
    room = num_items // num_packs
    packs, places = np.zeros_like(weights), np.zeros_like(weights)
    if room == 1:
        packs[:] = np.arange(num_items)
        return packs, places
    order = np.argsort(-weights, axis=1, kind="stable")
    loads = np.zeros((num_rows, num_packs), dtype=np.int64)
    filled = np.zeros_like(loads)
    rows = np.arange(num_rows)
    full = np.iinfo(np.int64).max
    for item in order.T:
        pack = np.where(filled < room, loads, full).argmin(axis=1)
        packs[rows, item] = pack
        places[rows, item] = filled[rows, pack]
        loads[rows, pack] += weights[rows, item]
        filled[rows, pack] += 1
    return packs, places


def replicate(weights: IntArray, num_slots: int, num_ranks: int) -> tuple[IntArray, IntArray]:
    """weights [X, E] -> the expert of each replica [X, num_slots] and the experts' replica counts [X, E].

    Each spare slot goes to the expert whose replicas carry most, of equals to the one with fewest replicas, then to the
    first; no expert gets more replicas than there are ranks.
    """
    num_rows, num_experts = weights.shape
    replicas = np.tile(np.arange(num_experts), (num_rows, 1))
    replicas = np.concatenate([replicas, np.zeros((num_rows, num_slots - num_experts), dtype=np.int64)], axis=1)
    counts = np.ones_like(weights)
    rows = np.arange(num_rows)
    for slot in range(num_experts, num_slots):
        units = np.where(counts < num_ranks, weights // counts, -1)
        heaviest = units == units.max(axis=1, keepdims=True)
        expert = np.where(heaviest, counts, num_ranks + 1).argmin(axis=1)
        replicas[rows, slot] = expert
        counts[rows, expert] += 1
    return replicas, counts


def separate_duplicates(row: IntArray, units: IntArray, num_ranks: int) -> None:
    """In place on row [P]: no rank holds an expert twice. units [E]: the load of one replica.

    A duplicate changes places with the replica of another rank that leaves the heavier of the two ranks lightest.
    """
    slots_per_rank = len(row) // num_ranks
    for _ in range(len(row)):
        by_rank = row.reshape(num_ranks, slots_per_rank)
        held = np.zeros((num_ranks, len(units)), dtype=np.int64)
        np.add.at(held, (np.arange(num_ranks)[:, None], by_rank), 1)
        if held.max() == 1:
            return
        rank, expert = np.unravel_index(int(np.argmax(held > 1)), held.shape)
        loads = units[by_rank].sum(axis=1)
        partners = np.flatnonzero((held[:, expert] == 0).repeat(slots_per_rank) & (held[rank, row] == 0))
        if not partners.size:
            break
        partner_ranks = partners // slots_per_rank
        difference = units[expert] - units[row[partners]]
        heavier = np.maximum(loads[rank] - difference, loads[partner_ranks] + difference)
        partner = partners[int(np.argmin(heavier))]
        slot = rank * slots_per_rank + int(np.argmax(by_rank[rank] == expert))
        row[slot], row[partner] = row[partner], row[slot]
    deal(row, num_ranks)


def deal(row: IntArray, num_ranks: int) -> None:
    """In place on row [P]: replicas are dealt out like cards, which separates those of one expert always."""
    row[:] = np.sort(row).reshape(-1, num_ranks).T.reshape(-1)
