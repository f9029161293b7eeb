"""From safetensors to a LanguageModel: tensors are streamed one at a time into the form they are computed in.

The network is built on the meta device. Experts modules never get their stacked parameters: each expert goes straight
into its slot of the MoE layer's kernel. A rank reads the dense part and the experts its slots hold, nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab.experts.data.dispatch.base import Dispatcher
from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.data.moe_layer import MoELayer
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.formats.base import ExpertTensors
from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.linear import pack_linear
from trimtab.models import attention_plug, experts_plug
from trimtab.models.checkpoint import Checkpoint
from trimtab.models.errors import CheckpointError, UnsupportedModelError
from trimtab.models.functional_weights import router_weights, wrap_router_weights
from trimtab.models.language_model import LanguageModel
from trimtab.models.network import build_network, parameter_dtypes
from trimtab.models.norms import replace_norms
from trimtab.models.probe import MoESpec
from trimtab.models.spec import ModelSpec
from trimtab.models.weight_map import Conversion, WeightMap, map_weights

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def load_model(
    spec: ModelSpec,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    placement: Placement | None = None,
    rank: int = 0,
    token_group: int = 0,
    dispatcher: Dispatcher | None = None,
) -> LanguageModel:
    """`placement` says which experts `rank` holds in which slots; without one, slot e of every layer is expert e.

    `dispatcher` serves all layers where other ranks hold the other slots; `token_group` spreads the groups' tokens
    over replicas. `progress` counts what this rank reads: the dense part and the experts of its slots.

    Raises CheckpointError naming the tensor or file that is at fault.
    """
    network = build_network(spec.hf_config, spec.dtype, attention_plug.IMPLEMENTATION)
    checkpoint = Checkpoint.open(spec.path)
    weights = map_weights(network, checkpoint)
    dtypes = parameter_dtypes(network, spec.dtype)
    stacks = {layer.module_name: network.get_submodule(layer.module_name) for layer in spec.moe_layers}
    for module in stacks.values():
        module._parameters.clear()
    num_experts_read = {
        layer.module_name: layer.num_experts if placement is None else placement.topology.slots_per_rank
        for layer in spec.moe_layers
    }
    meter = _Meter(checkpoint, progress, _share_bytes(spec, checkpoint, weights, num_experts_read))
    loader = _Loader(spec, network, checkpoint, dtypes, torch.device(device), meter)
    loader.compute_buffers()
    loader.load_dense(weights)
    loader.pack_linear_layers()
    moe_layers = []
    for layer in spec.moe_layers:
        moe_layer = loader.load_experts(layer, weights.experts[layer.module_name], placement, rank, token_group)
        if dispatcher is not None:
            moe_layer.dispatcher = dispatcher
        experts_plug.bind_moe_layer(stacks[layer.module_name], moe_layer)
        moe_layers.append(moe_layer)
    loader.check_complete()
    replace_norms(network, spec.dtype)
    wrap_router_weights(network, router_weights(network))
    return LanguageModel(spec, network, moe_layers, loader.tied)


def read_expert(
    conversions: Sequence[Conversion],
    network: PreTrainedModel,
    module: nn.Module,
    checkpoint: Checkpoint,
    expert: int,
    num_experts: int,
    dtype: torch.dtype,
) -> ExpertTensors:
    """One expert of the experts module `module` in canonical layout, by the conversions of that module's weights."""
    tensors: dict[str, Tensor] = {}
    for conversion in conversions:
        tensors |= conversion.read_expert(network, checkpoint, expert, num_experts)
    in_dtype = {name.rpartition(".")[2]: tensor.to(dtype) for name, tensor in tensors.items()}
    return experts_plug.to_canonical(module, in_dtype)


class _Meter:
    """Bytes read so far; releases what has been read."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None, total: int) -> None:
        self.checkpoint = checkpoint
        self.progress = progress
        self.total = total
        self.done = 0

    def finish(self, conversion: Conversion, num_bytes: int | None = None) -> None:
        """`num_bytes`: where less than all of the conversion's tensors was read."""
        for name in conversion.names():
            self.checkpoint.release(name)
        self.done += _stored_bytes(conversion, self.checkpoint) if num_bytes is None else num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _stored_bytes(conversion: Conversion, checkpoint: Checkpoint) -> int:
    return sum(checkpoint.tensors[name].end - checkpoint.tensors[name].start for name in conversion.names())


def _share_bytes(
    spec: ModelSpec, checkpoint: Checkpoint, weights: WeightMap, num_experts_read: Mapping[str, int]
) -> int:
    """Bytes a rank reads: all of the dense part, and of each MoE layer as many experts as it has slots there."""
    total = sum(_stored_bytes(conversion, checkpoint) for conversion in weights.dense)
    for layer in spec.moe_layers:
        for conversion in weights.experts[layer.module_name]:
            total += num_experts_read[layer.module_name] * conversion.expert_bytes(checkpoint, layer.num_experts)
    return total


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        network: PreTrainedModel,
        checkpoint: Checkpoint,
        dtypes: dict[str, torch.dtype],
        device: torch.device,
        meter: _Meter,
    ) -> None:
        self.spec = spec
        self.network = network
        self.checkpoint = checkpoint
        self.dtypes = dtypes
        self.device = device
        self.meter = meter
        self.tied: dict[str, str] = {}

    def compute_buffers(self) -> None:
        """Buffers that no checkpoint stores (rotary frequencies) are computed by transformers' own initialisation.

        Runs while the parameters are still on the meta device, so it can write nothing else.
        """
        owners: dict[str, PreTrainedModel] = {}
        for name, module in self.network.named_modules():
            if isinstance(module, PreTrainedModel):
                owners[name] = module
        for name, module in self.network.named_modules():
            computed = module._non_persistent_buffers_set & {
                key for key, value in module._buffers.items() if value is not None
            }
            if not computed:
                continue
            for key in computed:
                buffer = module._buffers[key]
                assert buffer is not None
                module._buffers[key] = _unset(buffer, self.device)
            owner = max(
                (prefix for prefix in owners if name == prefix or name.startswith(prefix + ".") or not prefix), key=len
            )
            owners[owner]._init_weights(module)
            for key in computed:
                if _is_unset(module._buffers[key]):
                    raise UnsupportedModelError(
                        f"{self.spec.architecture} is not supported: "
                        f"buffer {name}.{key} is neither stored nor recomputed by transformers"
                    )

    def load_dense(self, weights: WeightMap) -> None:
        for conversion in weights.dense:
            for name, tensor in conversion.read(self.network, self.checkpoint).items():
                self._set(name, tensor.to(device=self.device, dtype=self.dtypes.get(name), copy=True))
            self.meter.finish(conversion)
        self.tied |= weights.tied
        for target, source in weights.tied.items():
            self._set(target, self._get(source))
        for target, source in weights.stored_twice.items():
            if torch.equal(self._get(target), self._get(source)):
                self._set(target, self._get(source))
                self.tied[target] = source
            else:
                logger.warning(
                    "%s: the configuration ties %s to %s, but the files hold two different tensors; "
                    "both are used as stored",
                    self.spec.path, target, source,
                )  # fmt: skip

    def pack_linear_layers(self) -> None:
        """One layer at a time, so that never more than one weight is held twice."""
        shared = self._shared_storage()
        for name, module in list(self.network.named_modules()):
            if type(module) is not nn.Linear or name in self.spec.plain_linears:
                continue
            packed = pack_linear(
                module.weight.detach(),
                None if module.bias is None else module.bias.detach(),
                shared=module.weight.data_ptr() in shared,
            )
            module._parameters.clear()
            parent, _, child = name.rpartition(".")
            setattr(self.network.get_submodule(parent), child, packed)

    def load_experts(
        self, layer: MoESpec, conversions: list[Conversion], placement: Placement | None, rank: int, token_group: int
    ) -> MoELayer:
        if placement is None:
            placement, row = Placement.identity(Topology(layer.num_experts), 1), 0
        else:
            row = layer.ordinal
        slots = placement.topology.slots_of(rank)
        kernel = make_expert_kernel(layer.shape, len(slots), self.spec.dtype, self.device, self.spec.quantization)
        module = self.network.get_submodule(layer.module_name)
        for position, slot in enumerate(slots):
            expert = int(placement.slot_to_expert[row, slot])
            tensors = read_expert(
                conversions, self.network, module, self.checkpoint, expert, layer.num_experts, self.spec.dtype
            )
            kernel.load_slot(position, tensors)
            for conversion in conversions:
                conversion.release_expert(self.checkpoint, expert, layer.num_experts)
        for conversion in conversions:
            self.meter.finish(conversion, len(slots) * conversion.expert_bytes(self.checkpoint, layer.num_experts))
        return MoELayer(
            ordinal=layer.ordinal,
            layer_id=layer.layer_id,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            shape=layer.shape,
            kernel=kernel,
            routing_table=RoutingTable(placement, row, token_group),
        )

    def check_complete(self) -> None:
        """Nothing of the network may be left without values."""
        for name, module in self.network.named_modules():
            for key, value in (*module.__dict__.items(), *module._parameters.items(), *module._buffers.items()):
                if isinstance(value, Tensor) and value.is_meta:
                    raise UnsupportedModelError(
                        f"{self.spec.architecture} is not supported: {name}.{key} has no values after loading"
                    )

    def _shared_storage(self) -> set[int]:
        """Addresses of parameters that more than one module holds (an output head tied to the embedding)."""
        seen: set[int] = set()
        shared: set[int] = set()
        for module in self.network.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    (shared if parameter.data_ptr() in seen else seen).add(parameter.data_ptr())
        return shared

    def _get(self, name: str) -> Tensor:
        return self.network.get_parameter_or_buffer(name)

    def _set(self, name: str, tensor: Tensor) -> None:
        parent, _, key = name.rpartition(".")
        module = self.network.get_submodule(parent)
        if key in module._buffers:
            module._buffers[key] = tensor.detach()
        elif key in module._parameters:
            parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            module._parameters[key] = parameter
        else:
            raise CheckpointError(f"{name} is not a parameter of {self.spec.architecture}")


def _unset(buffer: Tensor, device: torch.device) -> Tensor:
    filling = float("nan") if buffer.is_floating_point() else 0 if buffer.dtype == torch.bool else -99
    return torch.full(buffer.shape, filling, dtype=buffer.dtype, device=device)


def _is_unset(buffer: Tensor | None) -> bool:
    assert buffer is not None
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    return bool(buffer.numel()) and bool((buffer == -99).all())
