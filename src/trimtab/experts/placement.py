"""Which expert lives in which slot: the one truth every lookup and replica count is derived from. No torch here."""

# L MoE layers  E experts  P slots  S slots/rank

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Topology:
    """How many experts, spare slots and ranks there are. Rank r owns slots [r * S, (r + 1) * S)."""

    num_experts: int
    num_redundant: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        for name, low in (("num_experts", 1), ("num_redundant", 0), ("num_ranks", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {low}; raise it")
        if self.num_slots % self.num_ranks:
            nearest = -(-self.num_slots // self.num_ranks) * self.num_ranks - self.num_experts
            raise ValueError(
                f"num_slots ({self.num_slots} = {self.num_experts} experts + {self.num_redundant} redundant) must be "
                f"a multiple of num_ranks ({self.num_ranks}); try num_redundant_experts={nearest}"
            )

    @property
    def num_slots(self) -> int:
        return self.num_experts + self.num_redundant

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def slots_of(self, rank: int) -> range:
        return range(rank * self.slots_per_rank, (rank + 1) * self.slots_per_rank)

    def rank_of(self, slot: int) -> int:
        return slot // self.slots_per_rank


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """slot_to_expert [L, P] and an integer share of its expert's tokens per slot [L, P]; read-only once built."""

    topology: Topology
    slot_to_expert: IntArray
    shares: IntArray

    def __init__(self, topology: Topology, slot_to_expert: npt.ArrayLike, shares: npt.ArrayLike | None = None) -> None:
        slots = np.array(slot_to_expert)
        weights = np.ones(slots.shape, dtype=np.int64) if shares is None else np.array(shares)
        _check(topology, slots, weights)
        object.__setattr__(self, "topology", topology)
        for name, array in (("slot_to_expert", slots), ("shares", weights)):
            array = array.astype(np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def identity(cls, topology: Topology, num_layers: int) -> Placement:
        """Expert e in slot e; redundant slots hold experts 0, 1, ... again."""
        row = np.arange(topology.num_slots) % topology.num_experts
        return cls(topology, np.tile(row, (num_layers, 1)))

    @classmethod
    def initial(cls, topology: Topology, num_layers: int) -> Placement:
        """Experts in their order over the ranks, and the redundant slots spread over all of them: each holds an expert
        of another rank, the least replicated ones first. Without redundant slots the same as `identity`."""
        num_experts, num_ranks, slots_per_rank = topology.num_experts, topology.num_ranks, topology.slots_per_rank
        bounds = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
        counts = [1] * num_experts
        row: list[int] = []
        for rank in range(num_ranks):
            held = list(range(bounds[rank], bounds[rank + 1]))
            # From the next rank's experts on, so that neighbours do not all replicate the same ones.
            order = [(bounds[rank + 1] + step) % num_experts for step in range(num_experts)]
            while len(held) < slots_per_rank:
                fewest = min(order, key=lambda expert: (expert in held, counts[expert]))
                counts[fewest] += 1
                held.append(fewest)
            row += held
        return cls(topology, np.tile(row, (num_layers, 1)))

    def with_layer(self, layer: int, other: Placement) -> Placement:
        """This placement with one layer as in `other`, of the same topology and depth."""
        assert self.topology == other.topology and self.num_layers == other.num_layers, "placements of two models"
        mixed = object.__new__(Placement)  # both halves were checked when they were built
        object.__setattr__(mixed, "topology", self.topology)
        for name in ("slot_to_expert", "shares"):
            array = getattr(self, name).copy()
            array[layer] = getattr(other, name)[layer]
            array.setflags(write=False)
            object.__setattr__(mixed, name, array)
        return mixed

    @property
    def num_layers(self) -> int:
        return int(self.slot_to_expert.shape[0])

    def is_identity(self, layer: int) -> bool:
        """Every expert has exactly the slot of its own number."""
        return self.topology.num_redundant == 0 and bool(
            np.array_equal(self.slot_to_expert[layer], np.arange(self.topology.num_experts))
        )

    def slots_of_expert(self, layer: int, expert: int) -> tuple[int, ...]:
        """Slots holding the expert, ascending."""
        return tuple(int(slot) for slot in np.flatnonzero(self.slot_to_expert[layer] == expert))

    def expert_to_slots(self, layer: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.slots_of_expert(layer, expert) for expert in range(self.topology.num_experts))

    def replica_counts(self) -> IntArray:
        """[L, E]: how many slots hold each expert."""
        experts = self.topology.num_experts
        return np.stack([np.bincount(row, minlength=experts) for row in self.slot_to_expert]).astype(np.int64)

    def digest(self) -> str:
        """Equal exactly when topology, slots and shares are equal; the same on every machine."""
        sha = hashlib.sha256()
        topology = self.topology
        sha.update(repr((topology.num_experts, topology.num_redundant, topology.num_ranks)).encode())
        sha.update(repr(self.slot_to_expert.shape).encode())
        for array in (self.slot_to_expert, self.shares):
            sha.update(array.astype("<i8").tobytes())
        return sha.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


def _check(topology: Topology, slots: npt.NDArray[Any], shares: npt.NDArray[Any]) -> None:
    for name, array in (("slot_to_expert", slots), ("shares", shares)):
        if array.ndim != 2 or array.shape[1] != topology.num_slots or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"{name} ({array.dtype} {array.shape}) must be integers [num_layers, {topology.num_slots}]; "
                "give every layer one entry per slot"
            )
    if slots.shape != shares.shape:
        raise ValueError(f"shares {shares.shape} must have the shape of slot_to_expert {slots.shape}; one per slot")
    outside = np.argwhere((slots < 0) | (slots >= topology.num_experts))
    if outside.size:
        layer, slot = outside[0]
        raise ValueError(
            f"slot_to_expert[{layer}, {slot}] ({slots[layer, slot]}) must be in [0, {topology.num_experts}); "
            "name an expert of the layer"
        )
    low = np.argwhere(shares < 1)
    if low.size:
        layer, slot = low[0]
        raise ValueError(f"shares[{layer}, {slot}] ({shares[layer, slot]}) must be at least 1; every replica serves")
    is_placed = np.zeros((len(slots), topology.num_experts), dtype=bool)
    is_placed[np.arange(len(slots))[:, None], slots] = True
    if not is_placed.all():
        layer = int(is_placed.all(axis=1).argmin())
        missing = np.flatnonzero(~is_placed[layer])
        raise ValueError(
            f"layer {layer} has no slot for expert {missing[0]} ({missing.size} missing); give each expert a slot"
        )
