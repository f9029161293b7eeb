"""Policies by name, policies of other projects, and the check of what any of them answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import odd_policies
import pytest

from trimtab.experts.control.config import POLICIES
from trimtab.experts.control.policy.base import PolicySettings
from trimtab.experts.control.policy.check import InvalidPlanError, check_plan
from trimtab.experts.control.policy.default import DefaultPolicy
from trimtab.experts.control.policy.registry import make_policy
from trimtab.experts.control.policy.vllm_adapter import VllmPolicyAdapter
from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement, Topology

TOPOLOGY = Topology(4, 2, 2)
START = Placement(TOPOLOGY, [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 1, 2]])
LOAD = ExpertLoad(np.array([[90, 80, 1, 2], [90, 80, 1, 2]]), 10)


def test_every_name_of_the_configuration_leads_to_a_policy() -> None:
    for name in POLICIES:
        assert make_policy(name, PolicySettings()).rebalance(LOAD, START).num_layers == 2
    assert isinstance(make_policy("default", PolicySettings()), DefaultPolicy)


def test_a_policy_of_ones_own_is_found_by_module_and_class() -> None:
    assert isinstance(make_policy("odd_policies:Reversed", PolicySettings()), odd_policies.Reversed)
    with pytest.raises(ValueError, match=r"'module:Class' that can be imported here: .*Missing"):
        make_policy("odd_policies:Missing", PolicySettings())


def test_moves_are_bounded_only_by_policies_that_count_them() -> None:
    bounded = PolicySettings(max_moves_per_layer=2)
    assert make_policy("incremental", bounded).is_movement_aware
    for name in ("default", "odd_policies:Reversed", "odd_policies:VllmReversed"):
        with pytest.raises(ValueError, match=r"max_moves_per_layer \(2\)"):
            make_policy(name, bounded)


@pytest.mark.parametrize("name", ["VllmReversed", "VllmTuple"])
def test_a_policy_with_vllms_signature_is_adapted(name: str) -> None:
    """B49: one map is taken, all others are derived from it."""
    policy = make_policy(f"odd_policies:{name}", PolicySettings())
    assert isinstance(policy, VllmPolicyAdapter)
    found = policy.rebalance(LOAD, START)
    expected = {
        "VllmReversed": START.slot_to_expert[:, ::-1],
        "VllmTuple": np.tile([1, 0, 3, 2, 1, 0], (2, 1)),
    }[name]
    assert found == Placement(TOPOLOGY, expected)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("VllmInteger", r"slot_to_expert \(int\) must be an array"), ("VllmIncomplete", "no slot for expert 1")],
)
def test_an_adapted_policys_answer_is_checked_and_not_mended(name: str, problem: str) -> None:
    """B36: an integer instead of a tensor is said, not worked around."""
    with pytest.raises(InvalidPlanError, match=problem):
        make_policy(f"odd_policies:{name}", PolicySettings()).rebalance(LOAD, START)


SLOTS, SHARES, DIGEST = START.slot_to_expert, START.shares, START.digest()
INVALID: list[tuple[str, Any, Any, str, str]] = [
    ("coverage", np.zeros_like(SLOTS), SHARES, DIGEST, "layer 0 has no slot for expert 1"),
    ("range", np.where(SLOTS == 3, 4, SLOTS), SHARES, DIGEST, r"must be in \[0, 4\)"),
    ("negative", np.where(SLOTS == 3, -1, SLOTS), SHARES, DIGEST, r"must be in \[0, 4\)"),
    ("capacity", SLOTS[:, :4], SHARES[:, :4], DIGEST, r"slot_to_expert \(2, 4\) must be \(2, 6\)"),
    ("layers", SLOTS[:1], SHARES[:1], DIGEST, r"slot_to_expert \(1, 6\) must be \(2, 6\)"),
    ("dtype", SLOTS.astype(float), SHARES, DIGEST, r"slot_to_expert \(float64\) must be an array of integers"),
    ("type", SLOTS.tolist(), SHARES, DIGEST, r"slot_to_expert \(list\) must be an array of integers"),
    ("shares", SLOTS, SHARES * 0, DIGEST, r"shares\[0, 0\] \(0\) must be at least 1"),
    ("shape of shares", SLOTS, SHARES[:, :5], DIGEST, r"shares \(2, 5\) must be \(2, 6\)"),
    ("start", SLOTS, SHARES, "0" * 64, "starts from a placement that is not in force"),
]


@pytest.mark.parametrize(
    ("slots", "shares", "digest", "problem"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID]
)
def test_a_plan_is_checked_whole_before_any_byte_moves(slots: Any, shares: Any, digest: str, problem: str) -> None:
    """Rule 16; B12: an expert without a place is an error, not a plan with an impossible source."""
    with pytest.raises(InvalidPlanError, match=problem):
        check_plan(slots, shares, START, digest)


def test_a_sound_plan_passes_the_check() -> None:
    assert check_plan(SLOTS[:, ::-1], SHARES, START, DIGEST).slot_to_expert.tolist() == SLOTS[:, ::-1].tolist()
    doubled = np.tile([0, 0, 1, 2, 3, 3], (2, 1))  # twice on a rank: movement's to handle, no shipped policy's to emit
    assert check_plan(doubled, SHARES, START, DIGEST).replica_counts().tolist() == [[2, 1, 1, 2]] * 2
