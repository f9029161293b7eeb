"""Captures which experts a step's tokens chose, in logical ids, for requests that want to know.

Imported only where `enable_return_routed_experts` is on.
"""

# T tokens  L MoE layers  K top-k

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trimtab.experts.routed_experts import RoutedExpertsLayout, get_routed_experts_attn_gid
from trimtab.plan import RoutedRows

if TYPE_CHECKING:
    from trimtab.plan import KVCacheConfig, StepOutput

__all__ = [
    "RoutedExpertsCapturer",
    "RoutedExpertsRecord",
    "bind_routed_experts_capturer",
    "get_routed_experts_attn_gid",
]


@dataclass(frozen=True, slots=True)
class RoutedExpertsRecord:
    """One step's routing on its way to the host. Its tensors are its own: the next step overwrites the capturer's."""

    layout: RoutedExpertsLayout
    experts: Tensor  # the layout's dtype [T, L, K]
    slot_mapping: Tensor  # int64 [T]
    id_range: Tensor  # int32 [2]: the least and the greatest id, seen before the dtype was narrowed
    fault: str | None = None  # why the rows are not to be used

    def to(self, device: str) -> RoutedExpertsRecord:
        """Starts the copies; whoever waits for the step's event may read them."""
        return replace(
            self,
            experts=self.experts.to(device, non_blocking=True),
            slot_mapping=self.slot_mapping.to(device, non_blocking=True),
            id_range=self.id_range.to(device, non_blocking=True),
        )

    def report(self, rows: np.ndarray, output: StepOutput) -> None:
        """Writes the routing to the step's output, or why there is none to each of its request `rows`.

        Called on: the host's copy, when it has arrived.
        """
        lowest, highest = self.id_range.tolist()
        fault = self.fault
        if fault is None and not 0 <= lowest <= highest < self.layout.num_experts:
            fault = f"routed experts: ids from {lowest} to {highest} are not in [0, {self.layout.num_experts - 1}]"
        if fault is None:
            output.routed_experts = RoutedRows(self.experts.numpy(), self.slot_mapping.numpy())
        else:
            output.failures.update(dict.fromkeys(rows.tolist(), fault))


class RoutedExpertsCapturer:
    """One worker's capture.

    1. `bind_routed_experts_capturer` hangs it on every routed layer; each forward overwrites the step's rows.
    2. `get_routed_experts` after the forward, once per step: a copy of them.

    Nothing is cleared between steps. A layer that did not write all of a step's rows, once, is named in the record, so
    that rows of an earlier step cannot pass for this one's. Called on: the runner's thread.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        config: RoutedExpertsLayout,
        kv_cache_config: KVCacheConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.gid = get_routed_experts_attn_gid(kv_cache_config)
        self.layer_ids = config.layer_ids
        self.buffer = torch.empty(
            max_num_batched_tokens, config.num_layers, config.top_k, dtype=torch.int32, device=device
        )
        self._columns: tuple[Tensor, ...] = ()  # [T, K] per layer: views of the buffer for steps of as many tokens
        self._num_tokens = -1
        self._dtype = torch.uint8 if config.dtype.itemsize == 1 else torch.uint16
        self._written: list[int | None] = [None] * config.num_layers  # rows, by each layer, since the last record

    def record(self, ordinal: int, expert_ids: Tensor) -> None:
        """expert_ids [T, K] of MoE layer `ordinal`. Raises IndexError for one that is not in the layout."""
        if not 0 <= ordinal < len(self._written):
            raise IndexError(f"MoE layer {ordinal} is not in [0, {len(self._written) - 1}]")
        num_tokens = expert_ids.shape[0]
        if num_tokens != self._num_tokens:
            self._columns, self._num_tokens = self.buffer[:num_tokens].unbind(1), num_tokens
        self._columns[ordinal].copy_(expert_ids)
        # A second pass through the layer within a step leaves open which of the two a row is: it counts as none.
        self._written[ordinal] = num_tokens if self._written[ordinal] is None else -1

    def get_routed_experts(self, slot_mappings: Mapping[int, Tensor], num_tokens: int) -> RoutedExpertsRecord:
        """The step's rows and where its K/V went, both cloned on the compute stream.

        `slot_mappings` int64 [T] by KV cache group; an idle rank (T = 0) has nothing to get.
        """
        rows = self.buffer[:num_tokens]
        fault = self._find_fault(num_tokens)
        return RoutedExpertsRecord(
            self.config,
            rows.to(self._dtype, copy=True),
            slot_mappings[self.gid].clone(),
            torch.stack(torch.aminmax(rows)),
            fault,
        )

    def _find_fault(self, num_tokens: int) -> str | None:
        written = self._written
        if written.count(num_tokens) == len(written):
            fault = None
        else:
            layers = [layer_id for layer_id, n in zip(self.layer_ids, written, strict=True) if n != num_tokens]
            fault = f"routed experts: layers {layers} did not write each of the step's {num_tokens} rows once"
        self._written = [None] * len(written)
        return fault


class CapturedModel(Protocol):
    """A network of this rank: its own routed layers and no other's (a draft model has a list of its own)."""

    @property
    def moe_layers(self) -> Sequence[Any]: ...


def bind_routed_experts_capturer(model: CapturedModel, capturer: RoutedExpertsCapturer) -> None:
    """From now on every routed layer of the model shows the capturer what its tokens chose. On every rank.

    Raises ValueError for a layer that cannot (no capture of its own, or experts that choose inside their kernel) and
    where not all layers of the capturer's layout are bound; IndexError for a layer that is not in it.
    """
    layers = list(model.moe_layers)
    for layer in layers:
        name = f"layer {getattr(layer, 'layer_id', '?')} ({type(layer).__name__})"
        if not hasattr(layer, "capture"):
            raise ValueError(
                f"enable_return_routed_experts: {name} shows nobody which experts its tokens chose; switch it off"
            )
        kernel = getattr(layer, "kernel", None)
        if getattr(kernel, "routes_inside", False):
            raise ValueError(
                f"enable_return_routed_experts: the kernel of {name}, {type(kernel).__name__}, chooses experts itself "
                "and bypasses capture; switch it off or take another kernel"
            )
        if not 0 <= layer.ordinal < len(capturer.layer_ids):
            raise IndexError(f"{name} is MoE layer {layer.ordinal}, not in [0, {len(capturer.layer_ids) - 1}]")
        found, expected = (layer.layer_id, layer.top_k), (capturer.layer_ids[layer.ordinal], capturer.config.top_k)
        assert found == expected, f"{name}: (layer, experts per token) {found} is bound to columns of {expected}"
    missing = sorted(set(range(len(capturer.layer_ids))) - {layer.ordinal for layer in layers})
    if missing or not layers:
        raise ValueError(f"enable_return_routed_experts: no layer is bound for MoE layers {missing}; switch it off")
    for layer in layers:
        layer.capture = capturer
