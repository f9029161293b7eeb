"""The experts plug: transformers' experts modules call the MoELayer bound to their module.

The only file that knows the layouts of transformers' experts classes: one tensor per weight, all experts stacked
along the first axis, with flags for transposed, interleaved, ungated and biased forms.
"""

# T tokens  K top-k  E experts  H hidden size  I intermediate size

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trimtab.experts.data.moe_layer import MoELayer
from trimtab.experts.formats.base import Activation, ExpertShape, ExpertTensors, make_activation
from trimtab.models.errors import UnsupportedModelError

IMPLEMENTATION = "trimtab"
_BOUND = "_trimtab_moe_layer"


def bind_moe_layer(module: nn.Module, layer: MoELayer) -> None:
    object.__setattr__(module, _BOUND, layer)


def experts_forward(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H]; the router has chosen already."""
    layer: MoELayer | None = getattr(module, _BOUND, None)
    assert layer is not None, f"no MoE layer was bound to {type(module).__name__}"
    return layer.forward(hidden, top_k_index.to(torch.int64), top_k_weights)


def register() -> None:
    """Puts the function into transformers' registry; harmless when repeated."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def is_experts_module(module: nn.Module) -> bool:
    """True for an instance of a class decorated with transformers' `use_experts_implementation`."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def weight_names(module: Any) -> dict[str, str]:
    """Field of ExpertTensors -> name of the parameter that stacks it over all experts."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"gate_up": first, "down": "down_proj"}
    if module.has_bias:
        names |= {"gate_up_bias": f"{first}_bias", "down_bias": "down_proj_bias"}
    return names


def read_expert_shape(module: Any) -> tuple[int, ExpertShape]:
    """Number of experts and the shape of one, from the parameters' sizes (a module on the meta device will do)."""
    name = type(module).__name__
    if module.has_post_expert_norm:
        raise UnsupportedModelError(f"{name} normalises each expert's output, which is not supported")
    parameters = dict(module.named_parameters())
    expected = set(weight_names(module).values())
    if expected != set(parameters):
        raise UnsupportedModelError(f"{name} has parameters {sorted(parameters)}; only {sorted(expected)} are known")
    first, down = (parameters[weight_names(module)[field]] for field in ("gate_up", "down"))
    if first.dim() != 3 or down.dim() != 3:
        raise UnsupportedModelError(f"{name} does not stack its experts along the first axis of 3-D weights")
    if module.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    num_experts, hidden_size, intermediate_size = down.shape
    factor = 2 if module.has_gate else 1
    if tuple(first.shape) != (num_experts, factor * intermediate_size, hidden_size):
        raise UnsupportedModelError(f"{name} has weights of shapes {tuple(first.shape)} and {tuple(down.shape)}")
    return num_experts, ExpertShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        has_gate=bool(module.has_gate),
        has_bias=bool(module.has_bias),
        activation=read_activation(module),
    )


def read_activation(module: Any) -> Activation:
    """Recognises the formula by its values, not by class names: a kernel may fuse only what it was seen to equal."""
    function = canonical_activation(module)
    pre = torch.linspace(-12.0, 12.0, 2 * 193).reshape(193, 2)
    pre = torch.cat([pre, pre.flip(0)], dim=1) if module.has_gate else pre
    expected = function(pre)
    for candidate in _candidates(module):
        if torch.allclose(candidate.function(pre), expected, rtol=1e-6, atol=1e-6):
            return candidate
    return Activation("custom", function)


def _candidates(module: Any) -> list[Activation]:
    kinds = [make_activation(kind, has_gate=module.has_gate) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2")]
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    if module.has_gate and isinstance(alpha, int | float) and isinstance(limit, int | float):
        kinds.append(make_activation("swiglu_clamped", alpha=float(alpha), limit=float(limit)))
    return kinds


def canonical_activation(module: Any) -> Callable[[Tensor], Tensor]:
    """The module's own activation, taking rows as [gate; up] whatever order the module stores them in."""
    if not module.has_gate:
        return module.act_fn
    if module.is_concatenated:
        return module._apply_gate

    def interleave_then_apply(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return module._apply_gate(torch.stack([gate, up], dim=-1).flatten(-2))

    return interleave_then_apply


def to_canonical(module: Any, tensors: Mapping[str, Tensor]) -> ExpertTensors:
    """One expert in the module's layout, by parameter name and without the expert axis, in canonical layout."""
    found = {field: tensors[name] for field, name in weight_names(module).items()}
    if module.is_transposed:
        found["gate_up"] = found["gate_up"].transpose(0, 1)
        found["down"] = found["down"].transpose(0, 1)
    if module.has_gate and not module.is_concatenated:
        for field in found.keys() & {"gate_up", "gate_up_bias"}:
            found[field] = torch.cat([found[field][0::2], found[field][1::2]])
    return ExpertTensors(**found)
