"""What start-up learns from a folder, and what it refuses by name before a weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.models import network
from trimtab.models.checkpoint import Checkpoint
from trimtab.models.spec import CheckpointError, UnsupportedModelError, read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint, tiny_config


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


def configure(path: Path, **values: Any) -> Path:
    return write_config(path, json.loads((path / "config.json").read_text()) | values)


def test_the_spec_of_a_small_mixtral(tmp_path: Path) -> None:
    spec = read_spec(make_tiny_checkpoint(tmp_path))
    assert (spec.architecture, spec.num_layers, spec.vocab_size, spec.hidden_size) == ("MixtralForCausalLM", 2, 320, 64)
    assert (spec.max_position, spec.tied, spec.dtype) == (512, False, torch.float32)
    assert [(a.num_heads, a.num_kv_heads, a.key_size, a.value_size) for a in spec.attention_layers] == [
        (4, 2, 16, 16)
    ] * 2
    first = spec.moe_layers[0]
    assert (first.num_experts, first.top_k, first.shape.hidden_size, first.shape.intermediate_size) == (8, 2, 64, 96)
    assert first.shape.activation.kind == "silu"
    experts = 2 * 8 * 3 * 64 * 96
    dense = 2 * 320 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 8 + 64 * 2) + 64
    assert spec.num_parameters == dense + experts
    assert spec.num_active_parameters == dense + experts // 4
    assert (spec.num_bytes, spec.num_expert_bytes) == (4 * (dense + experts), 4 * experts)


def test_no_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: pytest.fail(f"read {name}"))
    read_spec(path)


def test_k_is_what_the_router_gives_whatever_the_configuration_calls_it(tmp_path: Path) -> None:
    """B65: top-k under another name (hunyuan keeps a list, ernie moe_k)."""
    for family, values in {
        "hunyuan_v1_moe": {"moe_topk": [3, 3]},
        "ernie4_5_moe": {"moe_k": 3},
        "qwen3_moe": {"num_experts_per_tok": 3},
    }.items():
        spec = read_spec(make_tiny_checkpoint(tmp_path / family, family, **values))
        assert {layer.top_k for layer in spec.moe_layers} == {3}, family


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64},
            "LlamaForCausalLM is not a Mi",
        ),
        ({"model_type": "no_such_family"}, "'no_such_family' is unknown to the installed transformers; update"),
        ({"model_type": "their_own", "auto_map": {"AutoModel": "m.M"}}, "trust_remote_code"),
        (
            {"model_type": "mixtral", "architectures": ["MixtralForTokenClassification"]},
            "MixtralForTokenClassification",
        ),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel is not a text generator"),
        ({"model_type": "mixtral", "quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "deepseek_v32"}, "indexed_attention"),
        ({"model_type": "gemma4"}, "more than a text part"),
        ({"model_type": "vit"}, "no causal language model"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
            "mamba|linear",
        ),
        ({"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        read_spec(write_config(tmp_path, values))


def test_a_family_that_the_sweep_found_wanting_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(network.REFUSED, "mixtral", "its logits differ")
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM is not supported: its logits differ"):
        read_spec(make_tiny_checkpoint(tmp_path))


def test_a_configuration_that_fits_no_network_is_named(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    (path / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"config\.json is not a model configuration"):
        read_spec(path)
    for values in ({"hidden_size": 3}, {"model_type": ["mixtral"]}, {"model_type": "mixtral", "architectures": "M"}):
        write_config(path, values)
        with pytest.raises(CheckpointError, match="model_type"):
            read_spec(path)


def test_more_chosen_experts_than_there_are_is_refused(tmp_path: Path) -> None:
    """B95: K = E is fine, K > E is not."""
    path = make_tiny_checkpoint(tmp_path, num_local_experts=4, num_experts_per_tok=4)
    assert read_spec(path).moe_layers[0].top_k == 4
    with pytest.raises(ValueError, match="chooses more experts than there are; check num_experts_per_tok"):
        read_spec(configure(path, num_experts_per_tok=5))
    with pytest.raises(UnsupportedModelError, match="chooses 0 of 4 experts; check num_experts_per_tok"):
        read_spec(configure(path, num_experts_per_tok=0))


def test_dynamic_rotary_scalings_end_at_the_original_length() -> None:
    """Beyond it their frequencies depend on the longest sequence of the batch."""
    longrope = tiny_config(
        "phimoe",
        max_position_embeddings=4096,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 128,
        },
    )
    assert network.last_position_limit(longrope) == 128
    dynamic = tiny_config(
        "mixtral",
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    assert network.last_position_limit(dynamic) == 64
    assert network.last_position_limit(tiny_config("gpt_oss")) == 512  # yarn does not depend on the batch


def test_real_sizes_are_probed_without_memory_or_weights() -> None:
    """DeepSeek-V3's own defaults: 671 B parameters on the meta device."""
    from transformers import DeepseekV3Config

    from trimtab.models.spec import probe_config

    trial, probed = probe_config(DeepseekV3Config(num_hidden_layers=6), torch.bfloat16)
    assert [layer.layer_id for layer in probed.moe_layers] == [3, 4, 5]
    assert {(layer.num_experts, layer.top_k) for layer in probed.moe_layers} == {(256, 8)}
    assert all(parameter.is_meta for parameter in trial.parameters())
