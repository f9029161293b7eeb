"""The load of one rank's tokens: counted per slot while they are looked up, folded to experts when it is asked for.

Each pair of a token and a slot is counted once over all ranks: by the rank that owns the token, before anything is
dispatched. Imported only where experts are balanced; else a layer looks up and nothing counts.
"""

# T tokens  K top-k  L MoE layers  E experts  P slots

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trimtab.experts.data.dispatch.base import RankPlace
from trimtab.experts.data.map_and_record import NativeLookUp, map_and_record
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.placement import IntArray, Placement
from trimtab.kernels.native.library import native_kernels


class RecordedLayer(Protocol):
    """A layer whose look-up can be exchanged for one that counts."""

    routing_table: RoutingTable
    look_up: Callable[[Tensor], Tensor]


class SlotLoadRecorder:
    """Counts, in slot ids, the pairs of the tokens that this rank owns.

    1. `attach` once: the layers look up and count in one act from then on. 2. `begin_step` before each forward.
    3. `fold` under the placement that was in force since the last fold: before a layer's placement changes, and when
    the load is reported. Nothing counts before the first step: a forward that only warms up is no load (B26).

    Called on: the runner's thread. All tensors keep their identity, also inside a traced network.
    """

    def __init__(self, placement: Placement, place: RankPlace, device: torch.device | str = "cpu") -> None:
        num_layers, num_slots = placement.slot_to_expert.shape
        self.place = place
        self.counts = torch.zeros(num_layers, num_slots, dtype=torch.int64, device=device)
        self.counted = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_position = torch.zeros(1, dtype=torch.int64, device=device)

    def attach(self, layers: Sequence[RecordedLayer], *, traced: bool = False) -> None:
        """`layers` by ordinal. `traced`: their forward will be traced or compiled, and gets the registered operation,
        which a graph can hold; else, on a CPU with a native core, they call that core at once."""
        assert len(layers) == len(self.counts), f"{len(layers)} layers given, {len(self.counts)} have a placement"
        core = None if traced or self.counts.device.type != "cpu" else native_kernels().core
        for layer, counts in zip(layers, self.counts.unbind(), strict=True):
            slots = layer.routing_table.slots
            if core is None:
                layer.look_up = TracedLookUp(slots, counts, self)
            else:
                look_up = NativeLookUp(core, slots, self.first_position, counts, self.counted)
                layer.look_up = RecordingLookUp(look_up, self.place)

    def begin_step(self, counted: bool) -> None:
        """Whether the forward that follows is counted. All ranks, each forward: ranks that share tokens must start at
        the same replica, one further with every step, so that a single token's replicas take turns as well."""
        self.counted.fill_(counted)
        self.first_position.add_(1)

    def fold(self, placement: Placement) -> IntArray:
        """int64 [L, E]: pairs counted since the last fold, by the experts that were in the slots; counting starts anew.

        Waits for the device.
        """
        counts = self.counts.cpu().numpy()
        folded = np.zeros((placement.num_layers, placement.topology.num_experts), dtype=np.int64)
        layers = np.arange(placement.num_layers)[:, None]
        np.add.at(folded, (layers, placement.slot_to_expert), counts)
        self.counts.zero_()
        return folded


class RecordingLookUp:
    """One layer's `look_up`: expert_ids [T, K] -> slot ids [T, K], counted on the way."""

    __slots__ = ("_look_up", "_member", "_num_sharing")

    def __init__(self, look_up: NativeLookUp, place: RankPlace) -> None:
        self._look_up = look_up
        self._member, self._num_sharing = place.rank % place.num_sharing, place.num_sharing

    def __call__(self, expert_ids: Tensor) -> Tensor:
        # As RankPlace.share, written out: a slice and two calls more are a tenth of this.
        num_tokens, member, num_sharing = len(expert_ids), self._member, self._num_sharing
        return self._look_up(expert_ids, num_tokens * member // num_sharing, num_tokens * (member + 1) // num_sharing)


class TracedLookUp:
    """The same by the registered operation, for networks that are traced or compiled, and for other devices."""

    def __init__(self, slots: Tensor, counts: Tensor, recorder: SlotLoadRecorder) -> None:
        self._slots = slots
        self._counts = counts
        self._place = recorder.place
        self._first_position = recorder.first_position
        self._counted = recorder.counted

    def __call__(self, expert_ids: Tensor) -> Tensor:
        owned = self._place.share(expert_ids.shape[0], self._place.rank)
        slot_ids: Tensor = map_and_record(
            expert_ids, self._slots, self._first_position, self._counts, self._counted, owned.start, owned.stop
        )
        return slot_ids
