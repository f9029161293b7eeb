"""Rows that do not belong to the batch's tokens are refused, and the message says where they differ."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_networks import make_network, random_ids, routes_for

from trimtab.replay import RoutedModel, Routes, replay_routed_experts


@pytest.fixture(scope="module")
def network() -> Any:
    return make_network("mixtral").requires_grad_(False)


def refusal(network: Any, routes: Any, **batch: Any) -> str:
    with pytest.raises(ValueError) as caught, replay_routed_experts(network, routes):
        network(use_cache=False, **batch)
    return str(caught.value)


def test_rows_shifted_by_one_token_are_refused(network: Any) -> None:
    (ids,) = random_ids(8)
    routes = routes_for(network, ids)
    assert "has 6 tokens in the batch; its routes are of 8, and 7 without the last" in refusal(
        network, routes, input_ids=ids[None, 2:]
    )
    shifted = torch.cat([ids[1:], ids[:1]])
    message = refusal(network, routes, input_ids=shifted[None])
    assert f"differs from its routes at token 0: {int(ids[1])} in the batch, {int(ids[0])} in the routes" in message


def test_sequences_in_another_order_are_refused(network: Any) -> None:
    first, second = random_ids(6, 6)
    routes = [routes_for(network, ids) for ids in (second, first)]
    assert "sequence 0 (request ? completion 0) differs" in refusal(
        network, routes, input_ids=torch.stack([first, second])
    )


def test_padding_without_a_mask_is_refused(network: Any) -> None:
    first, second = random_ids(8, 5)
    batch = torch.stack([first, torch.cat([second, torch.zeros(3, dtype=torch.int64)])])
    routes = [routes_for(network, ids) for ids in (first, second)]
    assert "sequence 1" in refusal(network, routes, input_ids=batch)
    assert "Is a mask or truncation missing?" in refusal(network, routes, input_ids=batch)


def test_a_mask_of_another_form_is_refused(network: Any) -> None:
    (ids,) = random_ids(5)
    message = refusal(
        network, routes_for(network, ids), input_ids=ids[None], attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool)
    )
    assert "attention_mask ([1, 1, 5, 5]) must be [B, T] [1, 5]" in message


def test_another_number_of_completions_is_refused(network: Any) -> None:
    (ids,) = random_ids(5)
    routes = routes_for(network, ids)
    assert "2 completions for 1 sequences" in refusal(network, [routes, routes], input_ids=ids[None])
    with pytest.raises(ValueError, match="must hold one completion per sequence"), replay_routed_experts(network, []):
        pass


def other_model(routes: Routes, **changes: Any) -> Routes:
    model: RoutedModel = replace(routes.model, **changes)
    experts = np.zeros((routes.num_rows, len(model.layer_ids), model.top_k), np.int64) + np.arange(model.top_k)
    return replace(routes, model=model, experts=experts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (0,)}, r"have MoE layers \[0\], MixtralForCausalLM has \[0, 1\]"),
        ({"layer_ids": (1, 2), "num_hidden_layers": 3}, r"have MoE layers \[1, 2\]"),
        ({"num_experts": 16}, r"have 16 experts, layer 0 of MixtralForCausalLM has 8"),
        ({"top_k": 3}, r"is given a choice \[5, 2\], the batch and its routes have \[5, 3\]"),
    ],
)
def test_routes_of_another_model_are_refused(network: Any, changes: dict[str, Any], message: str) -> None:
    (ids,) = random_ids(5)
    with (
        pytest.raises(ValueError, match=message),
        replay_routed_experts(network, other_model(routes_for(network, ids), **changes)),
    ):
        network(input_ids=ids[None], use_cache=False)


def test_embeddings_instead_of_ids_are_checked_by_length_alone(network: Any) -> None:
    (ids,) = random_ids(6)
    routes = routes_for(network, ids)
    embedded = network.get_input_embeddings()(ids)[None]
    plain = network(input_ids=ids[None], use_cache=False).logits
    with replay_routed_experts(network, routes):
        assert torch.equal(network(inputs_embeds=embedded, use_cache=False).logits, plain)
    assert "has 4 tokens" in refusal(network, routes, inputs_embeds=embedded[:, :4])
    assert "needs input_ids or inputs_embeds" in refusal(network, routes)


def test_a_wrapped_model_is_followed_to_its_arguments(network: Any) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    (ids,) = random_ids(6)
    with replay_routed_experts(wrapper := Wrapper(), routes_for(network, ids)) as replay:
        wrapper(input_ids=ids[None], use_cache=False)
    assert replay.num_forced_rows == 5
