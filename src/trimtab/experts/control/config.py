"""What a user can set about expert balancing (`eplb_config`), by the names vLLM users know."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

POLICIES = ("default", "incremental")
MOVEMENT_AWARE_POLICIES = ("incremental",)
LOAD_COLLECTION_PHASES = ("all", "prefill", "decode")
COMMUNICATORS = (None, "torch_gloo", "shared_memory")
MAX_STEPS = 2**31


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """Raises `ValueError` naming the key, its value, the bound and a remedy. Values that were given are never changed
    afterwards (B35)."""

    window_size: int = _option(1000, "steps whose load a decision looks at; may exceed step_interval")
    step_interval: int = _option(3000, "steps between two decisions")
    num_redundant_experts: int = _option(0, "replicas per MoE layer, to be shared out among hot experts")
    policy: str = _option("default", "default, incremental, or 'module:Class' of your own")
    use_async: bool = _option(True, "experts move while the engine serves; there is no other mode")
    load_collection_phase: str = _option("all", "which batches count as load: all, prefill, decode")
    log_balancedness: bool = _option(False, "log how even the ranks' loads are")
    log_balancedness_interval: int = _option(100, "steps between two such lines")
    communicator: str | None = _option(
        None, "how weights travel: torch_gloo or shared_memory; default: what serves here"
    )
    min_gain: float = _option(0.02, "least predicted gain of step time, move costs deducted; 0 rearranges always")
    max_moves_per_layer: int | None = _option(None, "slots that may change per layer; for movement-aware policies")
    stall_timeout_s: float = _option(60.0, "a rearrangement that makes no progress ends within this time")
    initial_placement: str | None = _option(None, "JSON file that says which expert lives in which slot at start")
    record_load: str | None = _option(None, "file that the load of every window is written to")

    def __post_init__(self) -> None:
        _check_integer("window_size", self.window_size, 1, MAX_STEPS, "1000 is the default")
        _check_integer("step_interval", self.step_interval, 1, MAX_STEPS, "3000 is the default")
        _check_integer("num_redundant_experts", self.num_redundant_experts, 0, 2**16, "0 adds no replica")
        _check_policy(self.policy)
        _check_switch("use_async", self.use_async)
        if not self.use_async:
            raise ValueError("use_async (False) must be True: experts always move in the background; leave it out")
        _check_choice("load_collection_phase", self.load_collection_phase, LOAD_COLLECTION_PHASES)
        _check_switch("log_balancedness", self.log_balancedness)
        _check_integer("log_balancedness_interval", self.log_balancedness_interval, 1, MAX_STEPS, "100 is the default")
        _check_choice("communicator", self.communicator, COMMUNICATORS)
        _check_number("min_gain", self.min_gain, 0.0, 1.0, "0.02 is the default, 0 rearranges always")
        if self.max_moves_per_layer is not None:
            _check_integer(
                "max_moves_per_layer", self.max_moves_per_layer, 1, 2**16, "leave it out to let the policy decide"
            )
            if self.policy in POLICIES and self.policy not in MOVEMENT_AWARE_POLICIES:
                raise ValueError(
                    f"max_moves_per_layer ({self.max_moves_per_layer}) needs a policy that counts moves: "
                    f"policy ({self.policy!r}) must be {' or '.join(map(repr, MOVEMENT_AWARE_POLICIES))} or your own"
                )
        _check_number("stall_timeout_s", self.stall_timeout_s, 0.01, 86_400.0, "60 is the default")
        for name in ("initial_placement", "record_load"):
            _check_path(name, getattr(self, name))


def eplb_options() -> dict[str, tuple[Any, str]]:
    """Key -> (default, one line of help), in declaration order."""
    return {option.name: (option.default, option.metadata["help"]) for option in fields(EplbConfig)}


def eplb_config_from(mapping: Mapping[str, Any] | None) -> EplbConfig:
    """An `EplbConfig` from what a user wrote. An unknown key is an error that lists near ones."""
    if mapping is None:
        return EplbConfig()
    if not isinstance(mapping, Mapping):
        raise ValueError(f"eplb_config ({mapping!r}) must be a mapping of keys to values; write it as a JSON object")
    known = eplb_options()
    for name in mapping:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{name!r} is no key of eplb_config; {hint}")
    return EplbConfig(**mapping)


def _check_integer(name: str, value: Any, low: int, high: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} ({value!r}) must be an integer in [{low}, {high}]; {remedy}")


def _check_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        raise ValueError(f"{name} ({value!r}) must be a number in [{low:g}, {high:g}]; {remedy}")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, allowed))}; choose one of them")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} ({value!r}) must be True or False; choose one of them")


def _check_path(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} ({value!r}) must name a file; leave it out for none")


def _check_policy(value: Any) -> None:
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        parts = [*module.split("."), attribute]
        if value in POLICIES or (colon and all(part.isidentifier() for part in parts)):
            return
    near = difflib.get_close_matches(str(value), POLICIES, n=1)
    hint = f"did you mean {near[0]}?" if near else "your own is named by the module it is imported from"
    raise ValueError(f"policy ({value!r}) must be one of {', '.join(map(repr, POLICIES))} or 'module:Class'; {hint}")
