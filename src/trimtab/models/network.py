"""From config.json to transformers' network on the meta device: which class, which implementations, no weights."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from trimtab.models import attention_plug, experts_plug
from trimtab.models.errors import CheckpointError, UnsupportedModelError

CONFIG_FILE = "config.json"
_building = threading.Lock()
_LAYER_KINDS = ("full_attention", "sliding_attention")

# Families that a trial forward on the meta device cannot tell from a supported one (see `trimtab.models.sweep`).
REFUSED: dict[str, str] = {}


def read_config(path: Path) -> PreTrainedConfig:
    """The folder's configuration. Raises UnsupportedModelError where the configuration alone tells."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no {CONFIG_FILE}; it is not a model folder; name one with {CONFIG_FILE} and safetensors files"
        )
    try:
        values: dict[str, Any] = json.loads(file.read_text())
        model_type = values["model_type"]
        if not isinstance(model_type, str | None) or not isinstance(values.get("architectures") or [], list):
            raise TypeError("model_type must be a string, architectures a list")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a model configuration ({error!r}); download it again") from error
    if model_type not in CONFIG_MAPPING:
        remedy = (
            "running its own code (trust_remote_code) is refused" if "auto_map" in values else "update transformers"
        )
        raise UnsupportedModelError(f"model type {model_type!r} is unknown to the installed transformers; {remedy}")
    try:
        config = CONFIG_MAPPING[str(model_type)].from_dict(values)
    except Exception as error:  # the configuration classes validate with errors of many kinds
        raise CheckpointError(f"{file} is not a valid {model_type} configuration: {error}") from error
    refuse_by_config(config)
    return config


def refuse_by_config(config: PreTrainedConfig) -> None:
    named = (getattr(config, "architectures", None) or [""])[0]
    if named and not named.endswith(("ForCausalLM", "LMHeadModel")):
        raise UnsupportedModelError(f"{named} is not a text generator (a causal language model); it cannot be served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{named or config.model_type} has no causal language model in the installed transformers"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise UnsupportedModelError(
            f"{named or config.model_type} is quantized ({method}), which cannot be read yet; "
            "use an unquantized checkpoint"
        )
    text = config.get_text_config()
    if text is not config:
        raise UnsupportedModelError(f"{named or config.model_type} has more than a text part; only text models can run")
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_KINDS}
    if kinds:
        raise UnsupportedModelError(
            f"{named or config.model_type} has layers of kind {', '.join(sorted(map(str, kinds)))}; "
            f"only {' and '.join(_LAYER_KINDS)} can run"
        )
    if config.model_type in REFUSED:
        raise UnsupportedModelError(f"{named or config.model_type} is not supported: {REFUSED[config.model_type]}")
    if not getattr(text, "is_causal", True) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{named or config.model_type} is an encoder; only decoders can be served")


def network_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    first: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return first


def build_network(config: PreTrainedConfig, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    """The network on the meta device, its attention and experts going to `implementation`. Leaves `config` alone."""
    attention_plug.register()
    experts_plug.register()
    # transformers sets the process's default dtype meanwhile, and puts back what it found: ranks that are threads would
    # find each other's. For the same reason tensors elsewhere name their dtype.
    with _building, torch.device("meta"):
        network = network_class(config)._from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=implementation,
            experts_implementation=implementation,
        )
    return network.eval().requires_grad_(False)


def parameter_dtypes(network: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """dtype of every floating parameter and persistent buffer; some must stay in float32 (B80)."""
    plan = network._get_dtype_plan(dtype)
    from transformers.core_model_loading import build_glob_alternation

    kept = build_glob_alternation(list(plan))[0] if plan else None
    return {
        name: torch.float32 if kept is not None and kept.search(name) else dtype
        for name, tensor in network.state_dict().items()
        if tensor.is_floating_point()
    }


def last_position_limit(config: PreTrainedConfig) -> int:
    """Longest context. Dynamic rotary scalings depend on the longest sequence of a batch, so there it is the original
    length, up to which they are the same for every batch."""
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or 1 << 20)
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = list(parameters.values()) if "rope_type" not in parameters else [parameters]
    for rope in kinds:
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = min(limit, int(original or limit))
    return limit
