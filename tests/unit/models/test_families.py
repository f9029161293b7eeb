"""Each family against transformers' eager float32: same logits, same experts, on packed, ragged, chunked batches."""

from pathlib import Path

import pytest
import torch
from eager_oracle import CHUNKS, assert_same_as_eager, eager, eager_logits, load, random_sequences

from trimtab.models.spec import read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint
from trimtab.testing.packed import packed_logits


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_packed_chunked_batch_gives_eager_logits_and_experts(tmp_path: Path, family: str, layout: str) -> None:
    assert_same_as_eager(make_tiny_checkpoint(tmp_path, family, layout=layout, num_shards=2))


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_windows_and_sinks_hold_in_decode_chunks_and_whole_prompts(tmp_path: Path, chunk: int) -> None:
    """B93: a window of 8 on alternate layers and per-head sinks, prompts of 4, 8, 9 and 40 tokens."""
    path = make_tiny_checkpoint(tmp_path, "gpt_oss")
    spec = read_spec(path)
    assert [layer.window for layer in spec.attention_layers] == [8, None, 8, None]
    assert all(layer.has_sinks for layer in spec.attention_layers)
    assert_same_as_eager(path, chunks=[chunk] * 4)


def test_a_window_of_null_means_full_attention(tmp_path: Path) -> None:
    """B93"""
    full = make_tiny_checkpoint(tmp_path / "full", "mixtral", sliding_window=None)
    assert {layer.window for layer in read_spec(full).attention_layers} == {None}
    assert_same_as_eager(full)
    windowed = make_tiny_checkpoint(tmp_path / "windowed", "mixtral", sliding_window=8)
    assert {layer.window for layer in read_spec(windowed).attention_layers} == {8}
    assert_same_as_eager(windowed)


def test_a_window_that_is_only_in_the_mask_is_found(tmp_path: Path) -> None:
    """qwen2-moe with windows on some layers passes its attention no usable keyword on others."""
    path = make_tiny_checkpoint(
        tmp_path,
        "qwen2_moe",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert [layer.window for layer in read_spec(path).attention_layers] == [None, 8]
    assert_same_as_eager(path)


def test_deepseek_has_a_dense_layer_first_and_expanded_keys(tmp_path: Path) -> None:
    spec = read_spec(make_tiny_checkpoint(tmp_path, "deepseek_v3"))
    assert [layer.layer_id for layer in spec.moe_layers] == [1, 2]
    assert [layer.ordinal for layer in spec.moe_layers] == [0, 1]
    assert {(layer.key_size, layer.value_size, layer.num_kv_heads) for layer in spec.attention_layers} == {(24, 12, 4)}


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_dynamic_rotary_scalings_are_right_up_to_the_original_length(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "short_mscale": 1.0, "long_mscale": 1.2}
    family = "phimoe" if kind == "longrope" else "mixtral"
    path = make_tiny_checkpoint(tmp_path, family, max_position_embeddings=192, rope_parameters=rope)
    assert read_spec(path).max_position == 48
    assert_same_as_eager(path, lengths=(5, 48), chunks=(1, 17))


def test_two_models_live_in_one_process(tmp_path: Path) -> None:
    """transformers' registries are global: nothing of one model may show in the other."""
    paths = [make_tiny_checkpoint(tmp_path / str(seed), "mixtral", seed=seed) for seed in (1, 2)]
    models = [load(path) for path in paths]
    sequences = random_sequences(320)
    found = [packed_logits(model, sequences, CHUNKS) for model in models]
    again = packed_logits(models[0], sequences, CHUNKS)
    for path, logits in zip(paths, found, strict=True):
        expected = eager_logits(eager(path), sequences)
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    for before, after in zip(found[0], again, strict=True):
        assert torch.equal(before, after)


def test_only_the_chosen_rows_have_logits(tmp_path: Path) -> None:
    from trimtab.testing.reference_attention import ReferenceAttention, ReferenceStep

    model = load(make_tiny_checkpoint(tmp_path))
    step = ReferenceStep()
    tokens = torch.arange(6)

    def logits(rows: list[int]) -> torch.Tensor:
        model.bind_attention({layer.layer_id: ReferenceAttention(step) for layer in model.spec.attention_layers})
        step.begin([(0, 4), (1, 2)])
        return model.forward(tokens, torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor(rows, dtype=torch.int64))

    everything = logits(list(range(6)))
    torch.testing.assert_close(logits([3, 5]), everything[[3, 5]], atol=1e-5, rtol=0)
    assert logits([]).shape == (0, 320)
