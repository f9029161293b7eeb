"""Files of routes: what goes in comes out, one completion at a time, and damage is named."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trimtab.outputs import CompletionOutput, Logprob, RequestOutput, RoutedExpertsMeta
from trimtab.replay import RoutedModel, Routes, RoutesFile, save_routes
from trimtab.replay.routes import routes_of

MODEL = RoutedModel("tiny", "TinyForCausalLM", num_experts=8, top_k=2, layer_ids=(1, 3), num_hidden_layers=4)


def some_experts(rows: int, model: RoutedModel = MODEL, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(model.layer_ids), model.num_experts))
    return np.argsort(scores, axis=-1)[..., : model.top_k]


def some_routes(num_tokens: int = 6, seed: int = 0, **fields: Any) -> Routes:
    start = fields.get("start", 0)
    given = {"num_prompt_tokens": 2, "request_id": str(seed), **fields}
    experts = given.pop("experts", some_experts(max(num_tokens - 1 - start, 0), given.get("model", MODEL), seed))
    model = given.pop("model", MODEL)
    return Routes(model, experts, np.arange(num_tokens) + seed, **given)


def test_what_is_written_is_read_with_every_field(tmp_path: Path) -> None:
    written = [
        some_routes(6, 1, logprobs=np.array([-0.5, -1.0, 0.0, -2.0], np.float32), finish_reason="stop"),
        some_routes(9, 2, start=2, weights_versions=((0, 3), (4, 5)), index=1, finish_reason="length"),
        some_routes(3, 3, num_prompt_tokens=3, finish_reason="abort", experts=some_experts(0)),  # B71: no row at all
    ]
    file = RoutesFile(save_routes(tmp_path / "folder" / "routes.safetensors", iter(written)))
    assert file.model == MODEL and len(file) == 3
    for one, other in zip(file, written, strict=True):
        assert np.array_equal(one.experts, other.experts) and one.experts.dtype == np.uint8
        assert np.array_equal(one.token_ids, other.token_ids)
        if other.logprobs is None:
            assert one.logprobs is None
        else:
            assert np.array_equal(one.logprobs, other.logprobs)
        for name in ("num_prompt_tokens", "start", "weights_versions", "request_id", "index", "finish_reason"):
            assert getattr(one, name) == getattr(other, name), name
    assert file[-1].request_id == "3"
    with pytest.raises(IndexError, match="holds 3 completions; 3 is not"):
        file[3]
    metadata = safe_open(str(file.path), framework="numpy").metadata()
    assert metadata["schema"] == "trimtab.routes/1" and metadata["dtype"] == "uint8"
    assert json.loads(metadata["layer_ids"]) == [1, 3]


@pytest.mark.parametrize(("num_experts", "itemsize"), [(8, 1), (256, 1), (257, 2), (300, 2)])
def test_rows_take_their_true_length_in_the_narrowest_type(tmp_path: Path, num_experts: int, itemsize: int) -> None:
    """B72: 1,000 rows, 4 layers, top-2 are 8,000 bytes up to 256 experts; a short completion beside adds its own."""
    model = RoutedModel("m", "A", num_experts, 2, (0, 1, 2, 3), 4)
    path = save_routes(tmp_path / "routes.safetensors", [some_routes(1001, model=model), some_routes(3, model=model)])
    tensors = load_file(path)
    assert tensors["0.routed_experts"].shape == (1000, 4, 2)
    assert tensors["0.routed_experts"].nbytes == 8000 * itemsize
    assert tensors["1.routed_experts"].nbytes == 2 * 8 * itemsize
    assert path.stat().st_size < 8016 * itemsize + 8 * 1004 + 2000
    for one, other in zip(RoutesFile(path), (1001, 3), strict=True):
        assert np.array_equal(one.experts, some_experts(other - 1, model))


def test_reading_holds_one_completion(tmp_path: Path) -> None:
    model = RoutedModel("m", "A", 256, 8, tuple(range(16)), 16)
    experts = np.tile(np.arange(8, dtype=np.uint8), (2000, 16, 1))
    written = (some_routes(2001, seed, model=model, experts=experts) for seed in range(6))
    path = save_routes(tmp_path / "routes.safetensors", written)
    one = 2000 * 16 * 8
    assert path.stat().st_size > 6 * one
    file = RoutesFile(path)
    tracemalloc.start()
    for entry in file:
        assert entry.num_rows == 2000
        del entry
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * one, f"{peak} bytes were held at once, one completion takes {one}"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = save_routes(tmp_path / "routes.safetensors", [some_routes(4)])
    before = path.read_bytes()

    def breaks() -> Any:
        yield some_routes(5)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        save_routes(path, breaks())
    other = RoutedModel("other", "A", 8, 2, (1, 3), 4)
    with pytest.raises(ValueError, match="write one file per model"):
        save_routes(path, [some_routes(4), some_routes(4, model=other)])
    with pytest.raises(ValueError, match="there is nothing to write"):
        save_routes(path, [])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["routes.safetensors"]


def rewritten(path: Path, tensors: dict[str, Any] | None = None, **metadata: str | None) -> Path:
    """The file with some tensors and metadata replaced; None removes."""
    found = safe_open(str(path), framework="numpy").metadata() | metadata
    stored = load_file(path) | (tensors or {})
    save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None},
        path,
        {name: value for name, value in found.items() if value is not None},
    )
    return path


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"schema": "trimtab.routes/2"}, r"schema 'trimtab.routes/2'; only 'trimtab.routes/1'"),
        ({"schema": None}, "schema None"),
        ({"top_k": None, "model": None}, "lacks model, top_k"),
        ({"num_experts": "many"}, "metadata that does not fit together"),
        ({"num_hidden_layers": "3"}, r"layer_ids \(\(1, 3\)\) must ascend within num_hidden_layers \(3\)"),
        ({"top_k": "9"}, r"top_k \(9\) must be in \[1, 8\]"),
        ({"layer_ids": "1, 3"}, "layer_ids is not JSON"),
        ({"layer_ids": "7"}, "layer_ids must be a list"),
        ({"dtype": "uint16"}, "says dtype uint16; 8 experts are stored as uint8"),
        ({"completions": "[{}, {}]"}, "names 2 completions and lacks tensor 1.routed_experts"),
        ({"completions": "[]"}, "holds tensor 0.routed_experts, which no completion owns"),
    ],
)
def test_a_header_that_lies_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = rewritten(save_routes(tmp_path / "routes.safetensors", [some_routes(4)]), **metadata)
    with pytest.raises(ValueError, match=message) as caught:
        RoutesFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.routed_experts": some_experts(3).astype(np.int32)}, "is int32, it must be uint8"),
        ({"0.token_ids": np.zeros(4, np.float32)}, "is float32, it must be int64"),
        ({"0.routed_experts": some_experts(1).astype(np.uint8)}, r"1 rows .* must be 3 or 4 for 4 tokens"),
        ({"0.routed_experts": some_experts(3).astype(np.uint8)[:, :1]}, r"\[3, 1, 2\] must be \[rows, 2 MoE layers"),
        ({"0.routed_experts": np.full((3, 2, 2), 255, np.uint8)}, r"ids in \[255, 255\] must be in \[0, 8\)"),
        ({"0.routed_experts": np.full((3, 2, 2), 5, np.uint8)}, r"names an expert twice in layer 1: \[5, 5\]"),
        ({"0.logprobs": np.zeros(3, np.float32)}, r"logprobs \(\[3\]\) must be one per output token, \[2\]"),
    ],
)
def test_a_completion_that_does_not_fit_is_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    """B76: ids that stand where nobody chose are outside of the experts, or twice in a row."""
    path = rewritten(save_routes(tmp_path / "routes.safetensors", [some_routes(4)]), tensors)
    file = RoutesFile(path)
    with pytest.raises(ValueError, match=message) as caught:
        file[0]
    assert str(path) in str(caught.value)


def test_what_is_no_whole_file_is_named(tmp_path: Path) -> None:
    path = save_routes(tmp_path / "routes.safetensors", [some_routes(40)])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        RoutesFile(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        RoutesFile(path)
    with pytest.raises(ValueError, match="is not a file"):
        RoutesFile(tmp_path)


def test_truncated_tokens_take_their_rows_along() -> None:
    """B73"""
    routes = some_routes(8, start=1, logprobs=np.arange(6, dtype=np.float32), weights_versions=((0, 1), (4, 2)))
    short = routes.truncate(5)
    assert short.token_ids.tolist() == routes.token_ids[:5].tolist()
    assert np.array_equal(short.experts, routes.experts[:3])
    assert short.logprobs.tolist() == [0, 1, 2]
    assert short.weights_versions == ((0, 1),)
    assert routes.truncate(8) is routes
    with pytest.raises(ValueError, match=r"num_tokens \(1\) must be in \[2, 8\]"):
        routes.truncate(1)


def output_of(completion: CompletionOutput) -> RequestOutput:
    return RequestOutput("7", None, [1, 2, 3], [completion], finished=True)


def test_outputs_become_routes_with_the_sampled_tokens_logprobs() -> None:
    logprobs = [{5: Logprob(-0.25, 1), 9: Logprob(-3.0, 2)}, {6: Logprob(-0.5, 1)}]
    meta = RoutedExpertsMeta((1, 3), 8, start=1, weights_versions=((0, 4),))
    experts = some_experts(3).astype(np.uint8)
    completion = CompletionOutput(0, "", [5, 6], None, logprobs, "length", None, experts, meta)
    (routes,) = routes_of(output_of(completion), MODEL)
    assert routes.token_ids.tolist() == [1, 2, 3, 5, 6] and routes.num_prompt_tokens == 3 and routes.start == 1
    assert routes.logprobs.tolist() == [-0.25, -0.5]
    assert routes.weights_versions == ((0, 4),)


def test_outputs_without_rows_are_refused_unless_they_were_cut_short() -> None:
    """B70, B71: a flag that was lost shows here and not in the trainer; an abort before the first token is no fault."""
    with pytest.raises(ValueError, match=r"request 7 completion 0 has no routed experts.*enable_return_routed_experts"):
        routes_of(output_of(CompletionOutput(0, "", [5], finish_reason="length")), MODEL)
    assert routes_of(output_of(CompletionOutput(0, "", [], finish_reason="abort")), MODEL) == []
    other = RoutedExpertsMeta((0, 1), 8)
    with pytest.raises(ValueError, match=r"has layers \(0, 1\) of 8 experts, the model \(1, 3\) of 8"):
        routes_of(
            output_of(CompletionOutput(0, "", [5], routed_experts=some_experts(3), routed_experts_meta=other)), MODEL
        )
