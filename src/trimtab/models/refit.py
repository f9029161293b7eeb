"""New weights for a model that serves: first all files are checked, then every value is written where it is.

Whatever others hold stays the same object: routing tables, kernels, packed layers, tied parameters. Tensors are read
one at a time, so memory is the model and one tensor, as at loading.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.linear import PackedLinear
from trimtab.models import attention_plug
from trimtab.models.checkpoint import Checkpoint
from trimtab.models.errors import CheckpointError
from trimtab.models.functional_weights import FunctionalWeight
from trimtab.models.language_model import LanguageModel
from trimtab.models.loading import read_expert
from trimtab.models.network import CONFIG_FILE, build_network, network_class, parameter_dtypes, read_config
from trimtab.models.weight_map import Conversion, WeightMap, map_weights

logger = logging.getLogger(__name__)

# Keys of a configuration that no forward reads: a trainer writes others than it found.
_WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def check_weights(model: LanguageModel, path: str | Path) -> str:
    """Why the files at `path` cannot take the place of the model's weights, by name; empty where they can.

    Reads configuration and headers; of the tensors only those that the model's form depends on (tied ones, and experts
    that are to be quantized and must be finite). Changes nothing.
    """
    try:
        _Source(model, Path(path)).check_values()
    except (ValueError, OSError) as error:
        return str(error)
    return ""


@torch.inference_mode()
def refit(model: LanguageModel, path: str | Path, placement: Placement | None = None, rank: int = 0) -> None:
    """Writes the weights at `path` over the model's: the dense part, and of the experts those that `placement`, the one
    in force, has in this rank's slots, replicas included. Without a placement, slot e of every layer is expert e.

    Follows `check_weights`, which found nothing. An error after the first value was written leaves mixed weights: the
    model must not compute until a refit has succeeded. Called on: the runner's thread, between forwards.
    """
    source = _Source(model, Path(path))
    for conversion in source.weights.dense:
        for name, tensor in source.read(conversion):
            write_parameter(model.network, name, tensor)
    for layer in model.moe_layers:
        source.write_experts(layer.ordinal, placement, rank)
    logger.info("weights of %s replaced by those of %s", model.spec.path, path)


def write_parameter(network: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Other values for a parameter or buffer of a loaded network, in whatever form it is held."""
    owner, _, key = name.rpartition(".")
    module = network.get_submodule(owner)
    if isinstance(module, PackedLinear):
        (module.load_weight if key == "weight" else module.load_bias)(tensor)
        return
    held = module._parameters.get(key)
    if isinstance(held, FunctionalWeight):
        held.load(tensor)
        return
    values = module._buffers.get(key) if held is None else held
    assert values is not None and values.shape == tensor.shape, f"{name} is not held as {tuple(tensor.shape)}"
    values.copy_(tensor)


class _Source:
    """The files at a path as weights of a model that is loaded already. Raises ValueError naming what does not fit."""

    def __init__(self, model: LanguageModel, path: Path) -> None:
        self.model = model
        self.spec = model.spec
        self.path = path
        _check_config(self.spec.architecture, self.spec.hf_config, path)
        # The loaded network has other modules by now; rules and shapes are those of a fresh one, without memory.
        self.trial: PreTrainedModel = build_network(self.spec.hf_config, self.spec.dtype, attention_plug.IMPLEMENTATION)
        self.checkpoint = Checkpoint.open(path)
        self.weights: WeightMap = map_weights(self.trial, self.checkpoint)
        self.dtypes = parameter_dtypes(self.trial, self.spec.dtype)

    def read(self, conversion: Conversion) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the dense part as the loaded model keeps them."""
        for name, tensor in conversion.read(self.trial, self.checkpoint).items():
            yield name, tensor.to(self.dtypes.get(name, tensor.dtype))
        self._release(conversion)

    def write_experts(self, ordinal: int, placement: Placement | None, rank: int) -> None:
        layer, found = self.model.moe_layers[ordinal], self.spec.moe_layers[ordinal]
        if placement is None:
            placement, row = Placement.identity(Topology(layer.num_experts), 1), 0
        else:
            row = ordinal
        slots = placement.topology.slots_of(rank)
        assert len(slots) == layer.kernel.num_slots, f"{len(slots)} slots placed, {layer.kernel.num_slots} there"
        module = self.model.network.get_submodule(found.module_name)
        conversions = self.weights.experts[found.module_name]
        for position, slot in enumerate(slots):
            expert = int(placement.slot_to_expert[row, slot])
            tensors = read_expert(
                conversions, self.trial, module, self.checkpoint, expert, layer.num_experts, self.spec.dtype
            )
            layer.kernel.load_slot(position, tensors)
            for conversion in conversions:
                conversion.release_expert(self.checkpoint, expert, layer.num_experts)

    def check_values(self) -> None:
        self._check_ties()
        if self.spec.quantization is not None:
            for conversions in self.weights.experts.values():
                for conversion in conversions:
                    self._check_finite(conversion)

    def _check_ties(self) -> None:
        """What shares memory must go on sharing it, and nothing else can begin to."""
        ours = {frozenset(pair) for pair in self.model.tied.items()}
        theirs = {frozenset(pair) for pair in self.weights.tied.items()}
        for target, source in self.weights.stored_twice.items():
            if torch.equal(self._parameter(target), self._parameter(source)):
                theirs.add(frozenset((target, source)))
        for pair in sorted(map(sorted, ours ^ theirs)):
            here, there = ("one tensor", "two") if frozenset(pair) in ours else ("two tensors", "one")
            raise CheckpointError(
                f"{pair[0]} and {pair[1]} are {here} in the loaded model and {there} in {self.path}; start anew with it"
            )

    def _parameter(self, name: str) -> Tensor:
        for conversion in self.weights.dense:
            if conversion.target == name:
                return dict(self.read(conversion))[name]
        raise AssertionError(f"{name} is stored twice and yet made by nothing")

    def _check_finite(self, conversion: Conversion) -> None:
        for name in conversion.names():
            if not bool(self.checkpoint.read(name).to(self.spec.dtype).isfinite().all()):
                raise CheckpointError(
                    f"tensor {name} in {self.checkpoint.tensors[name].file} is not finite in {self.spec.dtype} and "
                    f"cannot be stored as {self.spec.quantization}"
                )
            self.checkpoint.release(name)

    def _release(self, conversion: Conversion) -> None:
        for name in conversion.names():
            self.checkpoint.release(name)


def _check_config(architecture: str, loaded: PreTrainedConfig, path: Path) -> None:
    """The configuration at `path` describes the same computation as that of the loaded model."""
    found = read_config(path)
    if (name := network_class(found).__name__) != architecture:
        raise CheckpointError(f"{path} is a {name} and the loaded model a {architecture}; start anew with it")
    ours, theirs = _relevant(loaded.to_dict()), _relevant(found.to_dict())
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise CheckpointError(
                f"{key} is {theirs.get(key)!r} in {path / CONFIG_FILE} and {ours.get(key)!r} in the loaded model; "
                "start anew with it"
            )


def _relevant(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """What a forward may read, by dotted name: configurations lie inside one another, each with such keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in _WITHOUT_EFFECT or str(key).startswith("_"):
            continue
        if isinstance(value, Mapping) and value:
            found |= _relevant(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
