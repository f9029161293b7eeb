"""Forward passes of a transformers model with the rollout's experts: the choice is replayed, the weights are live.

How it is used, once per micro-batch:

    with replay_routed_experts(model, routes):        # one Routes per sequence of the batch, in order
        logits = model(input_ids, attention_mask=mask).logits
        loss(logits).backward()

Gradients flow to router, experts and everything else as in an ordinary forward. With transformers' gradient
checkpointing the recomputation uses the same rows, also after the context was left and in any order of micro-batches;
other checkpointing must recompute inside the context.
"""

# N tokens of the batch, padding included  L MoE layers  K top-k

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from trimtab.models.errors import UnsupportedModelError
from trimtab.replay.alignment import LIVE, align, check_model, read_batch
from trimtab.replay.layers import ReplayLayer, find_layers, intercept, read_choice
from trimtab.replay.routes import Routes
from trimtab.replay.selection import ForcedTopK, Selection, find_selection


class Replay:
    """What an open context does. `num_forced_rows`: tokens whose experts were forced, over all forwards."""

    def __init__(self, model: nn.Module, routes: Sequence[Routes]) -> None:
        self.architecture = type(model).__name__
        self.routes = routes
        self.layers = find_layers(model)
        check_model(routes, self.layers, self.architecture)
        self.num_experts = routes[0].model.num_experts
        self.num_forwards = 0
        self.num_forced_rows = 0
        self._model = model
        self._ordinals = {layer.layer_id: ordinal for ordinal, layer in enumerate(self.layers)}
        self._selections: dict[int, Selection] = {}  # layer id -> where it selects
        self._is_installed = False
        self._rows: Tensor | None = None  # [N, L, K] of the forward that runs or ran last

    # -- around the model ----------------------------------------------------------------------------------------------

    def run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = read_batch(forward, args, kwargs)
        rows = align(self.routes, batch)
        self.num_forwards += 1
        self.num_forced_rows += int((rows[:, 0, 0] != LIVE).sum())
        self._rows = rows.to(batch.valid.device)
        return forward(*args, **kwargs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The layers' modules ask this replay while open; nothing more where they do already."""
        if self._is_installed:
            yield
            return
        self._is_installed = True
        with ExitStack() as stack:
            stack.callback(setattr, self, "_is_installed", False)
            for layer in self.layers:
                stack.enter_context(intercept(layer.block, partial(self._run_block, layer)))
                for name, child in layer.block.named_children():
                    call = partial(self._run_child, name, layer)
                    if child is layer.experts:
                        call = partial(self._run_experts, layer)
                    stack.enter_context(intercept(child, call))
            yield

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Functions that transformers checkpoints take this replay, and the rows of their forward, along."""
        with ExitStack() as stack:
            for module in self._model.modules():
                checkpoint = module.__dict__.get("_gradient_checkpointing_func")
                if checkpoint is not None:
                    setattr(module, "_gradient_checkpointing_func", partial(self._checkpoint, checkpoint))  # noqa: B010
                    stack.callback(setattr, module, "_gradient_checkpointing_func", checkpoint)
            yield

    def _checkpoint(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(partial(self._resume, self._rows, function), *args)

    def _resume(self, rows: Tensor | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._rows = self._rows, rows
        try:
            with self.installed():
                return function(*args, **kwargs)
        finally:
            self._rows = before

    # -- around a layer ------------------------------------------------------------------------------------------------

    def _run_block(self, layer: ReplayLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if layer.layer_id not in self._selections:
            self._selections[layer.layer_id] = find_selection(layer, forward, args, kwargs, self.num_experts)
        if not self._selections[layer.layer_id].scope:
            return self._run_selecting(layer, forward, *args, **kwargs)
        return forward(*args, **kwargs)

    def _run_child(self, child: str, layer: ReplayLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        selection = self._selections.get(layer.layer_id)  # None: the block is being tried
        if selection is not None and selection.scope == child:
            return self._run_selecting(layer, forward, *args, **kwargs)
        return forward(*args, **kwargs)

    def _run_selecting(self, layer: ReplayLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forced, number = self._forced(layer), self._selections[layer.layer_id].number
        with ForcedTopK(forced, self.num_experts, number, layer.name):
            return forward(*args, **kwargs)

    def _run_experts(self, layer: ReplayLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        index, _ = read_choice(args, kwargs)
        forced = self._forced(layer)
        if index.shape != forced.shape:
            raise ValueError(
                f"{layer.name} is given a choice {list(index.shape)}, the batch and its routes have "
                f"{list(forced.shape)} [tokens, top-k]; sequences must reach the experts whole"
            )
        forced = forced.to(index.device)  # a model's layers may be spread over devices
        if bool(((index != forced) & (forced != LIVE)).any()):
            raise UnsupportedModelError(
                f"{type(layer.block).__name__} ({layer.name}) cannot be replayed: its experts were given other ones "
                "than the forced ones"
            )
        return forward(*args, **kwargs)

    def _forced(self, layer: ReplayLayer) -> Tensor:
        if self._rows is None:
            raise ValueError(
                f"{layer.name} runs before a forward of the {self.architecture} that was given to "
                "replay_routed_experts; call that model, or give the one you call"
            )
        return self._rows[:, self._ordinals[layer.layer_id]]


@contextmanager
def replay_routed_experts(model: nn.Module, routes: Routes | Sequence[Routes]) -> Iterator[Replay]:
    """While open, forwards of `model` use the experts in `routes`, one per sequence of the batch, in order.

    Works for any transformers MoE model whose router selects by `torch.topk`, in any mode, with any attention. Each
    layer is tried once: forcing its own choice must give its own weights bit for bit, or the
    architecture is refused by name. Each forward is checked: token ids, lengths (S or S - 1), padding by
    attention_mask, packed sequences by position_ids, MoE layers, number of experts. Tokens without a row (before
    `start`, the last one, padding) keep the live router's choice.

    State hangs on the modules of this instance; other instances, in other threads, are not touched. Raises ValueError
    naming what differs, also when no forward ran.
    """
    replay = Replay(model, [routes] if isinstance(routes, Routes) else list(routes))
    with intercept(model, replay.run_model), replay.installed(), replay.checkpointing():
        yield replay
    if not replay.num_forwards:
        raise ValueError(
            f"no forward of the {replay.architecture} given to replay_routed_experts ran inside the context: "
            "nothing was replayed; call that very object"
        )
