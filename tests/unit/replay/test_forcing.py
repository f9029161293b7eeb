"""Forced routing against transformers' own forward and against formulas written down by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from router_formulas import FAMILIES, GROUP_LIMITED, run_experts
from tiny_networks import choices, experts_modules, make_network, other_choices, random_ids, routes_for
from torch import Tensor

from trimtab.models.errors import UnsupportedModelError
from trimtab.replay import record_routed_experts, replay_routed_experts

# Beside those with a formula: a router inside a decoder layer, routers with biases, several norms, and more.
SAME_AS_UNFORCED = [*FAMILIES, "gemma4_text", "qwen2_moe", "laguna", "mimo_v2_flash", "afmoe", "cohere2_moe", "flint"]


def logits_of(network: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return network(input_ids=ids[None], use_cache=False, **kwargs).logits[0]


@pytest.mark.parametrize("family", SAME_AS_UNFORCED)
def test_forcing_a_networks_own_choice_changes_no_bit_of_output_and_gradients(family: str) -> None:
    network = make_network(family)
    (ids,) = random_ids(11)
    routes = routes_for(network, ids)
    runs = []
    for forced in (False, True):
        network.zero_grad()
        if forced:
            with replay_routed_experts(network, routes) as replay:
                logits = logits_of(network, ids)
                logits.square().mean().backward()
            assert replay.num_forced_rows == 10  # the last token has no row
        else:
            logits = logits_of(network, ids)
            logits.square().mean().backward()
        runs.append((logits.detach(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}))
    (plain, plain_grads), (forced_logits, forced_grads) = runs
    assert torch.equal(plain, forced_logits)
    assert plain_grads.keys() == forced_grads.keys()
    for name, grad in plain_grads.items():
        torch.testing.assert_close(forced_grads[name], grad, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2 in groups"])
def test_other_experts_give_the_output_and_gradients_of_the_formula(family: str) -> None:
    name = family.split()[0]
    rule, overrides = FAMILIES[name]
    network = make_network(name, **(overrides | (GROUP_LIMITED if "groups" in family else {})))
    (ids,) = random_ids(9)
    forced = other_choices(network, ids)
    seen: dict[str, Tensor] = {}
    layer_id, experts = experts_modules(network)[-1]
    block = network.model.layers[layer_id].get_submodule(
        "block_sparse_moe" if hasattr(network.model.layers[layer_id], "block_sparse_moe") else "mlp"
    )
    hooks = [
        block.register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0])),
        experts.register_forward_hook(lambda _, args, output: seen.update(index=args[1], weights=args[2], out=output)),
    ]
    with replay_routed_experts(network, routes_for(network, ids, forced)):
        logits_of(network, ids)
    for hook in hooks:
        hook.remove()

    hidden = seen["hidden"].flatten(0, 1)
    chosen = torch.cat([torch.from_numpy(forced[:, -1]), seen["index"][-1:]])  # the last token is the live router's
    assert torch.equal(seen["index"], chosen)
    weights = rule(block, network.config, hidden, chosen)
    expected = run_experts(experts, hidden, chosen, weights)
    torch.testing.assert_close(seen["weights"], weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen["out"], expected, rtol=1e-4, atol=1e-5)
    assert float(weights.detach().min()) > 0, "a masked score would stand here"

    router = block.gate if hasattr(block, "gate") else block.router
    inputs = [*router.parameters(), *experts.parameters(), seen["hidden"]]
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((seen["out"] * direction).sum(), inputs, retain_graph=True, allow_unused=True)
    wanted = torch.autograd.grad((expected * direction).sum(), inputs, retain_graph=True, allow_unused=True)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"input {number}")
    assert found[0] is not None and float(found[0].abs().max()) > 1e-6, "no gradient reaches the router"


def test_groups_that_the_router_cannot_choose_are_refused() -> None:
    network = make_network("deepseek_v3", n_group=4, topk_group=1, num_experts_per_tok=2)
    (ids,) = random_ids(6)
    experts = choices(network, ids)[:-1]
    experts[2, 1] = [0, 7]  # of groups 0 and 3
    with (
        pytest.raises(ValueError, match=r"layers\.2.*\[0, 7\] of token 2 lie in 2 groups, the router takes 1 of 4"),
        replay_routed_experts(network, routes_for(network, ids, experts)),
    ):
        logits_of(network, ids)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_narrow_and_wide_ids_force_the_same(dtype: Any) -> None:
    network = make_network("qwen3_moe")
    (ids,) = random_ids(7)
    forced = other_choices(network, ids)
    with replay_routed_experts(network, routes_for(network, ids, forced)):
        expected = logits_of(network, ids)
    with replay_routed_experts(network, routes_for(network, ids, forced.astype(dtype))):
        assert torch.equal(logits_of(network, ids), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_force_each_sequences_rows(side: str) -> None:
    network = make_network("mixtral")
    first, second = random_ids(9, 5)
    forced = [other_choices(network, ids) for ids in (first, second)]
    alone = []
    for ids, experts in zip((first, second), forced, strict=True):
        with replay_routed_experts(network, routes_for(network, ids, experts)):
            alone.append(logits_of(network, ids))
    padding = torch.full((4,), 0)
    parts = [padding, second] if side == "left" else [second, padding]
    batch = torch.stack([first, torch.cat(parts)])
    mask = torch.ones_like(batch)
    mask[1, :4] if side == "left" else mask[1, 5:]
    place = slice(4, 9) if side == "left" else slice(0, 5)
    mask[1] = 0
    mask[1, place] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    routes = [routes_for(network, ids, experts) for ids, experts in zip((first, second), forced, strict=True)]
    with replay_routed_experts(network, routes) as replay, record_routed_experts(network) as recording:
        logits = network(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert replay.num_forced_rows == 8 + 4
    torch.testing.assert_close(logits[0], alone[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1, place], alone[1], rtol=1e-4, atol=1e-4)
    found = recording.experts.reshape(2, 9, *recording.experts.shape[1:])
    assert np.array_equal(found[0, :8], forced[0])
    assert np.array_equal(found[1, place][:4], forced[1])


def test_packed_sequences_are_found_by_their_positions() -> None:
    network = make_network("mixtral")
    sequences = random_ids(6, 4, 5)
    routes = [routes_for(network, ids, other_choices(network, ids)) for ids in sequences]
    packed = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    with replay_routed_experts(network, routes), record_routed_experts(network) as recording:
        network(input_ids=packed[None], position_ids=positions[None], use_cache=False)
    starts = np.cumsum([0, 6, 4])
    for start, entry in zip(starts, routes, strict=True):
        assert np.array_equal(recording.experts[start : start + entry.num_rows], entry.experts)

    with (
        pytest.raises(
            ValueError, match="3 completions for 1 sequences in the batch; packed sequences need position_ids"
        ),
        replay_routed_experts(network, routes),
    ):
        network(input_ids=packed[None], use_cache=False)


def test_rows_begin_at_start_and_the_tokens_before_it_are_live() -> None:
    network = make_network("mixtral")
    (ids,) = random_ids(8)
    forced = other_choices(network, ids)
    routes = routes_for(network, ids, forced[3:], start=3)
    with replay_routed_experts(network, routes) as replay, record_routed_experts(network) as recording:
        logits_of(network, ids)
    assert replay.num_forced_rows == 4
    assert np.array_equal(recording.experts[3:7], forced[3:])
    assert np.array_equal(recording.experts[:3], choices(network, ids)[:3])


def test_a_forward_without_the_last_token_and_rows_for_it_both_fit() -> None:
    network = make_network("mixtral")
    (ids,) = random_ids(6)
    own = choices(network, ids)
    for experts in (own, own[:-1]):
        for inputs in (ids, ids[:-1]):
            with replay_routed_experts(network, routes_for(network, ids, experts)) as replay:
                logits_of(network, inputs)
            assert replay.num_forced_rows == min(len(experts), len(inputs))


@pytest.mark.parametrize("when", ["inside", "after the context", "in another order"])
@pytest.mark.parametrize("family", ["mixtral", "gemma4_text"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_rows(family: str, reentrant: bool, when: str) -> None:
    batches = random_ids(7, 7)
    network = make_network(family).train()
    routes = [routes_for(network, ids, other_choices(network, ids)) for ids in batches]
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            network.activation_checkpointing_enable({"use_reentrant": reentrant})
            network.enable_input_require_grads()
        network.zero_grad()
        losses = []
        for ids, entry in zip(batches, routes, strict=True):
            with replay_routed_experts(network, entry):
                losses.append(logits_of(network, ids).square().mean())
                if when == "inside":
                    losses[-1].backward()
        if when != "inside":
            for loss in losses if when == "in another order" else losses[::-1]:
                loss.backward()
        grads.append({name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_a_recomputation_with_other_rows_would_show_in_the_gradients() -> None:
    """The control of the test above: live routing gives other gradients."""
    network = make_network("mixtral")
    (ids,) = random_ids(7)
    logits_of(network, ids).square().mean().backward()
    live = network.lm_head.weight.grad.clone()
    network.zero_grad()
    with replay_routed_experts(network, routes_for(network, ids, other_choices(network, ids))):
        logits_of(network, ids).square().mean().backward()
    assert float((network.lm_head.weight.grad - live).abs().max()) > 1e-3


def test_training_noise_is_the_same_with_and_without_the_trial() -> None:
    network = make_network("mixtral", router_jitter_noise=0.2).train()
    (ids,) = random_ids(7)
    torch.manual_seed(5)
    with record_routed_experts(network) as recording:
        plain = logits_of(network, ids)
    routes = routes_for(network, ids, recording.experts)
    torch.manual_seed(5)
    with replay_routed_experts(network, routes):
        assert torch.equal(logits_of(network, ids), plain)


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "jetmoe"])
def test_architectures_that_cannot_be_replayed_are_refused_by_name(family: str) -> None:
    network = make_network(family)
    (ids,) = random_ids(5)
    donor = make_network("mixtral")
    routes = routes_for(donor, ids)
    with (
        pytest.raises(
            UnsupportedModelError, match=r"PhimoeSparseMoeBlock.*cannot be replayed|ForCausalLM has no experts"
        ),
        replay_routed_experts(network, routes),
    ):
        logits_of(network, ids)


class ScalesBySlot(torch.nn.Module):
    """A router whose weights belong to places, not to experts."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, index = self.inner(hidden)
        return logits, weights * torch.tensor([1.0, 0.5]), index


class ChoosesTwice(torch.nn.Module):
    """A router that takes its weights from an earlier choice of its own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, self.inner.weight)
        values, _ = torch.topk(logits, 2)
        _, index = torch.topk(logits, 2)
        return logits, values.softmax(dim=-1), index


@pytest.mark.parametrize(
    ("router", "reason"), [(ScalesBySlot, "weights do not follow its choice"), (ChoosesTwice, "2 torch.topk calls")]
)
def test_a_router_whose_weights_do_not_follow_the_choice_is_refused(router: Any, reason: str) -> None:
    """The negative controls of the trial."""
    network = make_network("mixtral")
    (ids,) = random_ids(6)
    routes = routes_for(network, ids)
    for layer in network.model.layers:
        layer.mlp.gate = router(layer.mlp.gate)
    with (
        pytest.raises(UnsupportedModelError, match=f"MixtralSparseMoeBlock .model.layers.0.*{reason}"),
        replay_routed_experts(network, routes),
    ):
        logits_of(network, ids)


def test_a_block_is_tried_once_in_each_mode() -> None:
    """A trainer opens a context per micro-batch; a trial runs all of the block but its experts four times."""
    network = make_network("deepseek_v3")
    (ids,) = random_ids(6)
    routes = routes_for(network, ids)
    calls: list[int] = []
    shared = network.model.layers[-1].mlp.shared_experts
    shared.register_forward_hook(lambda *_: calls.append(1))
    for training, expected in ((False, 5), (False, 1), (True, 5), (True, 1), (False, 1)):
        network.train(training)
        calls.clear()
        with replay_routed_experts(network, routes):
            logits_of(network, ids)
        assert len(calls) == expected


def test_nothing_stays_on_the_modules_and_other_instances_are_not_touched() -> None:
    network, other = make_network("mixtral"), make_network("mixtral")
    (ids,) = random_ids(6)
    plain = logits_of(network, ids)
    attributes = {name: set(vars(module)) for name, module in network.named_modules()}
    with replay_routed_experts(network, routes_for(network, ids, other_choices(network, ids))):
        assert not torch.equal(logits_of(network, ids), plain)
        assert torch.equal(logits_of(other, ids), plain)
    assert torch.equal(logits_of(network, ids), plain)
    assert {name: set(vars(module)) for name, module in network.named_modules()} == attributes


def test_instances_replay_their_own_routes_in_threads_of_their_own() -> None:
    networks = [make_network("mixtral") for _ in range(2)]
    sequences = random_ids(9, 9)
    routes = [
        routes_for(network, ids, other_choices(network, ids)) for network, ids in zip(networks, sequences, strict=True)
    ]
    both_are_inside = threading.Barrier(2, timeout=60)

    def replayed(number: int) -> np.ndarray:
        network, ids = networks[number], sequences[number]
        with replay_routed_experts(network, routes[number]), record_routed_experts(network) as recording:
            both_are_inside.wait()
            logits_of(network, ids)
        return recording.experts

    with ThreadPoolExecutor(2) as pool:
        for found, entry in zip(pool.map(replayed, range(2)), routes, strict=True):
            assert np.array_equal(found[:-1], entry.experts)
    assert not np.array_equal(routes[0].experts, routes[1].experts)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_and_half_precision_take_the_forced_experts(implementation: str, dtype: Any) -> None:
    """transformers' default on accelerators is one of them."""
    network = make_network("qwen3_moe").to(dtype).requires_grad_(False)
    network.set_experts_implementation(implementation)
    (ids,) = random_ids(9)
    plain = logits_of(network, ids)
    with replay_routed_experts(network, routes_for(network, ids)):
        assert torch.equal(logits_of(network, ids), plain)
    forced = other_choices(network, ids)
    with replay_routed_experts(network, routes_for(network, ids, forced)), record_routed_experts(network) as recording:
        assert not torch.equal(logits_of(network, ids), plain)
    assert np.array_equal(recording.experts[:-1], forced)


def test_a_failure_inside_leaves_nothing_behind() -> None:
    network = make_network("mixtral")
    (ids,) = random_ids(6)
    plain = logits_of(network, ids)
    with pytest.raises(KeyError), replay_routed_experts(network, routes_for(network, ids, other_choices(network, ids))):
        raise KeyError("mine")
    assert torch.equal(logits_of(network, ids), plain)


def test_a_context_that_replayed_nothing_says_so() -> None:
    network = make_network("mixtral")
    (ids,) = random_ids(6)
    with (
        pytest.raises(ValueError, match=r"no forward of the MixtralForCausalLM.*nothing was replayed"),
        replay_routed_experts(network, routes_for(network, ids)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="runs before a forward of the MixtralForCausalLM"),
        replay_routed_experts(network, routes_for(network, ids)),
    ):
        network.model(input_ids=ids[None], use_cache=False)


def test_perturbed_weights_route_otherwise_without_replay_and_never_with_it() -> None:
    network = make_network("qwen3_moe")
    (ids,) = random_ids(40)
    routes = routes_for(network, ids)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.mlp.gate.weight += 0.3 * torch.randn(
                layer.mlp.gate.weight.shape, generator=torch.Generator().manual_seed(0)
            )
    assert not np.array_equal(choices(network, ids)[:-1], routes.experts)
    with replay_routed_experts(network, routes), record_routed_experts(network) as recording:
        logits_of(network, ids)
    assert np.array_equal(recording.experts[:-1], routes.experts)
