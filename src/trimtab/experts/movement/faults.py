"""Where tests may interfere with a mover. The product has the null object."""

from __future__ import annotations

import threading
from enum import Enum
from typing import Protocol

from torch import Tensor


class Point(Enum):
    """What the mover is about to do, or has just done."""

    BEGIN = "begin"  # open the transaction's group
    STAGE = "stage"  # start with a layer
    COPY = "copy"  # an own slot's bytes lie in staging
    SENT = "sent"  # a slot's bytes lie where they are sent from, and their header does not
    ARRIVED = "arrived"  # an expert's bytes lie in staging, unverified
    STAGED = "staged"  # report that the layer is there
    HOME = "home"  # copy an expert of a committed layer from staging, where kernels read it, into its slot


class Faults(Protocol):
    def reach(self, point: Point, layer: int, data: Tensor | None, aborted: threading.Event) -> None:
        """May raise, change data, or wait (`aborted` is set when the transaction ends early). Called on: the mover's
        thread. `layer` is -1 where there is none."""
        ...


class NoFaults:
    """Nothing interferes."""

    def reach(self, point: Point, layer: int, data: Tensor | None, aborted: threading.Event) -> None:
        return None
