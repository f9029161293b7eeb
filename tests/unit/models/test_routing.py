"""Routing arithmetic is transformers' own: every flag of the configuration reaches it, and nothing is applied twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_oracle import (
    CHUNKS,
    assert_no_worse_than_eager,
    assert_same_as_eager,
    eager,
    eager_logits,
    eager_routing,
    load,
    random_sequences,
)
from safetensors.torch import load_file, save_file

from trimtab.models.checkpoint import SINGLE_FILE
from trimtab.models.spec import read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint
from trimtab.testing.packed import packed_logits


def without(path: Path, *keys: str) -> Path:
    config = json.loads((path / "config.json").read_text())
    for key in keys:
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_groups_are_chosen_by_their_two_best_and_bind(tmp_path: Path) -> None:
    """B79: with every biased score negative, no expert outside the allowed group is chosen; experts 2 and 3 have the
    best sum of two, expert 0 the best single score."""
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3", topk_group=1, num_experts_per_tok=2)
    state = load_file(path / SINGLE_FILE)
    for layer in (1, 2):
        state[f"model.layers.{layer}.mlp.gate.weight"] *= 0.0  # scores are sigmoid(0) = 0.5
        bias = torch.tensor([-3.0, -9.0, -4.0, -4.5, -6.0, -6.0, -7.0, -7.0])
        state[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias
    save_file(state, path / SINGLE_FILE)
    assert_same_as_eager(path)
    with eager_routing(network := eager(path)) as calls:
        eager_logits(network, random_sequences(320))
    assert {int(expert) for ids, _ in calls for expert in ids.unique()} == {2, 3}


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_the_routed_factor_is_applied_once_with_and_without_renormalisation(
    tmp_path: Path, norm: bool, factor: float
) -> None:
    """B81, B82: shared experts are not scaled, whatever the flags."""
    assert_same_as_eager(
        make_tiny_checkpoint(tmp_path, "deepseek_v3", norm_topk_prob=norm, routed_scaling_factor=factor)
    )


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"]
)
def test_an_absent_renormalisation_flag_means_the_familys_default(tmp_path: Path, family: str) -> None:
    """B84: first token right, then decay."""
    assert_same_as_eager(without(make_tiny_checkpoint(tmp_path, family), "norm_topk_prob"))


def test_routing_flags_are_told_with_the_familys_default_where_the_checkpoint_is_silent(tmp_path: Path) -> None:
    """B84: what a start prints. Mixtral's code always renormalises, and has no flag."""

    def told(family: str, **options: Any) -> Any:
        path = make_tiny_checkpoint(tmp_path / f"{family}-{len(options)}", family, **options)
        return read_spec(path if options else without(path, "norm_topk_prob")).routing.get("norm_topk_prob")

    assert {family: told(family) for family in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")} == {
        "mixtral": None, "qwen3_moe": False, "olmoe": False, "deepseek_v3": True
    }  # fmt: skip
    assert told("qwen3_moe", norm_topk_prob=True) is True and told("deepseek_v3", norm_topk_prob=False) is False


@pytest.mark.parametrize("norm", [True, False])
def test_weights_are_softmax_over_all_experts_then_gathered(tmp_path: Path, norm: bool) -> None:
    """B85"""
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=norm)
    model = load(path)
    weights: list[torch.Tensor] = []
    forward = model.moe_layers[0].forward
    model.moe_layers[0].forward = lambda hidden, ids, gate: weights.append(gate) or forward(hidden, ids, gate)  # type: ignore[method-assign]
    packed_logits(model, random_sequences(320), CHUNKS)
    sums = torch.cat(weights).sum(dim=-1)
    assert bool((sums < 0.999).all()) if not norm else torch.allclose(sums, torch.ones_like(sums))
    assert_same_as_eager(path)


@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (6, 3), (6, 6), (60, 4), (160, 10), (384, 8)], ids=lambda value: str(value)
)
def test_any_number_of_experts(tmp_path: Path, experts: int, top_k: int) -> None:
    """B95: not a power of two, above 256, K = E."""
    path = make_tiny_checkpoint(
        tmp_path, "qwen3_moe", num_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=16
    )
    assert_same_as_eager(path)


def test_dense_and_moe_layers_sit_where_the_configuration_says(tmp_path: Path) -> None:
    """B96: a sigmoid-gated shared expert, every second layer sparse, some dense by name; true layer numbers."""
    path = make_tiny_checkpoint(
        tmp_path,
        "qwen2_moe",
        num_hidden_layers=6,
        layer_types=["full_attention"] * 6,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    )
    assert [layer.layer_id for layer in read_spec(path).moe_layers] == [3, 5]
    assert_same_as_eager(path)


def test_clipped_queries_and_norms_over_the_whole_projection(tmp_path: Path) -> None:
    """B97"""
    clipped = make_tiny_checkpoint(tmp_path / "clipped", "olmoe", clip_qkv=0.3)
    assert_same_as_eager(clipped)
    plain = make_tiny_checkpoint(tmp_path / "plain", "olmoe", clip_qkv=None)
    sequences = random_sequences(320)
    left, right = (packed_logits(load(path), sequences, CHUNKS) for path in (clipped, plain))
    assert not torch.allclose(left[3], right[3], atol=1e-2)


@pytest.mark.parametrize("mscale", [None, 0.707, 1.0])
def test_yarn_corrects_both_frequencies_and_softmax_scale(tmp_path: Path, mscale: float | None) -> None:
    """B92: positions 0, 1, 500 and beyond the original window; rope_type "default" means no scaling."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if mscale is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3", max_position_embeddings=2560, rope_parameters=rope)
    assert_same_as_eager(path, lengths=(3, 520), chunks=(1, 173))


@pytest.mark.parametrize("dense_layers", [0, 1, 3])
def test_half_precision_stays_finite_with_any_number_of_leading_dense_layers(tmp_path: Path, dense_layers: int) -> None:
    """B83: nothing is rescaled per dense layer."""
    path = make_tiny_checkpoint(
        tmp_path, "deepseek_v3", num_hidden_layers=4, first_k_dense_replace=dense_layers, dtype="float16"
    )
    assert_no_worse_than_eager(path, "float16")
