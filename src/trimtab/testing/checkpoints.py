"""Tiny random checkpoints of any Mixture-of-Experts family, deterministic, in the layouts found in the wild."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trimtab.models.checkpoint import INDEX_FILE, SINGLE_FILE
from trimtab.models.network import network_class, parameter_dtypes

Layout = Literal["per_expert", "fused"]

# Tried on every family; a family takes those that its configuration has.
_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 512,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
# Taken only where the family's default is a number.
_TINY_WHERE_SET: dict[str, Any] = {
    "sliding_window": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        # 32 times 16 tokens make the 512 positions: most of a test's prompt lies beyond the original length.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
}


def make_tiny_checkpoint(
    directory: str | Path,
    family: str = "mixtral",
    *,
    seed: int = 0,
    dtype: str = "float32",
    layout: Layout = "per_expert",
    num_shards: int = 1,
    with_tokenizer: bool = False,
    **config_overrides: Any,
) -> Path:
    """Writes config.json and safetensors of a random network of `family` (a transformers model_type).

    layout: "per_expert" names tensors as the family's published checkpoints do, "fused" as transformers holds them.
    The same arguments give the same bytes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    network = make_tiny_network(tiny_config(family, **config_overrides), seed)
    state = dict(network.state_dict())
    for name in network.all_tied_weights_keys:
        state.pop(name, None)
    tied = set(network.state_dict()) - set(state)
    dtypes = parameter_dtypes(network, getattr(torch, dtype))
    state = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in state.items() if name not in tied}
    if layout == "per_expert":
        state = revert_weight_conversion(network, state)
    network.config.dtype = dtype
    network.config.architectures = [type(network).__name__]
    (directory / "config.json").write_text(json.dumps(network.config.to_dict(), indent=2, sort_keys=True, default=str))
    save_shards(directory, state, num_shards)
    if with_tokenizer:
        save_byte_tokenizer(directory)
    return directory


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The family's own defaults, shrunk."""
    config_class = CONFIG_MAPPING[family]
    config = config_class()
    if config.get_text_config() is not config:
        return config
    known = config.to_dict()
    shrunk = {name: value for name, value in _TINY.items() if name in known or name == "pad_token_id"}
    shrunk |= {name: value for name, value in _TINY_WHERE_SET.items() if isinstance(known.get(name), int)}
    if known.get("kv_lora_rank"):  # latent attention: one key head per head, and head_dim follows from the parts
        shrunk["num_key_value_heads"] = shrunk["num_attention_heads"]
        shrunk.pop("head_dim", None)
    shrunk |= _one_layer_of_each_kind(known) | _FAMILIES.get(family, {})
    aliases: dict[str, str] = config_class.attribute_map
    given = {aliases.get(name, name) for name in overrides}
    return config_class(
        **{name: value for name, value in shrunk.items() if aliases.get(name, name) not in given}, **overrides
    )


def _one_layer_of_each_kind(known: dict[str, Any]) -> dict[str, Any]:
    """Per-layer lists of the defaults, cut to one layer of each combination they contain."""
    num_layers = known.get("num_hidden_layers")
    lists = {
        name: value for name, value in known.items() if isinstance(value, list) and value and len(value) == num_layers
    }
    kinds: dict[str, int] = {}
    for layer, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(repr(kind), layer)
    chosen = list(kinds.values())[:6]
    if not chosen:
        return {}
    chosen = chosen * 2 if len(chosen) == 1 else chosen
    return {"num_hidden_layers": len(chosen)} | {name: [value[i] for i in chosen] for name, value in lists.items()}


def make_tiny_network(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """transformers' network, float32 and eager, with weights spread so that routing and logits tell experts apart."""
    network = network_class(config)._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(network.state_dict().items()):
            if tensor.is_floating_point():
                tensor.copy_(_random_weight(name, tensor, generator))
    network.tie_weights()
    return network.eval().requires_grad_(False)


def _random_weight(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() < 2:
        return 1.0 + 0.1 * noise if name.endswith("weight") else 0.2 * noise
    if "embed" in name:
        return noise
    gain = 4.0 if "lm_head" in name else 1.0
    return noise * gain / math.sqrt(min(tensor.shape[-2:]) if tensor.dim() == 3 else tensor.shape[-1])


def save_shards(directory: Path, state: dict[str, Tensor], num_shards: int = 1) -> None:
    """One file, or `num_shards` files of consecutive tensors with an index."""
    names = sorted(state)
    if num_shards == 1:
        save_file({name: state[name].contiguous() for name in names}, directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: state[name].contiguous() for name in part}, directory / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer of 256 bytes, <|bos|> (256), <|eos|> (257) and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(directory)
