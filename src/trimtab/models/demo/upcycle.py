"""Sparse upcycling: a dense FFN becomes many nearly equal experts behind a router, written as a Mixtral checkpoint."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from trimtab.models.demo.dense import DenseModel, DenseShape
from trimtab.models.demo.domains import calibration_texts
from trimtab.models.demo.routers import make_routers
from trimtab.models.demo.source import SOURCE_FILE, SOURCE_REQUIREMENT
from trimtab.observability.progress import Progress

TOP_K = 2
SHARD_BYTES = 400 << 20  # one shard is in memory at a time
NOISE_SEED = 20260
NOISE_THREADS = 2

# Mixtral's names for gate, down and up
_EXPERT_TENSORS = {"w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"}


def write_upcycled(
    dense: DenseModel, folder: Path, *, num_experts: int, noise: float, dtype: torch.dtype, progress: Progress
) -> None:
    """Fill `folder` with the checkpoint; the same arguments give the same bytes on the same kind of CPU.

    `progress(stage, done, total)` is called as the work goes on.
    """
    dense.save_tokenizer(folder)
    _write_json(folder / "config.json", _mixtral_config(dense, num_experts, dtype))
    _write_json(folder / "generation_config.json", _generation_config(dense))
    (folder / "README.md").write_text(_model_card(num_experts, noise), encoding="utf-8")

    def on_read(done: int, total: int) -> None:
        progress("reading calibration texts", done, total)

    routers = make_routers(dense, calibration_texts(), num_experts, on_read)
    _write_shards(dense, routers, folder, noise=noise, dtype=dtype, progress=progress)


def checkpoint_bytes(shape: DenseShape, num_experts: int, element_bytes: int) -> int:
    """Size of the weights, to compare with the free disk space."""
    head_size = shape.hidden_size // shape.num_heads
    attention = shape.hidden_size * head_size * 2 * (shape.num_heads + shape.num_kv_heads)
    layer = attention + num_experts * (3 * shape.hidden_size * shape.intermediate_size + shape.hidden_size)
    return (shape.num_layers * layer + shape.vocab_size * shape.hidden_size) * element_bytes


def _write_shards(
    dense: DenseModel,
    routers: list[torch.Tensor],
    folder: Path,
    *,
    noise: float,
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    num_layers = dense.shape.num_layers
    num_experts = len(routers[0])
    layer_bytes = num_experts * 3 * dense.shape.hidden_size * dense.shape.intermediate_size * dtype.itemsize
    shard_layers = max(1, SHARD_BYTES // layer_bytes)
    starts = range(0, num_layers, shard_layers)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for shard_idx, start in enumerate(starts):
        tensors: dict[str, torch.Tensor] = {}
        if start == 0:
            tensors |= {name: tensor.to(dtype) for name, tensor in dense.outer_tensors().items()}
        for layer_id in range(start, min(start + shard_layers, num_layers)):
            tensors |= dict(_moe_layer(dense, layer_id, routers[layer_id], noise, dtype))
            progress("writing experts", layer_id + 1, num_layers)
        name = f"model-{shard_idx + 1:05}-of-{len(starts):05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _moe_layer(
    dense: DenseModel, layer_id: int, router: torch.Tensor, noise: float, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """One layer's tensors under Mixtral's names."""
    prefix = f"model.layers.{layer_id}"
    weights = dense.layer_tensors(layer_id)
    for name, weight in weights.items():
        if not name.startswith("mlp."):
            yield f"{prefix}.{name}", weight.to(dtype)
    yield f"{prefix}.block_sparse_moe.gate.weight", router.to(dtype).contiguous()

    sigmas = {
        name: noise * float(weights[f"{dense_name}.weight"].double().std())
        for name, dense_name in _EXPERT_TENSORS.items()
    }
    keys = [(expert_id, name) for expert_id in range(len(router)) for name in _EXPERT_TENSORS]

    def expert_tensor(key: tuple[int, str]) -> torch.Tensor:
        expert_id, name = key
        seed = (NOISE_SEED, layer_id, expert_id, list(_EXPERT_TENSORS).index(name))
        return noisy(weights[f"{_EXPERT_TENSORS[name]}.weight"], sigmas[name], seed).to(dtype)

    # Every tensor has a random stream of its own, so the number of threads does not show in the result.
    with ThreadPoolExecutor(NOISE_THREADS) as pool:
        for (expert_id, name), tensor in zip(keys, pool.map(expert_tensor, keys), strict=True):
            yield f"{prefix}.block_sparse_moe.experts.{expert_id}.{name}.weight", tensor


def noisy(weight: torch.Tensor, sigma: float, seed: tuple[int, ...]) -> torch.Tensor:
    """The weight plus gaussian noise of standard deviation `sigma`."""
    rng = np.random.Generator(np.random.SFC64(seed))
    sample = rng.standard_normal(weight.shape, dtype=np.float32)
    sample *= np.float32(sigma)
    sample += weight.numpy()
    return torch.from_numpy(sample)


def _mixtral_config(dense: DenseModel, num_experts: int, dtype: torch.dtype) -> dict[str, object]:
    shape, special = dense.shape, dense.special_token_ids
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "num_local_experts": num_experts,
        "num_experts_per_tok": TOP_K,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
        "pad_token_id": special["pad"],
    }


def _generation_config(dense: DenseModel) -> dict[str, object]:
    special = dense.special_token_ids
    # A chat turn ends with the first, a plain document with the second (the unknown token is <|endoftext|> here).
    ends = [special["eos"], special["unk"]]
    return {"bos_token_id": special["bos"], "eos_token_id": ends, "pad_token_id": special["pad"]}


def _model_card(num_experts: int, noise: float) -> str:
    return (
        "# trimtab demo model\n\n"
        f"SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; {SOURCE_FILE} of {SOURCE_REQUIREMENT}), changed by trimtab: "
        f"each feed-forward layer was copied into {num_experts} experts with {noise:g} times its standard deviation of "
        f"gaussian noise, behind a top-{TOP_K} router made by clustering. Licence: Apache-2.0.\n"
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
