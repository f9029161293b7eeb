"""The MoE layers of a transformers model, and how their modules' calls are intercepted while a context is open."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trimtab.models.errors import UnsupportedModelError
from trimtab.models.experts_plug import is_experts_module


@dataclass(frozen=True, slots=True)
class ReplayLayer:
    """One MoE layer: `block` is the module that asks a router and calls `experts` with what it chose."""

    layer_id: int
    name: str  # of the experts module, in the model
    block: nn.Module
    experts: nn.Module


def find_layers(model: nn.Module) -> list[ReplayLayer]:
    """All MoE layers, by decoder layer. Raises UnsupportedModelError where experts are not called with indices."""
    found: list[ReplayLayer] = []
    for name, module in model.named_modules():
        if is_experts_module(module):
            number = re.search(r"\.(\d+)\.", name)
            block = model.get_submodule(name.rpartition(".")[0])
            found.append(ReplayLayer(int(number.group(1)) if number else len(found), name, block, module))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts modules of transformers' experts interface: "
            "its routed experts can be neither recorded nor replayed"
        )
    found.sort(key=lambda layer: layer.layer_id)
    for first, second in itertools.pairwise(found):
        if first.layer_id == second.layer_id:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {first.name} and {second.name} share decoder layer {first.layer_id}; "
                "give the text model alone"
            )
    return found


@contextmanager
def intercept(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """While open, `module(...)` is `call(forward, ...)`, with the forward there was before; on this instance only."""
    before = module.__dict__.get("forward")
    forward = module.forward

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return call(forward, *args, **kwargs)

    module.forward = intercepted
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def read_choice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(indices, weights) [T, K] of a call of an experts module: forward(hidden, top_k_index, top_k_weights)."""
    index = args[1] if len(args) > 1 else kwargs["top_k_index"]
    weights = args[2] if len(args) > 2 else kwargs["top_k_weights"]
    return index, weights
