"""Load is counted once, by the rank that owns the token, under the placement of its step."""

# T tokens  K top-k  L MoE layers  E experts  P slots

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.experts.data.dispatch.base import RankPlace
from trimtab.experts.data.load_recorder import SlotLoadRecorder
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.placement import Placement, Topology


@dataclass
class Layer:
    routing_table: RoutingTable
    look_up: Callable[[Tensor], Tensor]


class Rank:
    """One rank's layers as far as load is concerned."""

    def __init__(self, placement: Placement, place: RankPlace | None = None) -> None:
        place = place or RankPlace()
        group = place.rank // place.num_sharing
        tables = [RoutingTable(placement, layer, group) for layer in range(placement.num_layers)]
        self.layers = [Layer(table, table.look_up) for table in tables]
        self.recorder = SlotLoadRecorder(placement, place)
        self.recorder.attach(self.layers)

    def forward(self, ids_of_layer: list[Tensor]) -> list[Tensor]:
        return [layer.look_up(ids) for layer, ids in zip(self.layers, ids_of_layer, strict=True)]


def ids(*tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


TWO_LAYERS = Placement(Topology(3, 1), [[0, 1, 2, 0], [2, 1, 0, 1]])


def test_load_is_counted_per_layer_over_all_slots_and_folded_to_experts() -> None:
    rank = Rank(TWO_LAYERS)
    rank.recorder.begin_step(True)
    rank.forward([ids([0, 1], [0, 2], [0, -1]), ids([1, 2], [1, 0], [-1, -1])])
    assert rank.recorder.counts.sum(1).tolist() == [5, 4]
    assert rank.recorder.counts[0, [0, 3]].tolist() == [1, 2] or rank.recorder.counts[0, [0, 3]].tolist() == [2, 1]
    assert rank.recorder.fold(TWO_LAYERS).tolist() == [[3, 1, 1], [1, 2, 1]]
    assert rank.recorder.fold(TWO_LAYERS).sum() == 0, "counting starts anew"


def test_padding_tokens_do_not_count_as_load() -> None:
    """B20, B30: a batch padded to four rows counts the pairs of its one real token."""
    rank = Rank(TWO_LAYERS)
    rank.recorder.begin_step(True)
    padded = ids([0, 2], [-1, -1], [-1, -1], [-1, -1])
    rank.forward([padded, padded])
    assert rank.recorder.fold(TWO_LAYERS).tolist() == [[1, 0, 1], [1, 0, 1]]


def test_rule_05_load_is_folded_with_the_placement_it_was_counted_under() -> None:
    """Each commit comes between a fold under the old placement and steps under the new one. The control, folding all
    under the last placement, blames the wrong experts."""
    topology = Topology(4, 2)
    generator = np.random.default_rng(17)
    placements = [
        Placement(topology, [generator.permutation(np.concatenate([np.arange(4), generator.integers(0, 4, 2)]))])
        for _ in range(4)
    ]
    rank = Rank(placements[0])
    expected, folded, in_slots = np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64), np.zeros(6, dtype=np.int64)
    for old, new in zip(placements, [*placements[1:], placements[0]], strict=True):
        for _ in range(3):
            chosen = torch.from_numpy(generator.integers(-1, 3, (7, 2)))
            rank.recorder.begin_step(True)
            rank.forward([chosen])
            expected += np.bincount(chosen[chosen >= 0], minlength=4)
        in_slots += rank.recorder.counts[0].numpy()
        folded += rank.recorder.fold(old)[0]
        rank.layers[0].routing_table.refresh(new, 0)
    assert folded.tolist() == expected.tolist()
    late = np.bincount(placements[-1].slot_to_expert[0], weights=in_slots, minlength=4)
    assert late.tolist() != expected.tolist()


@pytest.mark.parametrize(("num_ranks", "num_sharing"), [(1, 1), (4, 1), (4, 4), (4, 2), (6, 3)])
def test_rule_04_the_sum_over_ranks_is_real_tokens_times_top_k_times_layers(num_ranks: int, num_sharing: int) -> None:
    """DP, shared tokens, both: every rank of a group sees all its tokens and counts its own share."""
    seed = 20_261_131
    generator = np.random.default_rng(seed)
    topology = Topology(5, 7, num_ranks)
    slots = np.stack([generator.permutation(np.concatenate([np.arange(5), np.arange(7) % 5])) for _ in range(3)])
    placement = Placement(topology, slots)
    ranks = [Rank(placement, RankPlace(rank, num_ranks, num_sharing)) for rank in range(num_ranks)]
    num_pairs = 0
    for num_tokens in (0, 1, 2, 3, 7, 32):
        for group in range(num_ranks // num_sharing):
            chosen = [torch.from_numpy(generator.integers(-1, 5, (num_tokens, 2))) for _ in range(3)]
            num_pairs += sum(int((part >= 0).sum()) for part in chosen)
            found = []
            for rank in ranks[group * num_sharing : (group + 1) * num_sharing]:
                rank.recorder.begin_step(True)
                found.append(rank.forward(chosen))
            assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True)), (
                "ranks that share tokens choose the same replicas"
            )
    assert num_pairs > 0
    assert sum(int(rank.recorder.fold(placement).sum()) for rank in ranks) == num_pairs, f"seed {seed}"


def test_a_single_token_per_step_takes_its_replicas_in_turn() -> None:
    placement = Placement(Topology(2, 2), [[0, 1, 0, 0]])
    rank = Rank(placement)
    found = []
    for _ in range(6):
        rank.recorder.begin_step(True)
        found.append(int(rank.forward([ids([0])])[0]))
    assert sorted(found[:3]) == sorted(found[3:]) == [0, 2, 3]


def test_b27_all_layers_of_a_step_are_counted_or_none() -> None:
    """B27: a filtered step adds to no layer, and moves what decides the replicas on all the same."""
    counted, filtered = Rank(TWO_LAYERS), Rank(TWO_LAYERS)
    for step in range(4):
        counted.recorder.begin_step(True)
        filtered.recorder.begin_step(step % 2 == 0)
        chosen = [ids([0, 1]), ids([1, 2])]
        assert all(map(torch.equal, counted.forward(chosen), filtered.forward(chosen)))
    assert counted.recorder.fold(TWO_LAYERS).tolist() == [[4, 4, 0], [0, 4, 4]]
    assert filtered.recorder.fold(TWO_LAYERS).tolist() == [[2, 2, 0], [0, 2, 2]]


def test_b26_a_warm_up_is_no_load_neither_at_start_nor_between_steps() -> None:
    """B26: not even one that fails; the step after it is counted as ever."""
    rank = Rank(TWO_LAYERS)
    chosen = [ids([0, 1]), ids([1, 2])]
    rank.forward(chosen)
    assert rank.recorder.fold(TWO_LAYERS).sum() == 0, "nothing is counted before the first step"
    rank.recorder.begin_step(True)
    rank.forward(chosen)
    rank.recorder.begin_step(False)
    with pytest.raises(IndexError):
        rank.forward([ids([0, 1]), ids([9, 9])])
    assert rank.recorder.counts.sum() == 4
    rank.recorder.begin_step(True)
    rank.forward(chosen)
    assert rank.recorder.fold(TWO_LAYERS).sum() == 8


def test_two_recorders_in_one_process_count_for_themselves() -> None:
    first, second = Rank(TWO_LAYERS), Rank(TWO_LAYERS)
    first.recorder.begin_step(True)
    for rank in (first, second):
        rank.forward([ids([0, 1]), ids([1, 2])])
    assert first.recorder.counts.sum() == 4 and second.recorder.counts.sum() == 0
