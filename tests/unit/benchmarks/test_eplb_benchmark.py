"""The arithmetic of benchmarks/eplb.py, and the policy that moves a quarter of the slots."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

FOLDER = Path(__file__).parents[3] / "benchmarks"
NAMES = ("eplb", "eplb_policies", "step_lines")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("eplb")
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_share_is_the_busier_ranks_work_and_the_controllers_over_the_mean_step(benchmark):
    idle = [{"look_up_s": 0.001, "balancing_s": 0.001}] * 4
    busy = [{"look_up_s": 0.004, "balancing_s": 0.002}] * 4
    found = benchmark.share_of_steps([idle, busy], controller_s=0.016, steps=[0.1, 0.1, 0.1])
    assert found["share"] == pytest.approx((0.004 + 0.002 + 0.004) / 0.1)
    assert (found["look_up_us"], found["controller_us"]) == (pytest.approx(4000), pytest.approx(4000))


def test_gaps_are_steps_over_the_median_at_rest(benchmark):
    found = benchmark.compare_steps([1.0] * 99 + [2.0], [1.0] * 90 + [1.2] * 9 + [4.0])
    assert found["longest_gap"] == {"rest": 2.0, "moving": 4.0, "goal": 3.0}
    assert found["p95"]["ratio"] == pytest.approx(1.2) and found["p50"]["ratio"] == 1
    assert found["mean"]["ratio"] == pytest.approx((90 + 9 * 1.2 + 4) / 101)


def test_a_rearrangement_is_counted_from_its_begin_to_its_end(benchmark):
    class Controller:
        placement = Placement.initial(Topology(4, 0, 2), 5)

        def observer(self, event, numbers):
            self.seen.append(event)

    controller = Controller()
    controller.seen = []
    steps = benchmark.TransactionSteps(controller)
    controller.observer("began", {"num_moves": 5})
    for _ in range(3):
        steps.count()
    controller.observer("done", {})
    assert (steps.lengths, steps.shares) == ([3], [0.25])
    assert controller.seen == ["began", "done"], "the log still hears of it"


@pytest.mark.parametrize(("num_experts", "num_redundant"), [(8, 2), (8, 0), (128, 4), (5, 1)])
def test_the_quarter_policy_moves_a_quarter_of_every_layers_slots(benchmark, num_experts, num_redundant):
    policies = importlib.import_module("eplb_policies")
    current = Placement.initial(Topology(num_experts, num_redundant, 2), 3)
    for number in range(20):
        load = ExpertLoad(np.full((3, num_experts), number), 1)
        proposed = policies.QuarterPolicy(PolicySettings()).rebalance(load, current)
        moved = (proposed.slot_to_expert != current.slot_to_expert).mean(axis=1)
        assert (moved >= 0.25).all() and (moved < 0.5).all(), f"plan {number}: {moved}"
        assert (proposed.replica_counts() == current.replica_counts()).all()
        current = proposed


def test_numbers_alone_make_a_line(benchmark):
    report = {"batch 1": {"goal": 0.5, "parts": {"a": 1.23456}}, "decisions": 3}
    assert list(benchmark.lines_of(report)) == [
        "  batch 1", "    goal: 0.5", "    parts: a 1.235", "  decisions: 3"
    ]  # fmt: skip
