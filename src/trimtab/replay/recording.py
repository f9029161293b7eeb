"""Which experts a transformers model chooses, seen where its experts modules are called."""

# T tokens  L MoE layers  K top-k

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.replay.layers import ReplayLayer, find_layers, intercept, read_choice


class Recording:
    """The choices of the latest forward."""

    def __init__(self, layers: list[ReplayLayer]) -> None:
        self.layer_ids = tuple(layer.layer_id for layer in layers)
        self._seen: dict[int, Tensor] = {}

    @property
    def experts(self) -> np.ndarray:
        """int64 [T, L, K], T being batch x sequence, padding included. Raises ValueError before a whole forward."""
        missing = [layer_id for layer_id in self.layer_ids if layer_id not in self._seen]
        if missing:
            raise ValueError(f"layers {missing} have not run yet; call the model inside record_routed_experts")
        return torch.stack([self._seen[layer_id] for layer_id in self.layer_ids], dim=1).cpu().numpy()

    def see(self, layer: ReplayLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        index, _ = read_choice(args, kwargs)
        self._seen[layer.layer_id] = index.detach().to(torch.int64)
        return forward(*args, **kwargs)


@contextmanager
def record_routed_experts(model: nn.Module) -> Iterator[Recording]:
    """Records the experts that `model`'s layers are given, whoever chose them: its router, or a replay.

    Works for every architecture whose experts modules use transformers' experts interface. State hangs on the modules
    of this instance alone.
    """
    layers = find_layers(model)
    recording = Recording(layers)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(intercept(layer.experts, partial(recording.see, layer)))
        yield recording
