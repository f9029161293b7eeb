"""Gating weights and experts of each family written down by hand: what a forced choice must give."""

# T tokens  K top-k  E experts  H hidden size  I intermediate size

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WeightRule = Callable[[Any, Any, Tensor, Tensor], Tensor]  # (block, config, hidden [T, H], chosen [T, K]) -> [T, K]


def softmax_then_renormalise(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    scores = F.linear(hidden, block.gate.weight).softmax(dim=-1).gather(1, chosen)
    return scores / scores.sum(dim=-1, keepdim=True)


def softmax_over_all(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    return F.linear(hidden, block.gate.weight).softmax(dim=-1).gather(1, chosen)


def softmax_over_chosen(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    router = block.router
    return F.linear(hidden, router.weight, getattr(router, "bias", None)).gather(1, chosen).softmax(dim=-1)


def softmax_scaled(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    return softmax_over_all(block, config, hidden, chosen) * config.routed_scaling_factor


def softmax_with_smallest_sum(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    scores = softmax_over_all(block, config, hidden, chosen)
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=config.moe_norm_min)


def sigmoid_renormalised_and_scaled(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """The correction bias takes part in the choice alone."""
    scores = F.linear(hidden, block.gate.weight).sigmoid().gather(1, chosen)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) * getattr(config, "routed_scaling_factor", 1.0)


def through_an_inner_linear(block: Any, config: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    scores = block.gate.wg(hidden).softmax(dim=-1).gather(1, chosen)
    return scores / scores.sum(dim=-1, keepdim=True)


# Family -> how its weights follow from the choice, and settings that make every part of the rule count.
FAMILIES: dict[str, tuple[WeightRule, dict[str, Any]]] = {
    "mixtral": (softmax_then_renormalise, {}),
    "qwen3_moe": (softmax_then_renormalise, {"norm_topk_prob": True}),
    "gpt_oss": (softmax_over_chosen, {}),
    "deepseek_v3": (sigmoid_renormalised_and_scaled, {"routed_scaling_factor": 2.5}),
    "olmoe": (softmax_over_all, {"norm_topk_prob": False}),
    "glm4_moe": (sigmoid_renormalised_and_scaled, {"routed_scaling_factor": 1.5}),
    "granitemoe": (softmax_over_chosen, {}),
    "ernie4_5_moe": (softmax_with_smallest_sum, {"moe_norm_min": 0.4, "moe_num_experts": 8, "moe_k": 2}),
    "minimax_m2": (sigmoid_renormalised_and_scaled, {}),
    "hunyuan_v1_moe": (through_an_inner_linear, {"moe_topk": 2}),
    "deepseek_v2": (softmax_scaled, {"routed_scaling_factor": 1.7, "topk_method": "greedy"}),
}
# The router takes its weights from scores whose other groups are masked to 0.
GROUP_LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}


def run_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, H]: every expert of every token, one after the other."""
    rows = []
    for token in range(len(hidden)):
        row = torch.zeros_like(hidden[token])
        for place in range(chosen.shape[1]):
            row = row + weights[token, place] * _expert(experts, int(chosen[token, place]), hidden[token])
        rows.append(row)
    return torch.stack(rows)


def _expert(experts: Any, number: int, hidden: Tensor) -> Tensor:
    if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss: interleaved, transposed, clamped
        both = hidden @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
        gate, up = both[::2].clamp(max=experts.limit), both[1::2].clamp(-experts.limit, experts.limit)
        inner = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
        return inner @ experts.down_proj[number] + experts.down_proj_bias[number]
    gate, up = (experts.gate_up_proj[number] @ hidden).chunk(2)
    return experts.down_proj[number] @ (F.silu(gate) * up)
