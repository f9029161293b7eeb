"""How many tokens each expert got over a window of steps. No torch here."""

# L MoE layers  E experts

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """`counts` int64 [L, E]: token-expert pairs, over all ranks and `num_steps` global steps; read-only.

    Steps in which nothing was recorded count as steps without load. Raises ValueError for counts below 0 or of another
    shape or type.
    """

    counts: npt.NDArray[np.int64]
    num_steps: int

    def __post_init__(self) -> None:
        counts = np.array(self.counts)
        if counts.ndim != 2 or not np.issubdtype(counts.dtype, np.integer):
            raise ValueError(f"counts ({counts.dtype} {counts.shape}) must be integers [num_layers, num_experts]")
        if counts.size and counts.min() < 0:
            raise ValueError(f"counts ({counts.min()}) must be at least 0; a load is a number of tokens")
        counts = counts.astype(np.int64)
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)

    @property
    def num_pairs(self) -> int:
        """Token-expert pairs in all: tokens x top-k x MoE layers."""
        return int(self.counts.sum())
