"""What a model folder holds and asks for, learnt without reading a weight: the answer of every start-up question."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trimtab.experts.data.kernels.native import native_refusal
from trimtab.experts.formats.registry import find_format
from trimtab.models import network as networks
from trimtab.models import probe
from trimtab.models.checkpoint import Checkpoint
from trimtab.models.errors import CheckpointError, UnsupportedModelError
from trimtab.models.network import build_network, parameter_dtypes, read_config
from trimtab.models.probe import AttentionSpec, MoESpec, Probe, probe_network
from trimtab.models.weight_map import map_weights

__all__ = ["AttentionSpec", "CheckpointError", "MoESpec", "ModelSpec", "UnsupportedModelError", "read_spec"]

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("int8",)
# How a router chooses, where a family's configuration has a say in it.
ROUTING_KEYS = ("norm_topk_prob", "scoring_func", "topk_method", "routed_scaling_factor", "n_group", "topk_group")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    path: Path
    architecture: str
    hf_config: PreTrainedConfig
    dtype: torch.dtype
    num_layers: int
    vocab_size: int
    hidden_size: int
    max_position: int  # longest context, prompt and answer together
    attention_layers: tuple[AttentionSpec, ...]
    moe_layers: tuple[MoESpec, ...]  # by ordinal
    tied: bool  # the output head is the embedding
    num_parameters: int
    num_active_parameters: int  # of those, how many one token passes through
    num_dense_bytes: int  # of the weights outside the experts, as loaded
    quantization: str | None = None  # the format experts are stored in; None: in dtype
    plain_linears: frozenset[str] = frozenset()  # linear layers whose weight the network itself reads: not packed

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as loaded by one rank that holds every expert once."""
        return self.num_dense_bytes + self.num_expert_bytes

    @property
    def num_expert_bytes(self) -> int:
        """The experts' part of `num_bytes`, in their storage format."""
        stored = find_format(self.quantization or self.dtype)
        return sum(
            layer.num_experts * math.prod(tensor.shape) * tensor.dtype.itemsize
            for layer in self.moe_layers
            for tensor in stored.specs(layer.shape).values()
        )

    @property
    def routing(self) -> dict[str, Any]:
        """The configuration's values of ROUTING_KEYS: the checkpoint's where it gives one, else the family's defaults
        (B84). What is missing is no choice of this family: its code knows one way."""
        config = self.hf_config
        return {key: getattr(config, key) for key in ROUTING_KEYS if getattr(config, key, None) is not None}


def read_spec(path: str | Path, dtype: str = "auto", quantization: str | None = None) -> ModelSpec:
    """Reads config.json and the safetensors headers and probes the network on the meta device.

    `quantization` names the format to store experts in ("int8"), made from the checkpoint's weights while loading.
    Raises UnsupportedModelError (with the model's name and the reason) for what cannot be run correctly,
    CheckpointError (with the tensor or file) for what is damaged, both ValueErrors.
    """
    path = Path(path)
    config = read_config(path)
    name = networks.network_class(config).__name__
    found_dtype = _choose_dtype(config, dtype)
    trial, probed = probe_config(config, found_dtype)
    checkpoint = Checkpoint.open(path)
    weights = map_weights(trial, checkpoint)
    if dtype == "auto" and getattr(config, "dtype", None) is None:
        found_dtype = _stored_dtype(checkpoint)
    _check_quantization(quantization, probed.moe_layers)
    sizes = _sizes(trial, found_dtype, set(weights.tied))
    experts = sum(layer.num_experts * layer.shape.num_parameters for layer in probed.moe_layers)
    inactive = sum((layer.num_experts - layer.top_k) * layer.shape.num_parameters for layer in probed.moe_layers)
    text = config.get_text_config()
    return ModelSpec(
        path=path,
        architecture=name,
        hf_config=config,
        dtype=found_dtype,
        num_layers=int(text.num_hidden_layers),
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        max_position=networks.last_position_limit(config),
        attention_layers=tuple(probed.attention_layers),
        moe_layers=tuple(probed.moe_layers),
        tied=bool(trial.all_tied_weights_keys),
        num_parameters=sizes[0],
        num_active_parameters=sizes[0] - inactive,
        num_dense_bytes=sizes[1] - experts * found_dtype.itemsize,
        quantization=quantization,
        plain_linears=frozenset(probed.plain_linears),
    )


def probe_config(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Probe]:
    """The network on the meta device and what a forward of it calls. Raises UnsupportedModelError."""
    probe.register()
    name = networks.network_class(config).__name__
    try:
        trial = build_network(config, dtype, probe.IMPLEMENTATION)
    except Exception as error:  # a network's constructor fails in its own way on values that do not fit together
        raise CheckpointError(f"the configuration does not make a {name}: {type(error).__name__}: {error}") from error
    return trial, probe_network(trial, name)


def _check_quantization(quantization: str | None, moe_layers: Sequence[MoESpec]) -> None:
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization ({quantization!r}) must be one of {', '.join(QUANTIZATIONS)}, or left out")
    for layer in moe_layers:
        if (refusal := native_refusal(layer.shape, quantization)) is not None:
            raise ValueError(
                f"quantization ({quantization!r}) cannot store {layer.module_name}: {refusal}; leave it out"
            )


def _choose_dtype(config: PreTrainedConfig, dtype: str) -> torch.dtype:
    if dtype == "auto":
        named = getattr(config, "dtype", None) or torch.float32
        found = getattr(torch, named) if isinstance(named, str) else named
        return found if found in DTYPES.values() else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be 'auto' or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype most bytes are stored in."""
    counts: Counter[torch.dtype] = Counter()
    for stored in checkpoint.tensors.values():
        if stored.dtype in DTYPES.values():
            counts[stored.dtype] += stored.end - stored.start
    return counts.most_common(1)[0][0] if counts else torch.float32


def _sizes(trial: PreTrainedModel, dtype: torch.dtype, tied: set[str]) -> tuple[int, int]:
    """Number of parameters and their bytes once loaded; what is tied counts once."""
    dtypes = parameter_dtypes(trial, dtype)
    parameters = {name: tensor for name, tensor in trial.state_dict().items() if name not in tied}
    count = sum(tensor.numel() for tensor in parameters.values())
    size = sum(tensor.numel() * dtypes.get(name, tensor.dtype).itemsize for name, tensor in parameters.items())
    return count, size
