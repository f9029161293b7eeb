"""Which stored tensors make which parameter, by transformers' own conversion mapping, checked against the headers.

Checkpoints name and split their tensors in many ways (one tensor per expert as w1/w3 or gate_proj/up_proj, fused 3-D
stacks, merged qkv, ...). transformers carries the rules; here they are applied to names first, to shapes on the meta
device second, and to real tensors only when loading, for experts one expert at a time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from trimtab.models.checkpoint import Checkpoint
from trimtab.models.errors import CheckpointError
from trimtab.models.experts_plug import is_experts_module

logger = logging.getLogger(__name__)

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT_NUMBER = re.compile(r"experts\.(\d+)\.")


@dataclass(slots=True)
class Conversion:
    """Stored tensors that become parameters together. `sources`: pattern of the rule -> stored names, in order."""

    target: str
    rule: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> Iterable[str]:
        return (name for names in self.sources.values() for name in names)

    def convert(self, network: PreTrainedModel, tensors: Mapping[str, list[Tensor] | Tensor]) -> dict[str, Tensor]:
        """Parameters by full name, from the tensors of each pattern (a list, or one stack of them)."""
        if self.rule is None:
            [[tensor]] = tensors.values()
            return {self.target: tensor}
        # The rule takes tensors as they are, and gives up its hold of them before it computes.
        self.rule.collected_tensors.update(tensors)  # type: ignore[arg-type]
        converted = self.rule.convert(self.target, model=network, config=network.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def read(self, network: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The parameters; views of the files where no rule had to compute."""
        tensors = {pattern: [checkpoint.read(name) for name in names] for pattern, names in self.sources.items()}
        return self.convert(network, tensors)

    def read_expert(
        self, network: PreTrainedModel, checkpoint: Checkpoint, expert: int, num_experts: int
    ) -> dict[str, Tensor]:
        """One expert's part of the parameters of an experts module, without the expert axis."""
        # An expert's own tensor goes in as a stack of one: given as a list, it would be copied to be stacked.
        tensors: dict[str, list[Tensor] | Tensor] = {
            pattern: [checkpoint.read(names[0])[expert : expert + 1]]
            if self.is_stacked(names, num_experts, checkpoint)
            else checkpoint.read(names[expert]).unsqueeze(0)
            for pattern, names in self.sources.items()
        }
        return {name: value[0] for name, value in self.convert(network, tensors).items()}

    def release_expert(self, checkpoint: Checkpoint, expert: int, num_experts: int) -> None:
        """Lets go what `read_expert` gave, once it was copied: a layer's experts are most of a model."""
        for names in self.sources.values():
            checkpoint.release(names[0] if self.is_stacked(names, num_experts, checkpoint) else names[expert])

    def expert_bytes(self, checkpoint: Checkpoint, num_experts: int) -> int:
        """Stored bytes of one expert's part; every expert's is as large."""
        total = 0
        for names in self.sources.values():
            stored = checkpoint.tensors[names[0]]
            parts = num_experts if self.is_stacked(names, num_experts, checkpoint) else 1
            total += (stored.end - stored.start) // parts
        return total

    def is_stacked(self, names: list[str], num_experts: int, checkpoint: Checkpoint) -> bool:
        """True when one stored tensor holds all experts along its first axis."""
        if self.rule is not None and any("*." in pattern for pattern in self.rule.source_patterns):
            return False
        return len(names) == 1 and checkpoint.tensors[names[0]].shape[:1] == (num_experts,)


@dataclass(slots=True)
class WeightMap:
    """The whole plan: dense conversions, experts conversions by module name, and what shares its tensor with what."""

    dense: list[Conversion]
    experts: dict[str, list[Conversion]]
    tied: dict[str, str]  # parameter absent from the files -> the parameter it shares
    stored_twice: dict[str, str]  # parameter that the configuration ties to another, though both are stored


def map_weights(network: PreTrainedModel, checkpoint: Checkpoint) -> WeightMap:
    """`network` is on the meta device. Raises CheckpointError naming the tensor that is missing, unexpected, of a
    wrong shape or of a dtype that cannot be read."""
    return _Mapper(network, checkpoint).map()


class _Mapper:
    def __init__(self, network: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self.network = network
        self.checkpoint = checkpoint
        self.state: dict[str, Tensor] = network.state_dict()
        self.num_experts = {
            name: next(module.parameters()).shape[0]
            for name, module in network.named_modules()
            if is_experts_module(module)
        }

    def map(self) -> WeightMap:
        made: set[str] = set()
        dense: list[Conversion] = []
        experts: dict[str, list[Conversion]] = {name: [] for name in self.num_experts}
        for conversion in self._conversions():
            module_name = conversion.target.rpartition(".")[0]
            if module_name in experts:
                made |= self._check_experts(conversion, self.num_experts[module_name])
                experts[module_name].append(conversion)
            else:
                made |= self._check_dense(conversion)
                dense.append(conversion)
        tied, stored_twice = self._ties(made)
        missing = [name for name in self.state if name not in made and name not in tied]
        if missing:
            raise CheckpointError(
                f"{self.checkpoint.path} has no tensor for {missing[0]} ({len(missing)} missing); "
                "download the checkpoint again"
            )
        return WeightMap(dense, experts, tied, stored_twice)

    def _conversions(self) -> list[Conversion]:
        rules = get_model_conversion_mapping(self.network)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        found: dict[str, Conversion] = {}
        unexpected: list[str] = []
        for name in sorted(self.checkpoint.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, self.network.base_model_prefix, self.state)
            if target not in self.state and name in self.state:  # already under its final name
                target, pattern = name, None
            if target not in self.state:
                unexpected.append(name)
                continue
            rule = by_pattern[pattern] if pattern else None
            conversion = found.setdefault(target, Conversion(target, rule))
            if conversion.rule is not rule or (rule is None and conversion.sources):
                raise CheckpointError(
                    f"tensors {next(iter(conversion.names()))} and {name} in {self.checkpoint.path} both make {target}"
                )
            conversion.sources.setdefault(pattern or name, []).append(name)
        self._refuse_unexpected(unexpected)
        return list(found.values())

    def _refuse_unexpected(self, unexpected: list[str]) -> None:
        """Extra prediction layers, and what the network's class itself declares droppable, are skipped."""
        num_layers = self.network.config.get_text_config().num_hidden_layers
        extra = {
            name for name in unexpected if (found := _LAYER_NUMBER.search(name)) and int(found.group(1)) >= num_layers
        }
        if extra:
            self._tell_of_extra_layers(extra, num_layers)
        droppable = [*(self.network._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        left = [
            name
            for name in unexpected
            if name not in extra and not any(re.search(pattern, name) for pattern in droppable)
        ]
        if left:
            raise CheckpointError(
                f"tensor {left[0]} in {self.checkpoint.tensors[left[0]].file} is not part of "
                f"{type(self.network).__name__} ({len(left)} unexpected); the files do not belong to this configuration"
            )

    def _tell_of_extra_layers(self, extra: set[str], num_layers: int) -> None:
        """A prediction layer has tensors of its own; one that looks like any other layer was meant to be run."""
        suffixes: dict[int, set[str]] = {}
        for name in self.checkpoint.tensors:
            if found := _LAYER_NUMBER.search(name):
                suffixes.setdefault(int(found.group(1)), set()).add(name[found.end() :])
        usual = set().union(*(names for layer, names in suffixes.items() if layer < num_layers))
        ordinary = [layer for layer, names in suffixes.items() if layer >= num_layers and names <= usual]
        if ordinary:
            logger.warning(
                "%s: num_hidden_layers (%d) leaves out layers that the files hold, up to layer %d; restore the "
                "configuration if that is not meant", self.checkpoint.path, num_layers, max(ordinary),
            )  # fmt: skip
        else:
            logger.info(
                "%s: %d tensor(s) of extra prediction layers (from layer %d on) are not used",
                self.checkpoint.path, len(extra), num_layers,
            )  # fmt: skip

    def _check_dense(self, conversion: Conversion) -> set[str]:
        metas = {
            pattern: [self._meta(name, conversion) for name in names] for pattern, names in conversion.sources.items()
        }
        return self._check_shapes(conversion, metas, is_one_expert=False)

    def _check_experts(self, conversion: Conversion, num_experts: int) -> set[str]:
        """Every expert is there and shaped like the first, and the first one's tensors make the module's shape."""
        rule = conversion.rule
        if rule is not None and set(conversion.sources) != set(rule.source_patterns):
            absent = sorted(set(rule.source_patterns) - set(conversion.sources))[0]
            raise CheckpointError(
                f"{self.checkpoint.path} has no tensor {absent} to make {conversion.target}; download it again"
            )
        metas: dict[str, list[Tensor]] = {}
        for pattern, names in conversion.sources.items():
            all_metas = [self._meta(name, conversion) for name in names]
            if conversion.is_stacked(names, num_experts, self.checkpoint):
                metas[pattern] = [all_metas[0][:1]]
            elif rule is None:  # one tensor under the final name, but not one entry per expert
                raise self._wrong_shape(names[0], tuple(self.state[conversion.target].shape))
            else:
                self._refuse_missing_experts(conversion, names, num_experts)
                for name, meta in zip(names, all_metas, strict=True):
                    if meta.shape != all_metas[0].shape:
                        raise self._wrong_shape(name, tuple(all_metas[0].shape))
                metas[pattern] = all_metas[:1]
        return self._check_shapes(conversion, metas, is_one_expert=True)

    def _refuse_missing_experts(self, conversion: Conversion, names: list[str], num_experts: int) -> None:
        numbers = [int(found.group(1)) if (found := _EXPERT_NUMBER.search(name)) else -1 for name in names]
        for position in range(num_experts):
            if position >= len(numbers) or numbers[position] != position:
                name = _EXPERT_NUMBER.sub(f"experts.{position}.", names[0])
                raise CheckpointError(
                    f"{self.checkpoint.path} has no tensor {name} ({len(names)} of {num_experts} experts found for "
                    f"{conversion.target}); download it again"
                )
        if len(names) > num_experts:
            raise CheckpointError(
                f"tensor {names[num_experts]} in {self.checkpoint.path} is of expert {numbers[num_experts]}, but the "
                f"configuration has {num_experts} experts"
            )

    def _check_shapes(self, conversion: Conversion, metas: dict[str, list[Tensor]], *, is_one_expert: bool) -> set[str]:
        first = next(iter(conversion.names()))
        try:
            results = conversion.convert(self.network, metas)
        except Exception as error:  # a rule fails on shapes it does not expect, each in its own way
            shape = self.checkpoint.tensors[first].shape
            raise CheckpointError(f"tensor {first} (shape {shape}) cannot make {conversion.target}: {error}") from error
        for name, result in results.items():
            if name not in self.state:
                raise CheckpointError(f"tensor {first} would make {name}, which {type(self.network).__name__} has not")
            expected = tuple(self.state[name].shape)
            if is_one_expert:
                expected = (1, *expected[1:])
            if tuple(result.shape) != expected:
                raise self._wrong_shape(first, tuple(self.state[name].shape), name)
        return set(results)

    def _meta(self, name: str, conversion: Conversion) -> Tensor:
        stored = self.checkpoint.tensors[name]
        if self.state[conversion.target].is_floating_point() and stored.dtype not in READABLE:
            raise CheckpointError(
                f"tensor {name} in {stored.file} has dtype {stored.dtype}; weights must be one of "
                f"{', '.join(str(dtype) for dtype in READABLE)} (quantized files cannot be read yet)"
            )
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    def _wrong_shape(self, name: str, expected: tuple[int, ...], target: str = "") -> CheckpointError:
        stored = self.checkpoint.tensors[name]
        of = f" of {target}" if target and target != name else ""
        return CheckpointError(
            f"tensor {name} in {stored.file} has shape {stored.shape}; the configuration says {expected}{of}"
        )

    def _ties(self, made: set[str]) -> tuple[dict[str, str], dict[str, str]]:
        tied: dict[str, str] = {}
        stored_twice: dict[str, str] = {}
        for target, source in self.network.all_tied_weights_keys.items():
            if target in made and source in made:
                stored_twice[target] = source
            elif source in made:
                tied[target] = source
            elif target in made:
                tied[source] = target
        return tied, stored_twice
