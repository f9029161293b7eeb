"""Whole validation of what a policy answered, before any byte moves."""

# L MoE layers  P slots

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.experts.placement import Placement


class InvalidPlanError(ValueError):
    """A policy's answer that cannot be put into force; nothing was changed."""


def check_plan(slot_to_expert: Any, shares: Any, current: Placement, start_digest: str) -> Placement:
    """The placement that follows `current`. Raises InvalidPlanError saying what is wrong with the answer.

    Checked: the placement it starts from, types, shape, slots (capacity), range, shares, and that each expert has a
    slot. Every expert has a source then, for `current` has a slot for each as well.
    """
    if start_digest != current.digest():
        raise InvalidPlanError("the plan starts from a placement that is not in force any more; plan anew")
    expected = current.slot_to_expert.shape
    for name, values in (("slot_to_expert", slot_to_expert), ("shares", shares)):
        if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, np.integer):
            found = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
            raise InvalidPlanError(f"{name} ({found}) must be an array of integers")
        if values.shape != expected:
            raise InvalidPlanError(f"{name} {values.shape} must be {expected}: the layers and slots there are")
    try:
        return Placement(current.topology, slot_to_expert, shares)
    except ValueError as error:
        raise InvalidPlanError(str(error)) from error
