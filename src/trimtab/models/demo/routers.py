"""The demo's routers: cluster centres of what each dense FFN sees while the model reads texts of the four domains."""

# N calibration tokens  H hidden size  E experts

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel

from trimtab.models.demo.dense import DenseModel, DenseShape

PASSAGE_TOKENS = 64  # read per passage: enough context to be typical, and the whole calibration takes seconds
SKIPPED_TOKENS = 1  # the first position is an attention sink: its hidden state says nothing about the text
KMEANS_STEPS = 20
LOGIT_RMS = 1.5  # of the router logits over tokens and experts: confident routing that is still a mixture

CALIBRATION_THREADS = 2  # domains read side by side


def make_routers(
    dense: DenseModel, texts: dict[str, list[str]], num_experts: int, on_step: Callable[[int, int], None]
) -> list[torch.Tensor]:
    """A router weight [E, H] (float32) for every layer, the same for the same texts and number of experts.

    `on_step(done, total)` is called as the work goes on, from worker threads.
    """
    num_layers = dense.shape.num_layers
    batches = [_token_batch(dense, passages) for passages in texts.values()]
    tensors = _all_tensors(dense)
    models = [_dense_model(dense.shape, tensors) for _ in batches]  # they share their weights
    steps = itertools.count(1)  # taken from by several threads

    def count() -> None:
        on_step(next(steps), (len(batches) + 1) * num_layers)

    def read(model: LlamaModel, token_ids: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode():
            return _ffn_inputs(model, token_ids, count)

    def cluster(layer_id: int) -> torch.Tensor:
        with torch.inference_mode():
            router = router_from_inputs(torch.cat([inputs[layer_id] for inputs in seen]), num_experts, seed=layer_id)
        count()
        return router

    with _single_threaded_products(), ThreadPoolExecutor(CALIBRATION_THREADS) as pool:
        seen = list(pool.map(read, models, batches))
        return list(pool.map(cluster, range(num_layers)))


def router_from_inputs(inputs_NH: torch.Tensor, num_experts: int, seed: int) -> torch.Tensor:
    """Router weight [E, H] whose row e scores a token by its likeness to cluster e.

    Hidden states share a large common direction; with it projected out, clusters are about what differs between tokens.
    """
    mean_H = torch.nn.functional.normalize(inputs_NH.mean(dim=0), dim=0)
    centred_NH = inputs_NH - (inputs_NH @ mean_H)[:, None] * mean_H
    directions_NH = torch.nn.functional.normalize(centred_NH, dim=1)
    centroids_EH = spherical_kmeans(directions_NH, num_experts, seed)
    # A centroid lies in the span of the centred directions, so it is blind to the mean direction by itself.
    logits_NE = inputs_NH @ centroids_EH.T
    return centroids_EH * (LOGIT_RMS / logits_NE.square().mean().sqrt())


def spherical_kmeans(directions_NH: torch.Tensor, num_clusters: int, seed: int) -> torch.Tensor:
    """Unit centroids [num_clusters, H] of unit vectors by cosine similarity (Dhillon & Modha 2001); none is empty."""
    num_tokens = len(directions_NH)
    if num_clusters > num_tokens:
        raise ValueError(
            f"num_experts ({num_clusters}) must be at most the number of calibration tokens ({num_tokens}); "
            "ask for fewer experts"
        )
    centroids = _spread_seeds(directions_NH, num_clusters, seed)
    for _ in range(KMEANS_STEPS):
        similarity, cluster_ids = (directions_NH @ centroids.T).max(dim=1)
        membership = torch.nn.functional.one_hot(cluster_ids, num_clusters).to(directions_NH.dtype)
        sums = membership.T @ directions_NH
        empty = membership.sum(dim=0) == 0
        if empty.any():
            # The tokens that fit worst where they are start the empty clusters anew.
            sums[empty] = directions_NH[similarity.argsort(stable=True)[: int(empty.sum())]]
        centroids = torch.nn.functional.normalize(sums, dim=1)
    return centroids


def _spread_seeds(directions_NH: torch.Tensor, num_clusters: int, seed: int) -> torch.Tensor:
    """First centroids, drawn far from one another (k-means++, Arthur & Vassilvitskii 2007)."""
    rng = np.random.Generator(np.random.Philox(seed))
    chosen = [int(rng.integers(len(directions_NH)))]
    distance = 1 - directions_NH @ directions_NH[chosen[0]]
    for _ in range(1, num_clusters):
        weight = distance.clamp(min=0).double().numpy()
        weight[chosen] = 0
        # All remaining tokens being copies of chosen ones leaves nothing to prefer.
        if weight.sum() == 0:
            weight = np.ones_like(weight)
            weight[chosen] = 0
        chosen.append(int(rng.choice(len(weight), p=weight / weight.sum())))
        distance = torch.minimum(distance, 1 - directions_NH @ directions_NH[chosen[-1]])
    return directions_NH[chosen]


def _token_batch(dense: DenseModel, passages: list[str]) -> torch.Tensor:
    """The first tokens of every passage, [passages, PASSAGE_TOKENS]."""
    rows = [dense.tokenizer.encode(text).ids[:PASSAGE_TOKENS] for text in passages]
    assert all(len(row) == PASSAGE_TOKENS for row in rows), f"a calibration text is under {PASSAGE_TOKENS} tokens"
    return torch.tensor(rows)


def _all_tensors(dense: DenseModel) -> dict[str, torch.Tensor]:
    tensors = {name.removeprefix("model."): tensor for name, tensor in dense.outer_tensors().items()}
    for layer_id in range(dense.shape.num_layers):
        layer = dense.layer_tensors(layer_id)
        tensors |= {f"layers.{layer_id}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def _dense_model(shape: DenseShape, tensors: dict[str, torch.Tensor]) -> LlamaModel:
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )
    with torch.device("meta"):
        model = LlamaModel(config)
    model.load_state_dict(tensors, assign=True)
    # The rotary frequencies are no weights: they are computed, and so far only on the meta device.
    model.rotary_emb = type(model.rotary_emb)(config)
    return model.eval()


def _ffn_inputs(model: LlamaModel, token_ids: torch.Tensor, on_layer: Callable[[], None]) -> list[torch.Tensor]:
    """Each layer's FFN inputs [N, H] while the model reads a batch of passages."""
    inputs: list[torch.Tensor] = []

    def see(_module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        inputs.append(args[0][:, SKIPPED_TOKENS:].flatten(0, 1))
        on_layer()

    for layer in model.layers:
        layer.get_submodule("mlp").register_forward_pre_hook(see)
    model(input_ids=token_ids, use_cache=False)
    return inputs


@contextmanager
def _single_threaded_products() -> Iterator[None]:
    """The last bits of a matrix product depend on how it is cut among threads: uncut, every caller gets the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
