"""Tiny transformers networks, and routes captured from them with a plain hook: the unit under test takes no part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.models.experts_plug import is_experts_module
from trimtab.replay import RoutedModel, Routes
from trimtab.testing.checkpoints import make_tiny_network, tiny_config


def make_network(family: str, **overrides: Any) -> Any:
    """fp32, eager, trainable, in eval mode."""
    network = make_tiny_network(tiny_config(family, **overrides), seed=4)
    for name, tensor in network.named_parameters():
        if "moe_statics" in name:  # a bias this large would choose the same experts for all tokens
            tensor *= 0.1
    return network.requires_grad_(True)


def random_ids(*lengths: int, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, (length,), generator=generator) for length in lengths]


def experts_modules(network: Any) -> list[tuple[int, Any]]:
    """(decoder layer, module)"""
    return [
        (int(name.split("layers.")[1].split(".")[0]), module)
        for name, module in network.named_modules()
        if is_experts_module(module)
    ]


@torch.no_grad()
def choices(network: Any, ids: Tensor) -> np.ndarray:
    """[S, L, K]: what the network's own routers choose for one sequence."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
        for _, module in experts_modules(network)
    ]
    network(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).numpy()


def routed_model(network: Any) -> RoutedModel:
    layers = experts_modules(network)
    return RoutedModel(
        model="tiny",
        architecture=type(network).__name__,
        num_experts=layers[0][1].num_experts,
        top_k=choices(network, torch.tensor([1, 2])).shape[2],
        layer_ids=tuple(layer_id for layer_id, _ in layers),
        num_hidden_layers=network.config.num_hidden_layers,
    )


def routes_for(network: Any, ids: Tensor, experts: np.ndarray | None = None, **fields: Any) -> Routes:
    """S - 1 rows, as an engine captures them: of the network's own choice, or of `experts`."""
    experts = choices(network, ids)[:-1] if experts is None else experts
    fields = {"num_prompt_tokens": min(3, len(ids)), **fields}
    return Routes(routed_model(network), experts, ids.numpy(), **fields)


def other_choices(network: Any, ids: Tensor) -> np.ndarray:
    """[S - 1, L, K]: for every token what another token chose, which the architecture can choose but did not."""
    own = choices(network, ids)[:-1]
    other = np.roll(own, 1, axis=0)
    assert (np.sort(own) != np.sort(other)).any(axis=2).mean() > 0.5, "too few rows differ to prove anything"
    return other
