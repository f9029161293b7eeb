"""Loading: layouts, dtypes, ties, extra layers, and only the experts a rank holds."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from eager_oracle import CHUNKS, assert_no_worse_than_eager, eager, load, random_sequences
from safetensors.torch import load_file, save_file

from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.linear import InPlaceStorage
from trimtab.models.checkpoint import SINGLE_FILE
from trimtab.models.loading import load_model
from trimtab.models.spec import CheckpointError, read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint, save_shards
from trimtab.testing.packed import packed_logits


def logits_of(path: Path) -> list[torch.Tensor]:
    return packed_logits(load(path), random_sequences(320), CHUNKS)


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def configure(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(values)
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_layouts_and_shards_give_the_same_model(tmp_path: Path, family: str) -> None:
    """B94: order of files and layout of experts do not matter."""
    expected = logits_of(make_tiny_checkpoint(tmp_path / "a", family))
    assert_equal(logits_of(make_tiny_checkpoint(tmp_path / "b", family, layout="fused")), expected)
    assert_equal(logits_of(make_tiny_checkpoint(tmp_path / "c", family, num_shards=5)), expected)
    reverse = make_tiny_checkpoint(tmp_path / "d", family)
    state = load_file(reverse / SINGLE_FILE)
    (reverse / SINGLE_FILE).unlink()
    names = sorted(state, reverse=True)
    half = len(names) // 2
    weight_map = {}
    for file_name, part in (("x.safetensors", names[:half]), ("a.safetensors", names[half:])):
        save_file({name: state[name] for name in part}, reverse / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (reverse / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(logits_of(reverse), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_half_precision_is_near_eager_in_the_same_precision(tmp_path: Path, family: str, dtype: str) -> None:
    """B83: every path, that of latent attention and of scaled routing too."""
    path = make_tiny_checkpoint(tmp_path, family, dtype=dtype, tie_word_embeddings=family == "mixtral")
    assert read_spec(path).dtype == getattr(torch, dtype)
    assert_no_worse_than_eager(path, dtype)


def test_dtype_auto_is_what_the_configuration_says_or_else_what_is_stored(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, dtype="bfloat16")
    assert read_spec(path).dtype == torch.bfloat16
    assert read_spec(path, "float32").dtype == torch.float32
    configure(path, dtype="absent")
    assert read_spec(path).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype \('int3'\) must be 'auto' or one of"):
        read_spec(path, "int3")


def test_the_correction_bias_stays_in_float32(tmp_path: Path) -> None:
    """B80: below bf16's resolution two experts' biases still order them."""
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3", dtype="bfloat16")
    state = load_file(path / SINGLE_FILE)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    state[name] = torch.full((8,), 5.0) + torch.arange(8) * 1e-4
    save_file(state, path / SINGLE_FILE)
    model = load(path)
    bias = model._network.get_buffer(name)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, state[name])


@pytest.mark.parametrize("flag", [True, False, "absent"])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_and_untied_heads(tmp_path: Path, flag: object, head: str, caplog: pytest.LogCaptureFixture) -> None:
    """B91. Mixtral's default, when the flag is absent, is untied."""
    path = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    state = load_file(path / SINGLE_FILE)
    embedding = state["model.embed_tokens.weight"]
    assert "lm_head.weight" not in state
    if head != "absent":
        state["lm_head.weight"] = embedding.clone() if head == "equal" else embedding.flip(0).contiguous()
        save_shards(path, state)
    configure(path, tie_word_embeddings=flag)
    if flag is not True and head == "absent":
        with pytest.raises(CheckpointError, match=r"no tensor for lm_head\.weight"):
            read_spec(path)
        return
    with caplog.at_level(logging.WARNING):
        model = load(path)
    ours = model._network.lm_head.unpack()
    theirs = model._network.model.embed_tokens.weight
    torch.testing.assert_close(ours, theirs.flip(0) if head == "different" else theirs)
    is_tied = flag is True and head != "different"
    storage = model._network.lm_head.storage
    is_shared = isinstance(storage, InPlaceStorage) and storage._weight.data_ptr() == theirs.data_ptr()
    assert is_shared == is_tied
    assert ("two different tensors" in caplog.text) == (flag is True and head == "different")
    assert model.spec.num_parameters == load(make_tiny_checkpoint(tmp_path / "u")).spec.num_parameters - (
        embedding.numel() if flag is True and head == "absent" else 0
    )


def test_a_tied_model_stored_under_its_heads_name_is_whole(tmp_path: Path) -> None:
    """B91: of two tied tensors a file may hold either one."""
    path = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = logits_of(path)
    state = load_file(path / SINGLE_FILE)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_shards(path, state)
    assert_equal(logits_of(path), expected)


def test_extra_prediction_layers_are_skipped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B90: layer n of a file whose network has layers 0 .. n-1, whatever the prefix and whatever it shares."""
    path = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    expected = logits_of(path)
    state = load_file(path / SINGLE_FILE)
    state |= {
        name.replace(".layers.2.", ".layers.3."): tensor.clone()
        for name, tensor in state.items()
        if ".layers.2." in name
    }
    state["model.layers.3.embed_tokens.weight"] = torch.zeros(320, 64)
    state["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(state, path / SINGLE_FILE)
    with caplog.at_level(logging.INFO, logger="trimtab"):
        spec = read_spec(path)
    lines = [record.message for record in caplog.records if "extra prediction layers" in record.message]
    assert len(lines) == 1 and "from layer 3 on" in lines[0]
    assert_equal(packed_logits(load_model(spec), random_sequences(320), CHUNKS), expected)


def test_a_rank_reads_only_the_experts_its_slots_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.models.checkpoint import Checkpoint

    path = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    spec = read_spec(path)
    read: set[str] = set()
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read.add(name) or original(self, name))
    placement = Placement(Topology(8, num_ranks=2), np.stack([np.arange(8)[::-1], np.arange(8)]))
    model = load_model(spec, placement=placement, rank=1)
    assert [layer.kernel.num_slots for layer in model.moe_layers] == [4, 4]
    experts = {
        layer: {
            int(name.split(".experts.")[1].split(".")[0]) for name in read if f".layers.{layer}.mlp.experts." in name
        }
        for layer in (0, 1)
    }
    assert experts == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    state = load_file(path / SINGLE_FILE)
    for slot, expert in enumerate([3, 2, 1, 0]):
        down = model.moe_layers[0].kernel.read_slot(slot).down
        torch.testing.assert_close(down, state[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_interleaved_biased_experts_arrive_whole_on_every_rank(tmp_path: Path, num_ranks: int) -> None:
    """B94: gpt-oss on 2 and 4 ranks; each slot holds, bit for bit, what one rank alone would hold."""
    spec = read_spec(make_tiny_checkpoint(tmp_path, "gpt_oss"))
    alone = load_model(spec)
    placement = Placement.identity(Topology(8, num_ranks=num_ranks), len(spec.moe_layers))
    for rank in range(num_ranks):
        model = load_model(spec, placement=placement, rank=rank)
        for layer, whole in zip(model.moe_layers, alone.moe_layers, strict=True):
            for position, slot in enumerate(placement.topology.slots_of(rank)):
                ours, theirs = layer.kernel.read_slot(position).tensors(), whole.kernel.read_slot(slot).tensors()
                assert ours.keys() == {"gate_up", "down", "gate_up_bias", "down_bias"}
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_rule_17_redundant_slots_hold_copies_and_change_nothing(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    expected = logits_of(path)
    placement = Placement(Topology(8, num_redundant=2), [[5, 6, 7, 0, 1, 2, 3, 4, 5, 5], [*range(8), 0, 7]])
    model = load_model(read_spec(path), placement=placement)
    assert_equal(packed_logits(model, random_sequences(320), CHUNKS), expected)


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(read_spec(make_tiny_checkpoint(tmp_path)), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 361792 * 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_experts_are_never_stacked_in_memory(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    names = {name for name, _ in model._network.named_parameters()}
    assert not any("experts" in name for name in names)
    assert not any(parameter.is_meta for parameter in model._network.parameters())


def test_rotary_frequencies_are_computed_not_left_empty(tmp_path: Path) -> None:
    """Buffers no checkpoint stores: yarn's and default ones alike."""
    for family in ("gpt_oss", "mixtral"):
        path = make_tiny_checkpoint(tmp_path / family, family, dtype="bfloat16")
        ours = load(path)._network.model.rotary_emb.inv_freq
        theirs = eager(path, dtype=torch.bfloat16).model.rotary_emb.inv_freq
        assert ours.dtype == theirs.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_the_same_arguments_make_the_same_checkpoint(tmp_path: Path) -> None:
    left, right = (make_tiny_checkpoint(tmp_path / side, "gpt_oss", seed=3) / SINGLE_FILE for side in "lr")
    assert left.read_bytes() == right.read_bytes()
    other = make_tiny_checkpoint(tmp_path / "o", "gpt_oss", seed=4) / SINGLE_FILE
    assert other.read_bytes() != left.read_bytes()


def test_a_byte_tokenizer_comes_with_the_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_checkpoint(tmp_path, with_tokenizer=True))
    ids = tokenizer("Grüße ✓")["input_ids"]
    assert max(ids) < 256 and tokenizer.decode(ids) == "Grüße ✓"
    assert tokenizer.eos_token_id == 257
