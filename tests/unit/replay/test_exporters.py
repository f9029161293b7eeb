"""The two layouts trainers read, decoded the way they decode them."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_routes_file import MODEL, some_experts, some_routes

from trimtab.replay import RoutedModel, load_npy, save_npy, to_all_layers, to_int32_base64, to_moe_layers, to_npy_base64


def test_moe_layers_alone_as_vllm_has_them(tmp_path: Path) -> None:
    routes = some_routes(7)
    for found in (
        to_moe_layers(routes),
        load_npy(save_npy(tmp_path / "routes.npy", routes)),
        np.load(io.BytesIO(base64.b64decode(to_npy_base64(routes)))),
    ):
        assert found.shape == (6, 2, 2) and found.dtype == np.uint8
        assert np.array_equal(found, routes.experts)


def test_all_layers_as_sglang_has_them() -> None:
    """One row per decoder layer, dense ones zero; decoded as slime does it, with the shape from elsewhere."""
    routes = some_routes(7)
    found = to_all_layers(routes)
    assert found.shape == (6, 4, 2) and found.dtype == np.int32
    assert np.array_equal(found[:, [1, 3]], routes.experts)
    assert not found[:, [0, 2]].any()
    raw = base64.b64decode(to_int32_base64(routes))
    num_tokens = routes.num_tokens
    decoded = np.frombuffer(raw, dtype=np.int32).reshape(num_tokens - 1, MODEL.num_hidden_layers, MODEL.top_k)
    assert np.array_equal(decoded, found)


@pytest.mark.parametrize("rows", [6, 7])
def test_there_are_as_many_rows_as_tokens_that_an_engine_forwards(rows: int) -> None:
    """A trainer's own record may have the last token's row too; an engine never has."""
    routes = some_routes(7, experts=some_experts(rows))
    assert len(to_moe_layers(routes)) == len(to_all_layers(routes)) == 6
    late = some_routes(7, start=4)
    assert len(to_moe_layers(late)) == 2  # positions 4 and 5


def test_ids_beyond_a_byte_take_two() -> None:
    model = RoutedModel("m", "A", 300, 2, (0, 1), 2)
    experts = np.full((3, 2, 2), 299)
    experts[..., 0] = 256
    routes = some_routes(4, model=model, experts=experts)
    assert to_moe_layers(routes).dtype == np.uint16
    assert to_all_layers(routes).max() == 299


def test_what_is_no_array_of_routes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npy"
    path.write_bytes(b"no numpy")
    with pytest.raises(ValueError, match=r"not a .npy of numbers"):
        load_npy(path)
    np.save(path, np.zeros((2, 2)))
    with pytest.raises(ValueError, match="must hold integers"):
        load_npy(path)


def test_the_page_for_trainers_pads_batches_as_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routed-experts.md").read_text()
    code = page.split("Megatron's list:")[1].split("```python")[1].split("```")[0]
    batch = [some_routes(7), some_routes(4)]
    names: dict[str, Any] = {"batch": batch}
    exec(code, names)
    assert names["skyrl"].shape == names["nemo"].shape == (2, 7, 4, 2)
    assert np.array_equal(names["nemo"][1, :3], to_all_layers(batch[1])) and bool((names["nemo"][1, 3:] == -1).all())
    assert names["skyrl"][1, 3:].unique(dim=0).tolist() == [[[0, 1]] * 4]
    assert [tuple(layer.shape) for layer in names["megatron"]] == [(11, 2), (11, 2)]
    assert np.array_equal(names["megatron"][1][:6], batch[0].experts[:, 1])
