"""The keys of `eplb_config`: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.experts.control.config import EplbConfig, eplb_config_from, eplb_options

ACCEPTED: dict[str, list[Any]] = {
    "window_size": [1, 1000, 2**31],
    "step_interval": [1, 2**31],
    "num_redundant_experts": [0, 2**16],
    "policy": ["default", "incremental", "my_package.policies:Mine"],
    "use_async": [True],
    "load_collection_phase": ["all", "prefill", "decode"],
    "log_balancedness": [True, False],
    "log_balancedness_interval": [1],
    "communicator": [None, "torch_gloo", "shared_memory"],
    "min_gain": [0, 0.5, 1.0],
    "max_moves_per_layer": [None],
    "stall_timeout_s": [0.01, 5, 86_400.0],
    "initial_placement": [None, "a.json"],
    "record_load": [None, "a.safetensors"],
}
REFUSED: dict[str, list[Any]] = {
    "window_size": [0, -1, 2**31 + 1, 1.5, True, None, "10"],
    "step_interval": [0, 2.0, None],
    "num_redundant_experts": [-1, 2**16 + 1, False],
    "policy": ["defualt", "", None, 3, "a:b:c", ":Mine", "module:"],
    "use_async": [False, 1, None],
    "load_collection_phase": ["both", None, 0],
    "log_balancedness": [1, "yes"],
    "log_balancedness_interval": [0],
    "communicator": ["gloo", "", False, 0],
    "min_gain": [-0.01, 1.01, float("nan"), float("inf"), "0.1", True],
    "max_moves_per_layer": [0, -1, 1.0],
    "stall_timeout_s": [0, 0.009, 1e6, float("nan")],
    "initial_placement": ["", 3],
    "record_load": ["", b"x"],
}


def test_every_key_has_accepted_and_refused_values_here() -> None:
    assert set(ACCEPTED) == set(REFUSED) == set(eplb_options())


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ACCEPTED.items() for value in values])
def test_accepted_values_are_kept_as_given(key: str, value: Any) -> None:
    """B35: nothing changes a setting after the user."""
    assert getattr(eplb_config_from({key: value}), key) == value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_refused_values_are_named_with_key_bound_and_remedy(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as error:
        eplb_config_from({key: value})
    assert repr(value) in str(error.value) and "must" in str(error.value) and ";" in str(error.value)


def test_defaults_are_those_of_the_documentation() -> None:
    config = EplbConfig()
    assert eplb_config_from(None) == eplb_config_from({}) == config
    assert (config.window_size, config.step_interval, config.num_redundant_experts) == (1000, 3000, 0)
    assert (config.policy, config.use_async, config.load_collection_phase) == ("default", True, "all")
    assert (config.communicator, config.min_gain, config.max_moves_per_layer) == (None, 0.02, None)


def test_an_unknown_key_is_refused_with_near_names() -> None:
    """B55: what is not understood is not ignored."""
    with pytest.raises(ValueError, match="'window_sise' is no key of eplb_config; did you mean window_size"):
        eplb_config_from({"window_sise": 10})
    with pytest.raises(ValueError, match="known: window_size, step_interval"):
        eplb_config_from({"zzz": 1})
    with pytest.raises(ValueError, match="must be a mapping"):
        eplb_config_from([("window_size", 1)])  # type: ignore[arg-type]


def test_a_window_may_exceed_the_interval() -> None:
    assert eplb_config_from({"window_size": 100, "step_interval": 10}).window_size == 100


def test_moves_are_bounded_only_where_the_policy_counts_them() -> None:
    with pytest.raises(ValueError, match=r"max_moves_per_layer \(2\) needs a policy that counts moves"):
        eplb_config_from({"max_moves_per_layer": 2})
    for policy in ("incremental", "mine:Policy"):
        assert eplb_config_from({"max_moves_per_layer": 2, "policy": policy}).max_moves_per_layer == 2


def test_asynchronous_is_the_only_mode() -> None:
    with pytest.raises(ValueError, match=r"use_async \(False\) must be True: experts always move in the background"):
        eplb_config_from({"use_async": False})
