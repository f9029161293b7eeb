"""A loaded network as the runner sees it: a packed batch of tokens in, logits of chosen rows out."""

# T tokens of all sequences of a step, one after another  R rows whose logits are wanted  V vocabulary

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trimtab.experts.data.moe_layer import MoELayer
from trimtab.models.attention_plug import AttentionLayer, bind_attention
from trimtab.models.spec import ModelSpec


class LanguageModel:
    """1. `load_model` builds it. 2. `bind_attention` gives each attention layer its K/V. 3. `forward`, again and again.

    Called on: one thread at a time. Everything it needs hangs on its own modules, so several can live in one process.
    """

    def __init__(
        self,
        spec: ModelSpec,
        network: PreTrainedModel,
        moe_layers: list[MoELayer],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.moe_layers = moe_layers
        self.tied = dict(tied or {})  # parameter -> the one whose memory it shares
        self._network = network

    @property
    def network(self) -> PreTrainedModel:
        """For whoever writes weights; a forward goes through `forward`."""
        return self._network

    def bind_attention(self, layers: Mapping[int, AttentionLayer]) -> None:
        """`layers` by layer_id; must name every attention layer of the spec, may be called again."""
        expected = {layer.layer_id for layer in self.spec.attention_layers}
        assert set(layers) == expected, f"attention layers {sorted(layers)} given, {sorted(expected)} wanted"
        for layer in self.spec.attention_layers:
            bind_attention(self._network.get_submodule(layer.module_name), layers[layer.layer_id])

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """token_ids [T] int64, positions [T] int64 (within each sequence), logits_rows [R] int64 -> [R, V].

        The bound attention layers know which tokens belong together; the network sees one row of T tokens.
        """
        output = self._network(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_rows,
        )
        logits: Tensor = output.logits
        return logits[0]

    __call__ = forward

    @torch.inference_mode()
    def forward_idle(self) -> None:
        """A step in which other ranks have tokens and this one has none: the MoE layers' exchanges, in layer order.

        No token runs through the network: a fake one would need a KV cache, and count as load.
        """
        for layer in self.moe_layers:
            layer.forward_idle()
