"""Every fault of a model folder names the file or tensor, and is found before weights are read."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimtab.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from trimtab.models.spec import CheckpointError, UnsupportedModelError, read_spec
from trimtab.testing.checkpoints import make_tiny_checkpoint

W1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "sharded", num_shards=3)


def edit(path: Path, change) -> None:
    state = load_file(path / SINGLE_FILE)
    change(state)
    save_file(state, path / SINGLE_FILE)


def test_a_truncated_shard_is_refused_with_both_sizes(sharded: Path) -> None:
    """B88: a short mapped file would read as zeros."""
    shard = sharded / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 4096)
    with pytest.raises(CheckpointError, match=rf"{shard.name} has {size - 4096} bytes, its header says {size}"):
        read_spec(sharded)


def test_a_file_longer_than_its_header_is_refused(single: Path) -> None:
    with (single / SINGLE_FILE).open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match="damaged"):
        read_spec(single)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"not json at all!", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_a_file_that_is_not_safetensors_is_named(single: Path, content: bytes) -> None:
    (single / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        read_spec(single)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00003-of-00003\.safetensors .* is missing"):
        read_spec(sharded)


def test_a_stale_index_names_the_tensor_it_misplaces(sharded: Path) -> None:
    """B89: the index decides, in both directions."""
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"][NORM] = "model-00001-of-00003.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"tensor {NORM} is not in .*00001-of-00003"):
        read_spec(sharded)


def test_a_tensor_the_index_does_not_list_is_not_read(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B89"""
    shard = sharded / "model-00001-of-00003.safetensors"
    save_file(load_file(shard) | {"left.over": torch.zeros(2)}, shard)
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(sharded)
    assert "left.over" not in checkpoint.tensors
    assert "left.over" in caplog.text


def test_a_stray_single_file_beside_shards_is_not_read(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B89: another precision of the same model lies beside the indexed shards; never a mixture."""
    before = {name: stored.file for name, stored in Checkpoint.open(sharded).tensors.items()}
    save_file({NORM: torch.zeros(64, dtype=torch.float16)}, sharded / SINGLE_FILE)
    with caplog.at_level(logging.WARNING):
        after = {name: stored.file for name, stored in Checkpoint.open(sharded).tensors.items()}
    assert after == before
    assert SINGLE_FILE in caplog.text


def test_an_index_may_not_point_out_of_its_folder(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"][NORM] = "../other/model.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.\./other/model\.safetensors.* not a file of its own folder"):
        read_spec(sharded)


@pytest.mark.parametrize("weight_map", [3, [], {"a": 3}, {"a": ["b"]}])
def test_an_index_of_another_form_is_named(sharded: Path, weight_map: object) -> None:
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        read_spec(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match="download the missing index"):
        read_spec(sharded)


def test_a_link_to_a_file_that_is_gone_is_named(single: Path) -> None:
    """As a cache leaves behind that was cleaned up under its links."""
    (single / SINGLE_FILE).unlink()
    (single / SINGLE_FILE).symlink_to(single / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a file \(a link to nothing\?\)"):
        read_spec(single)


def test_ordinary_layers_that_the_configuration_leaves_out_are_warned_of(
    single: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B90: only what looks like a prediction layer is skipped as one."""
    config = json.loads((single / "config.json").read_text()) | {"num_hidden_layers": 1}
    (single / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        assert read_spec(single).num_layers == 1
    assert [record.message.partition(": ")[2].partition(",")[0] for record in caplog.records] == [
        "num_hidden_layers (1) leaves out layers that the files hold"
    ]


def test_pickle_is_refused_with_the_remedy(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    (single / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedModelError, match=r"pickle \(pytorch_model\.bin\).* convert it to safetensors"):
        read_spec(single)


def test_a_folder_without_weights_or_configuration_is_refused(single: Path, tmp_path: Path) -> None:
    shutil.copytree(single, tmp_path / "empty")
    (tmp_path / "empty" / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        read_spec(tmp_path / "empty")
    (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_spec(single)


@pytest.mark.parametrize("name", [NORM, "lm_head.weight", W1])
def test_a_missing_tensor_is_named(single: Path, name: str) -> None:
    edit(single, lambda state: state.pop(name))
    with pytest.raises(CheckpointError, match=name.replace("block_sparse_moe", r"\w+")):
        read_spec(single)


def test_all_down_projections_missing_is_an_error(single: Path) -> None:
    def drop(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if ".layers.0." in name and name.endswith("w2.weight")]:
            del state[name]

    edit(single, drop)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj"):
        read_spec(single)


def test_an_unexpected_tensor_is_named(single: Path) -> None:
    edit(single, lambda state: state.update({"model.layers.0.surprise.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.surprise\.weight .* is not part of Mixtral"):
        read_spec(single)


def test_more_experts_than_configured_is_an_error(single: Path) -> None:
    def add(state: dict[str, torch.Tensor]) -> None:
        for part in ("w1", "w2", "w3"):
            name = f"model.layers.0.block_sparse_moe.experts.{{}}.{part}.weight"
            state[name.format(8)] = state[name.format(7)].clone()

    edit(single, add)
    with pytest.raises(CheckpointError, match=r"is of expert 8, but the configuration has 8 experts"):
        read_spec(single)


@pytest.mark.parametrize("name", [NORM, W1, "model.layers.0.self_attn.q_proj.weight"])
def test_a_wrong_shape_is_named_with_both_shapes(single: Path, name: str) -> None:
    edit(single, lambda state: state.update({name: state[name][:-1].clone()}))
    with pytest.raises(CheckpointError, match=rf"{name}.* has shape .*; the configuration says"):
        read_spec(single)


def test_a_fused_stack_of_too_few_experts_is_named(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, layout="fused")
    name = "model.layers.0.mlp.experts.down_proj"
    edit(path, lambda state: state.update({name: state[name][:7].clone()}))
    with pytest.raises(CheckpointError, match=rf"{name} .*\(7, 64, 96\); the configuration says \(8, 64, 96\)"):
        read_spec(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_weight_of_a_quantized_dtype_is_named(single: Path, dtype: torch.dtype) -> None:
    """B98: experts that match no rule must not stay as they are."""
    edit(single, lambda state: state.update({W1: state[W1].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"tensor {W1} .* has dtype"):
        read_spec(single)
