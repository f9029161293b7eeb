"""New weights while serving: as if they had been loaded at the start, or refused by name with nothing changed (B23)."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from eager_oracle import random_sequences
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.linear import PackedLinear
from trimtab.kernels.native.library import Format, native_kernels
from trimtab.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from trimtab.models.language_model import LanguageModel
from trimtab.models.loading import load_model
from trimtab.models.refit import _check_config, check_weights, refit
from trimtab.models.spec import read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint, save_shards
from trimtab.testing.packed import packed_logits

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.fixture(params=["native", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The core where there is one, or a process that was told to do without."""
    native_kernels.cache_clear()
    if request.param == "portable":
        monkeypatch.setenv("TRIMTAB_NATIVE", "off")
    elif native_kernels().core is None:
        pytest.skip("the native core is not built")
    yield request.param
    monkeypatch.undo()
    native_kernels.cache_clear()


def two_checkpoints(folder: Path, family: str, dtype: str = "float32", **options: object) -> tuple[Path, Path]:
    old, new = (
        make_tiny_checkpoint(folder / name, family, seed=seed, dtype=dtype, **options)  # type: ignore[arg-type]
        for seed, name in enumerate(("a", "b"))
    )
    return old, new


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Two checkpoints of a family, made once for all tests that only read them."""

    @functools.cache
    def make(family: str, dtype: str = "float32") -> tuple[Path, Path]:
        return two_checkpoints(tmp_path_factory.mktemp("pair"), family, dtype)

    return make


def shuffled(num_layers: int, num_redundant: int = 2, num_ranks: int = 1, seed: int = 0) -> Placement:
    """Eight experts, each somewhere, and replicas, differently in each layer."""
    generator = np.random.default_rng(seed)
    rows = [np.concatenate([np.arange(8), generator.integers(0, 8, num_redundant)]) for _ in range(num_layers)]
    return Placement(Topology(8, num_redundant, num_ranks), [generator.permutation(row) for row in rows])


def logits(model: LanguageModel) -> Tensor:
    """Of three sequences: prefill, its chunks and decode."""
    return torch.cat(packed_logits(model, random_sequences(320, (4, 9, 12)), (5, 1, 7)))


def load(path: Path, placement: Placement | None = None, quantization: str | None = None) -> LanguageModel:
    return load_model(read_spec(path, quantization=quantization), placement=placement)


def assert_refit_is_a_fresh_load(
    old: Path, new: Path, placement: Placement | None, quantization: str | None = None
) -> None:
    model = load(old, placement, quantization)
    before = logits(model)
    expected = logits(load(new, placement, quantization))
    assert not torch.equal(before, expected)
    assert check_weights(model, new) == ""
    assert torch.equal(logits(model), before), "checking changes nothing"
    refit(model, new, placement)
    assert torch.equal(logits(model), expected)
    refit(model, old, placement)
    assert torch.equal(logits(model), before), "and back"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_b23_after_a_refit_logits_are_bitwise_those_of_a_fresh_load(
    pair: Callable[..., tuple[Path, Path]], family: str, dtype: str, kernels: str
) -> None:
    """Replicas included; norms, routers, biases, sinks and packed layers are all written where they are."""
    old, new = pair(family, dtype)
    placement = shuffled(len(read_spec(old).moe_layers))
    assert load(old, placement).moe_layers[0].kernel.name == kernels
    assert_refit_is_a_fresh_load(old, new, placement)


@pytest.mark.skipif(not native_kernels().supports(Format.INT8), reason="no native int8 kernel here")
@pytest.mark.parametrize("family", FAMILIES)
def test_b23_quantized_experts_are_quantized_anew(pair: Callable[..., tuple[Path, Path]], family: str) -> None:
    """B23: scales, too, belong to the new weights."""
    old, new = pair(family, "bfloat16")
    assert_refit_is_a_fresh_load(old, new, shuffled(len(read_spec(old).moe_layers)), "int8")


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_the_new_files_may_be_split_and_named_differently(tmp_path: Path, layout: str) -> None:
    old = make_tiny_checkpoint(tmp_path / "a", "qwen3_moe")
    new = make_tiny_checkpoint(tmp_path / "b", "qwen3_moe", seed=1, layout=layout, num_shards=4)  # type: ignore[arg-type]
    assert_refit_is_a_fresh_load(old, new, None)


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_tied_heads_stay_tied(tmp_path: Path, stored: str, kernels: str) -> None:
    old, new = two_checkpoints(tmp_path, "mixtral", tie_word_embeddings=True)
    state = load_file(new / SINGLE_FILE)
    if stored != "embedding":
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    if stored == "head":
        del state["model.embed_tokens.weight"]
    save_shards(new, state)
    assert_refit_is_a_fresh_load(old, new, None)


def rearrange(model: LanguageModel, old: Placement, new: Placement) -> None:
    """What commits do, one after another."""
    for ordinal, layer in enumerate(model.moe_layers):
        experts = {int(expert): layer.kernel.read_slot(slot) for slot, expert in enumerate(old.slot_to_expert[ordinal])}
        for slot, expert in enumerate(new.slot_to_expert[ordinal]):
            layer.kernel.load_slot(slot, experts[int(expert)])
        layer.refresh(new)


def test_b23_a_refit_follows_the_placement_in_force_not_the_first_one(pair: Callable[..., tuple[Path, Path]]) -> None:
    """B23: after rearrangements every current replica is written. The control, by the first placement, is corrupt."""
    old, new = pair("qwen3_moe")
    placements = [shuffled(2, num_redundant=4, seed=seed) for seed in range(3)]
    model = load(old, placements[0])
    before, expected = logits(model), logits(load(new, placements[-1]))
    for first, second in itertools.pairwise(placements):
        rearrange(model, first, second)
    assert torch.equal(logits(model), before)
    refit(model, new, placements[0])
    assert not torch.equal(logits(model), expected)
    refit(model, new, placements[-1])
    assert torch.equal(logits(model), expected)


def test_whatever_others_hold_stays_the_same_object(tmp_path: Path, kernels: str) -> None:
    old, new = two_checkpoints(tmp_path, "gpt_oss", "bfloat16", tie_word_embeddings=True)
    placement = shuffled(len(read_spec(old).moe_layers))
    model = load(old, placement)
    logits(model)

    def held() -> list[object]:
        found: list[object] = list(model.network.modules())
        found += [module.storage for module in model.network.modules() if isinstance(module, PackedLinear)]
        found += [*model.network.parameters(), *model.network.buffers()]
        for layer in model.moe_layers:
            found += [layer.kernel, layer.routing_table, layer.routing_table.slots]
        return found

    def addresses() -> list[int]:
        return [tensor.data_ptr() for tensor in (*model.network.parameters(), *model.network.buffers())]

    objects, places = held(), addresses()
    refit(model, new, placement)
    assert all(ours is theirs for ours, theirs in zip(objects, held(), strict=True))
    assert addresses() == places
    expected = load(new, placement).moe_layers[0].routing_table.slots
    assert torch.equal(model.moe_layers[0].routing_table.slots, expected), "a refit moves no expert"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_and_writes_only_its_share(
    pair: Callable[..., tuple[Path, Path]], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair("qwen3_moe")
    placement = shuffled(2, num_redundant=2, num_ranks=2)
    model = load_model(read_spec(old), placement=placement, rank=rank)
    fresh = load_model(read_spec(new), placement=placement, rank=rank)
    read: set[str] = set()
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read.add(name) or original(self, name))
    assert check_weights(model, new) == "" and not read
    refit(model, new, placement, rank)
    slots = list(placement.topology.slots_of(rank))
    for ordinal, (ours, theirs) in enumerate(zip(model.moe_layers, fresh.moe_layers, strict=True)):
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if f".{ordinal}.mlp.experts." in name}
        assert experts == set(placement.slot_to_expert[ordinal, slots].tolist())
        for position in range(len(slots)):
            found, expected = ours.kernel.read_slot(position).tensors(), theirs.kernel.read_slot(position).tensors()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_one_tensor_at_a_time_is_read_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """No second copy of the model: never more is mapped than one parameter's tensors, or those of one expert."""
    old, new = two_checkpoints(tmp_path, "qwen3_moe", layout=layout)
    model = load(old)
    mapped: set[str] = set()
    most = 0
    original_read, original_release = Checkpoint.read, Checkpoint.release

    def read(self: Checkpoint, name: str) -> Tensor:
        nonlocal most
        mapped.add(name)
        most = max(most, len(mapped))
        return original_read(self, name)

    def release(self: Checkpoint, name: str) -> None:
        mapped.discard(name)
        original_release(self, name)

    monkeypatch.setattr(Checkpoint, "read", read)
    monkeypatch.setattr(Checkpoint, "release", release)
    refit(model, new)
    assert most == (3 if layout == "per_expert" else 2), "gate, up and down of one expert"
    assert not mapped


def test_b21_a_state_dict_knows_nothing_of_placements(pair: Callable[..., tuple[Path, Path]]) -> None:
    """B21: copying one model's whole state into another's changes no look-up."""
    old, new = pair("qwen3_moe")
    model, other = load(old, shuffled(2, seed=1)), load(new, shuffled(2, seed=2))
    tables = [layer.routing_table.slots.clone() for layer in model.moe_layers]
    state = other.network.state_dict()
    assert state and not [name for name in state if "expert" in name or "slot" in name]
    model.network.load_state_dict(state)
    assert all(
        torch.equal(layer.routing_table.slots, table) for layer, table in zip(model.moe_layers, tables, strict=True)
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


def edit_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def lose_a_shard(path: Path) -> str:
    (path / "model-00002-of-00003.safetensors").unlink()
    return "shard model-00002-of-00003.safetensors"


def cut_a_shard(path: Path) -> str:
    shard = path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    return "model-00003-of-00003.safetensors has .* bytes, its header says"


def lose_a_tensor(path: Path) -> str:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    index = json.loads((path / INDEX_FILE).read_text())
    shard = path / index["weight_map"].pop(name)
    state = load_file(shard)
    del state[name]
    save_file(state, shard)
    (path / INDEX_FILE).write_text(json.dumps(index))
    return f"no tensor {name}"


def reshape_a_tensor(path: Path) -> str:
    index = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    name = "model.layers.0.self_attn.q_proj.weight"
    state = load_file(path / index[name])
    state[name] = state[name][:-1]
    save_file(state, path / index[name])
    return rf"tensor {name} in .* has shape \(63, 64\); the configuration says \(64, 64\)"


def take_another_architecture(path: Path) -> str:
    shutil.rmtree(path)
    make_tiny_checkpoint(path, "mixtral")
    return "is a MixtralForCausalLM and the loaded model a Qwen3MoeForCausalLM"


def take_a_deeper_model(path: Path) -> str:
    shutil.rmtree(path)
    make_tiny_checkpoint(path, "qwen3_moe", num_hidden_layers=3)
    return "num_hidden_layers is 3 in .*config.json and 2 in the loaded model"


def change_a_norms_epsilon(path: Path) -> str:
    edit_config(path, rms_norm_eps=0.5)
    return "rms_norm_eps is 0.5 in .*config.json and 1e-06 in the loaded model"


def lose_the_configuration(path: Path) -> str:
    (path / "config.json").unlink()
    return r"has no config\.json"


def lose_the_folder(path: Path) -> str:
    shutil.rmtree(path)
    return r"has no config\.json"


BROKEN: list[Callable[[Path], str]] = [
    lose_a_shard, cut_a_shard, lose_a_tensor, reshape_a_tensor, take_another_architecture, take_a_deeper_model,
    change_a_norms_epsilon, lose_the_configuration, lose_the_folder,
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Tensor, Path]:
    """A model, its logits, and files that may take its place; no refusal may change the model."""
    old, new = two_checkpoints(tmp_path_factory.mktemp("served"), "qwen3_moe", num_shards=3)
    model = load(old)
    assert check_weights(model, new) == ""
    return model, logits(model), new


@pytest.mark.parametrize("break_it", BROKEN)
def test_b23_broken_files_are_refused_by_name_and_nothing_has_changed(
    served: tuple[LanguageModel, Tensor, Path], tmp_path: Path, break_it: Callable[[Path], str]
) -> None:
    model, before, whole = served
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    reason = break_it(broken)
    problem = check_weights(model, broken)
    assert re.search(reason, problem), problem
    with pytest.raises(ValueError, match=reason):
        refit(model, broken)
    assert torch.equal(logits(model), before), "refused as a whole, before the first value"


def test_heads_that_are_tied_differently_are_refused(tmp_path: Path) -> None:
    tied, untied = (make_tiny_checkpoint(tmp_path / name, tie_word_embeddings=True) for name in ("t", "u"))
    state = load_file(untied / SINGLE_FILE)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 2
    save_shards(untied, state)
    problem = check_weights(load(tied), untied)
    assert "lm_head.weight and model.embed_tokens.weight are one tensor in the loaded model and two in" in problem
    problem = check_weights(load(untied), tied)
    assert "lm_head.weight and model.embed_tokens.weight are two tensors in the loaded model and one in" in problem


@pytest.mark.skipif(not native_kernels().supports(Format.INT8), reason="no native int8 kernel here")
def test_experts_that_cannot_be_quantized_are_found_before_anything_is_written(tmp_path: Path) -> None:
    """Only where they are to be quantized: a model that stores them as they are takes them as they are."""
    old, new = two_checkpoints(tmp_path, "qwen3_moe")
    state = load_file(new / SINGLE_FILE)
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    state[name][3, 3] = float("inf")
    save_shards(new, state)
    problem = check_weights(load(old, quantization="int8"), new)
    assert problem.startswith(f"tensor {name} in ") and "is not finite in torch.float32" in problem
    assert check_weights(load(old), new) == ""


def test_what_no_forward_reads_may_differ(tmp_path: Path) -> None:
    old, new = two_checkpoints(tmp_path, "qwen3_moe")
    edit_config(new, use_cache=False, transformers_version="4.0.0", router_aux_loss_coef=0.5, dtype="bfloat16")
    assert check_weights(load(old), new) == ""


def test_configurations_within_configurations_are_compared_by_the_same_rule(tmp_path: Path) -> None:
    """DBRX keeps that of its experts apart: there, too, are keys that no forward reads, and others are named."""
    configs = CONFIG_MAPPING["dbrx"](), CONFIG_MAPPING["dbrx"]()
    written = configs[1].to_dict()
    written["ffn_config"] |= {"transformers_version": "4.0.0", "use_cache": False, "dtype": "bfloat16", "_note": 1}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    _check_config("DbrxForCausalLM", configs[0], tmp_path)
    written["ffn_config"] |= {"moe_top_k": 3}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    with pytest.raises(ValueError, match=r"^ffn_config\.moe_top_k is 3 in .* and 1 in the loaded model; start anew"):
        _check_config("DbrxForCausalLM", configs[0], tmp_path)
