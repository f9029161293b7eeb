"""Finds where a block's router selects experts, and puts other experts there; the router's arithmetic stays its own.

Routers of transformers select by `torch.topk` over the experts' scores and derive the weights from what it returned:
its values, or scores gathered at its indices, normalised and scaled as the architecture does. So the selection is
replaced in the result of that one call: indices become the captured ones, values the scores at them, through which
gradients flow as before. Groups are selected by an earlier `topk`; the captured experts' groups win there, or else
routers that take weights from masked scores would give weight 0.

Nothing of this is assumed: `find_selection` tries it on each block with the hidden states at hand, or refuses by name.
"""

# T tokens  E experts  K top-k  G groups

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.models.errors import UnsupportedModelError
from trimtab.replay.alignment import LIVE
from trimtab.replay.layers import ReplayLayer, intercept, read_choice

_TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selecting call: the `number`-th `topk` over all experts within a forward of the block's child `scope`, or of
    the block itself where that is empty."""

    scope: str
    number: int


# Blocks that were tried, by what a trial depends on. No module is kept alive by it.
_TRIED: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Selection]] = WeakKeyDictionary()


def find_selection(
    layer: ReplayLayer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_experts: int
) -> Selection:
    """Tries the layer's block with the arguments of a call of `forward`, once in each mode, and remembers.

    Raises UnsupportedModelError naming the class where forced choices would not be the architecture's own.
    """
    block = layer.block
    key = (block.training, num_experts, *(type(child) for child in block.children()))
    known = _TRIED.setdefault(block, {})
    if key not in known:
        known[key] = _SelectionFinder(layer, forward, args, kwargs, num_experts).find()
    return known[key]


class ForcedTopK(TorchFunctionMode):
    """While entered, the selecting `topk` gives `forced` [T, K]; rows of LIVE keep the router's choice."""

    def __init__(self, forced: Tensor, num_experts: int, number: int, name: str) -> None:
        super().__init__()
        self.forced = forced
        self.num_experts = num_experts
        self.number = number
        self.name = name
        self.seen = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _TOPK:
            return func(*args, **(kwargs or {}))
        call = _TopKCall.of(args, kwargs or {})
        if call.selects_groups(self.num_experts, len(self.forced)):
            return self._select_groups(func, call)
        result = func(*args, **(kwargs or {}))
        if not call.selects_experts(self.num_experts, *self.forced.shape):
            return result
        self.seen += 1
        if self.seen - 1 != self.number:
            return result
        forced = self.forced.to(result.indices.device).reshape(result.indices.shape)
        indices = torch.where(forced == LIVE, result.indices, forced)
        return torch.return_types.topk((call.scores.gather(-1, indices), indices))

    def _select_groups(self, func: Callable[..., Any], call: _TopKCall) -> Any:
        num_groups = call.scores.shape[-1]
        forced = self.forced.to(call.scores.device)
        groups = forced.div(self.num_experts // num_groups, rounding_mode="floor")
        wanted = torch.zeros(len(groups), num_groups + 1, dtype=torch.bool, device=groups.device)
        wanted.scatter_(1, torch.where(forced == LIVE, num_groups, groups), True)
        wanted = wanted[:, :num_groups]
        counts = wanted.sum(dim=1)
        if bool((counts > call.k).any()):
            row = int(counts.argmax())
            raise ValueError(
                f"{self.name}: experts {self.forced[row].tolist()} of token {row} lie in {int(counts[row])} groups, "
                f"the router takes {call.k} of {num_groups} per token; the routes are of another model"
            )
        return func(call.scores.masked_fill(wanted, torch.inf), call.k, **call.options)


@dataclass(frozen=True, slots=True)
class _TopKCall:
    scores: Tensor
    k: int
    options: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _TopKCall:
        given = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | kwargs
        scores, k = given.pop("input"), int(given.pop("k"))
        return cls(scores, k, given)

    @property
    def over_last_axis(self) -> bool:
        return self.options.get("dim", -1) in (-1, self.scores.dim() - 1) and bool(self.options.get("largest", True))

    def selects_experts(self, num_experts: int, num_tokens: int, top_k: int) -> bool:
        """Whether this is a choice of K of all E for each of the T tokens."""
        shape = (self.scores.shape[-1], self.k, self.scores.numel())
        return self.over_last_axis and shape == (num_experts, top_k, num_tokens * num_experts)

    def selects_groups(self, num_experts: int, num_tokens: int) -> bool:
        """Whether this is a choice of groups, of equally many experts each, for each of the T tokens."""
        if not self.over_last_axis or self.scores.dim() != 2 or len(self.scores) != num_tokens:
            return False
        num_groups = self.scores.shape[-1]
        return 1 < num_groups < num_experts and num_experts % num_groups == 0 and self.k < num_groups


class _ObservedTopK(TorchFunctionMode):
    """Keeps every `topk` that may be the selecting one, with the child of the block that was running."""

    def __init__(self, trial: _Trial) -> None:
        super().__init__()
        self.trial = trial

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.trial.calls.append((_TopKCall.of(args, kwargs or {}), result.indices, self.trial.running))
        return result


@dataclass(slots=True)
class _Trial:
    """One run of a block whose experts compute nothing."""

    running: str = ""  # the child that runs; empty in the block's own code
    calls: list[tuple[_TopKCall, Tensor, str]] = field(default_factory=list)
    index: Tensor | None = None  # [T, K], as the experts were given it
    weights: Tensor | None = None

    def run_child(self, child: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.running = self.running, child
        try:
            return forward(*args, **kwargs)
        finally:
            self.running = before

    def run_experts(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        index, weights = read_choice(args, kwargs)
        self.index, self.weights = index.detach().clone(), weights.detach().clone()
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return torch.zeros_like(hidden)


class _SelectionFinder:
    """Tries a block with the arguments of a call. Every run sees the same random numbers, and gradients are off."""

    def __init__(
        self,
        layer: ReplayLayer,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_experts: int,
    ) -> None:
        self.layer = layer
        self.forward = forward
        self.args = args
        # A block that attends as well (a whole decoder layer) must not write its keys and values twice.
        self.kwargs = {name: value for name, value in kwargs.items() if "past_key_value" not in name}
        self.num_experts = num_experts

    def find(self) -> Selection:
        own = self._run()
        if own.index is None or own.weights is None:
            self._refuse("it does not call its experts")
        index, weights = own.index, own.weights
        if index.dim() != 2 or weights.shape != index.shape:
            self._refuse(f"its experts are given indices {list(index.shape)} and weights {list(weights.shape)}")
        selection = self._locate(own, index)
        again, reversed_, others = (
            self._run(selection, forced) for forced in (index, index.flip(1), index.roll(1, dims=0))
        )
        if not self._gave(again, index) or not torch.equal(torch.nan_to_num(again.weights), torch.nan_to_num(weights)):
            self._refuse("its own choice, forced, does not give its own weights")
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if weights.dtype in (torch.float32, torch.float64) else {"rtol": 2e-2}
        if not self._gave(reversed_, index.flip(1)) or not torch.allclose(
            reversed_.weights.flip(1), weights, equal_nan=True, **tolerance
        ):
            self._refuse("its weights do not follow its choice when the order is reversed")
        if not self._gave(others, index.roll(1, dims=0)):
            self._refuse("another choice does not reach its experts")
        return selection

    def _locate(self, own: _Trial, index: Tensor) -> Selection:
        num_tokens, top_k = index.shape
        numbers: dict[str, int] = {}
        found: list[Selection] = []
        for call, indices, scope in own.calls:
            if call.selects_experts(self.num_experts, num_tokens, top_k):
                number = numbers[scope] = numbers.get(scope, -1) + 1
                if torch.equal(indices.reshape(index.shape), index.to(indices.dtype)):
                    found.append(Selection(scope, number))
        if len(found) != 1:
            reason = "no torch.topk over its experts gives" if not found else f"{len(found)} torch.topk calls give"
            self._refuse(f"{reason} the choice that its experts receive")
        return found[0]

    def _gave(self, trial: _Trial, forced: Tensor) -> bool:
        assert trial.index is not None and trial.weights is not None
        return torch.equal(trial.index, forced)

    def _run(self, selection: Selection | None = None, forced: Any = None) -> Any:
        block = self.layer.block
        trial = _Trial()
        args, kwargs = _copies(self.args), _copies(self.kwargs)
        devices = {tensor.device for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)}
        with ExitStack() as stack:
            accelerators = [device for device in devices if device.type != "cpu"]
            kind = accelerators[0].type if accelerators else "cuda"
            stack.enter_context(torch.random.fork_rng(devices=accelerators, device_type=kind))
            stack.enter_context(torch.no_grad())
            stack.enter_context(intercept(self.layer.experts, trial.run_experts))
            for name, child in block.named_children():
                if child is self.layer.experts:
                    continue
                call: Callable[..., Any] = partial(trial.run_child, name)
                if selection is not None and selection.scope == name:
                    call = partial(self._run_forced, selection, forced)
                stack.enter_context(intercept(child, call))
            if selection is None:
                stack.enter_context(_ObservedTopK(trial))
            elif not selection.scope:
                self._run_forced(selection, forced, self.forward, *args, **kwargs)
                return trial
            self.forward(*args, **kwargs)
        return trial

    def _run_forced(
        self, selection: Selection, forced: Tensor, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with ForcedTopK(forced, self.num_experts, selection.number, self.layer.name):
            return forward(*args, **kwargs)

    def _refuse(self, reason: str) -> Any:
        raise UnsupportedModelError(
            f"{type(self.layer.block).__name__} ({self.layer.name}) cannot be replayed: {reason}"
        )


def _copies(values: Any) -> Any:
    """Blocks may write into their inputs."""
    if isinstance(values, dict):
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in values)
