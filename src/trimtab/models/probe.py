"""A forward on the meta device that tells what a network asks of its attention and experts, before weights are read."""

# T tokens  Hq query heads  Hkv key/value heads  D head size  E experts  K top-k

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trimtab.experts.formats.base import ExpertShape
from trimtab.models.attention_plug import MaskTag, make_mask_tag, refuse_unknown_keywords, window_of
from trimtab.models.errors import UnsupportedModelError
from trimtab.models.experts_plug import is_experts_module, read_expert_shape

IMPLEMENTATION = "trimtab_probe"
_BOUND = "_trimtab_probe"
_NUM_TOKENS = 6


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer as its KV cache must serve it."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    has_sinks: bool
    softcap: float | None
    module_name: str = ""  # in the network


@dataclass(frozen=True, slots=True)
class MoESpec:
    """One MoE layer: the `ordinal`-th in the order of the forward, sitting in decoder layer `layer_id`."""

    ordinal: int
    layer_id: int
    num_experts: int
    top_k: int
    shape: ExpertShape
    module_name: str = ""  # in the network


@dataclass(slots=True)
class Probe:
    """What one forward was seen to call, in order."""

    names: dict[int, str]  # id of a module -> its name in the network
    attention_layers: list[AttentionSpec] = field(default_factory=list)
    moe_layers: list[MoESpec] = field(default_factory=list)
    checked_masks: list[MaskTag] = field(default_factory=list)
    plain_linears: set[str] = field(default_factory=set)  # linear layers whose weight the network itself reads

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskTag | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        name = self.names[id(module)]
        refuse_unknown_keywords(module, kwargs)
        window = window_of(module, attention_mask)
        assert attention_mask is not None
        if not any(attention_mask is mask for mask in self.checked_masks):  # layers share a few masks
            _refuse_other_masks(name, attention_mask)
            self.checked_masks.append(attention_mask)
        if is_causal is False or not getattr(module, "is_causal", True):
            raise UnsupportedModelError(f"{name} is not causal")
        if query.shape[0] != 1 or query.shape[2] != _NUM_TOKENS or key.shape[2] != _NUM_TOKENS:
            raise UnsupportedModelError(
                f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}: not one key per token"
            )
        if any(layer.module_name == name for layer in self.attention_layers):
            raise UnsupportedModelError(f"{name} is called more than once in a forward")
        self.attention_layers.append(
            AttentionSpec(
                layer_id=int(getattr(module, "layer_idx", len(self.attention_layers))),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_size=key.shape[3],
                value_size=value.shape[3],
                window=window,
                has_sinks=s_aux is not None,
                softcap=softcap,
                module_name=name,
            )
        )
        return query.new_empty(1, _NUM_TOKENS, query.shape[1], value.shape[3]), None

    def experts(self, module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        name = self.names[id(module)]
        if hidden.dim() != 2 or hidden.shape[0] != _NUM_TOKENS:
            raise UnsupportedModelError(f"{name} is given {tuple(hidden.shape)}, not one row per token")
        if top_k_index.dim() != 2 or top_k_index.is_floating_point() or top_k_weights.shape != top_k_index.shape:
            raise UnsupportedModelError(f"{name} is called without the indices of the chosen experts")
        if any(layer.module_name == name for layer in self.moe_layers):
            raise UnsupportedModelError(f"{name} is called more than once in a forward")
        num_experts, shape = read_expert_shape(module)
        top_k = top_k_index.shape[1]
        if not 1 <= top_k <= num_experts:
            raise UnsupportedModelError(f"{name} chooses {top_k} of {num_experts} experts; check num_experts_per_tok")
        ordinal = len(self.moe_layers)
        self.moe_layers.append(MoESpec(ordinal, _layer_id(name, ordinal), num_experts, top_k, shape, name))
        return torch.empty_like(hidden)


def probe_network(network: PreTrainedModel, name: str) -> Probe:
    """Runs `network` (on the meta device, built with this module's IMPLEMENTATION). Raises UnsupportedModelError."""
    probe = Probe({id(module): module_name for module_name, module in network.named_modules()})
    _refuse_convolutions(network, name)
    for module in network.modules():
        object.__setattr__(module, _BOUND, probe)
        if type(module) is nn.Linear:
            object.__setattr__(module, "__class__", _WatchedLinear)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    rows = torch.arange(2, device="meta")
    try:
        with torch.no_grad(), _YesMode():
            output = network(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=rows)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} is not supported: {error}") from error
    except Exception as error:  # whatever a network does that a packed batch without a cache cannot serve
        reason = str(error).strip().split("\n")[0]
        if MaskTag.__name__ in reason:
            reason = "it computes with its mask, as sparse-attention indexers do"
        if "k not in range" in reason:
            reason = "its router chooses more experts than there are; check num_experts_per_tok"
        raise UnsupportedModelError(f"{name} is not supported: a trial forward failed ({reason})") from error
    finally:
        for module in network.modules():
            object.__delattr__(module, _BOUND)
            if type(module) is _WatchedLinear:
                object.__setattr__(module, "__class__", nn.Linear)
    _check(probe, network, name, output.logits)
    return probe


def _check(probe: Probe, network: PreTrainedModel, name: str, logits: Tensor) -> None:
    if not probe.moe_layers:
        raise UnsupportedModelError(f"{name} is not a Mixture-of-Experts model: no experts were called")
    uncalled = [
        module_name
        for module_name, module in network.named_modules()
        if is_experts_module(module) and module_name not in {layer.module_name for layer in probe.moe_layers}
    ]
    if uncalled:
        raise UnsupportedModelError(f"{name} is not supported: {uncalled[0]} is not called through the experts plug")
    ids = [layer.layer_id for layer in probe.attention_layers]
    if len(set(ids)) != len(ids):
        raise UnsupportedModelError(f"{name} is not supported: two attention layers share one layer number")
    layers = network.config.get_text_config().num_hidden_layers
    if len(ids) < layers:
        raise UnsupportedModelError(
            f"{name} is not supported: {layers - len(ids)} of {layers} layers are not attention "
            "(linear-attention or state layers)"
        )
    if logits.dim() != 3 or logits.shape[1] != 2:
        raise UnsupportedModelError(f"{name} is not supported: its logits cannot be had for chosen rows alone")


def _refuse_convolutions(network: PreTrainedModel, name: str) -> None:
    """Layers that mix neighbouring tokens would mix the sequences of a packed batch and need a state per request."""
    for module_name, module in network.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.RNNBase):
            raise UnsupportedModelError(f"{name} is not supported: {module_name} mixes tokens outside of attention")


def _refuse_other_masks(name: str, mask: MaskTag) -> None:
    """Asks transformers' predicate about positions around the window's edge: it must be causal and nothing else."""
    if mask.custom:
        raise UnsupportedModelError(f"{name} uses a mask of its own beside causal and sliding ones")
    window = mask.window or 1 << 20
    edge = min(window, 4096)
    zero = torch.tensor(0)
    for query in sorted({0, 1, edge - 1, edge, edge + 1, 2 * edge + 1, 3 * edge + 2}):
        for key in sorted({0, 1, query - edge - 1, query - edge, query - edge + 1, query - 1, query, query + 1}):
            if key < 0:
                continue
            expected = query - window < key <= query
            with torch.device("cpu"):
                allowed = mask.allowed(zero, zero, torch.tensor(query), torch.tensor(key))
            if bool(allowed) != expected:
                raise UnsupportedModelError(f"{name} uses a mask that is neither causal nor a causal sliding window")


def _layer_id(module_name: str, ordinal: int) -> int:
    found = re.search(r"\.(\d+)\.", module_name)
    return int(found.group(1)) if found else ordinal


class _WatchedLinear(nn.Linear):
    """Notes when anything but its own forward reads its weight: such a layer cannot be packed."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        return nn.functional.linear(x, weight, self._parameters["bias"])

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            probe: Probe = self.__dict__[_BOUND]
            probe.plain_linears.add(probe.names[id(self)])
        return super().__getattr__(name)


class _YesMode(TorchDispatchMode):
    """Answers 1 where a network reads a number from a meta tensor. Questions asked in a packed forward are of the
    kind 'is this batch plain?'; a wrong answer can only change which masks the probe looks at."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


def _probed_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return getattr(module, _BOUND).attention(module, *args, **kwargs)


def _probed_experts(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return getattr(module, _BOUND).experts(module, *args, **kwargs)


def register() -> None:
    """Puts the probe's functions into transformers' registries; harmless when repeated."""
    AttentionInterface.register(IMPLEMENTATION, _probed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, make_mask_tag)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _probed_experts)
