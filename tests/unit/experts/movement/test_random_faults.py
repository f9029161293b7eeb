"""Random plans, faults and aborts, one after the other on the same movers: no wrong byte, and always another try."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from byte_ranks import NUM_LAYERS, byte_ranks, wrong_slots

from trimtab.experts.delta import diff
from trimtab.experts.movement.faults import Point
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Failed, Quiescent, Staged
from trimtab.testing.movement import Action, ScriptedFaults, corrupts, raises, random_placement

SEED = 20_261_130
FAULTS: list[tuple[Point, Action]] = [
    *((point, raises("no")) for point in (Point.STAGE, Point.COPY, Point.SENT, Point.ARRIVED, Point.STAGED)),
    (Point.SENT, corrupts),
    (Point.ARRIVED, corrupts),
]


@pytest.mark.parametrize(("communicator", "num_ranks", "num_plans"), [("shared_memory", 4, 120), ("torch_gloo", 3, 40)])
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_layers_are_wholly_old_or_wholly_new_whatever_fails(
    communicator: str, num_ranks: int, num_plans: int, seed: int, tmp_path: Path
) -> None:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def pick(bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=generator))

    topology = Topology(9, 3, num_ranks)
    faults = {rank: ScriptedFaults() for rank in range(num_ranks)}
    outcomes = {"done": 0, "failed": 0, "aborted": 0}
    first = Placement.identity(topology, NUM_LAYERS)
    with byte_ranks(tmp_path, placement=first, communicator=communicator, faults=faults, timeout_s=6.0) as ranks:
        for _ in range(num_plans):
            for scripted in faults.values():
                scripted.actions.clear()
            fault_in_layer = pick(2 * NUM_LAYERS)  # often none
            abort_before = pick(3 * NUM_LAYERS)
            new = random_placement(topology, NUM_LAYERS, generator)
            transaction = ranks.begin(new)
            outcome = "done"
            for layer in [delta.layer for delta in diff(ranks.placement, new) if delta.transfers]:
                if layer == fault_in_layer:
                    point, action = FAULTS[pick(len(FAULTS))]
                    faults[pick(num_ranks)].actions[point] = action
                if layer == abort_before:
                    for mover in ranks.movers:
                        mover.stage(layer)  # and nobody waits for what comes of it
                    outcome = "aborted"
                    break
                reports = [report for found in ranks.stage(layer) for report in found]
                # One that fails may close its group while another still connects: that one fails in both respects.
                assert {report.rank for report in reports} == set(range(num_ranks))
                if not all(isinstance(report, Staged) for report in reports):
                    assert any(isinstance(report, Failed) for report in reports)
                    outcome = "failed"
                    break
                ranks.commit(layer)
                assert wrong_slots(ranks) == []
            if outcome == "done":
                ranks.finish()
                assert ranks.placement == new
            else:
                assert [found[-1] for found in ranks.abort()] == [Quiescent(r, transaction) for r in range(num_ranks)]
            outcomes[outcome] += 1
            assert wrong_slots(ranks) == []
        ranks.check_slots()
    print(outcomes)
    assert min(outcomes.values()) > num_plans // 20
    assert not [thread for thread in threading.enumerate() if "mover" in thread.name]
    assert list(tmp_path.iterdir()) == []
