"""What the tests of the models room share: transformers' eager float32 network as the oracle."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trimtab.models.experts_plug import is_experts_module
from trimtab.models.language_model import LanguageModel
from trimtab.models.loading import load_model
from trimtab.models.spec import read_spec
from trimtab.testing.packed import packed_logits, schedule, unpack

LENGTHS = (4, 8, 9, 40)  # around a window of 8
CHUNKS = (3, 1, 5, 7)


def eager(path: Path, **kwargs: Any) -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"} | kwargs
    return AutoModelForCausalLM.from_pretrained(path, **options)


def random_sequences(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def eager_logits(network: Any, sequences: Sequence[Tensor]) -> list[Tensor]:
    return [network(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]


@contextmanager
def eager_routing(network: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(ids, weights) of each call of an experts module, in order."""
    calls: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: calls.append((args[1].clone(), args[2].clone())))
        for module in network.modules()
        if is_experts_module(module)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


class RoutingRecorder:
    """Stands in for a MoELayer's capture: keeps the ids it is shown, per layer."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    def record(self, layer: int, expert_ids: Tensor) -> None:
        self.seen.setdefault(layer, []).append(expert_ids.clone())


def load(path: Path, dtype: str = "auto") -> LanguageModel:
    return load_model(read_spec(path, dtype))


def assert_same_as_eager(path: Path, lengths: Sequence[int] = LENGTHS, chunks: Sequence[int] = CHUNKS) -> None:
    """Same logits within 1e-4 at every position, and the same experts chosen in every layer."""
    model = load(path)
    network = eager(path)
    sequences = random_sequences(model.spec.vocab_size, lengths)
    recorder = RoutingRecorder()
    for layer in model.moe_layers:
        layer.capture = recorder
    found = packed_logits(model, sequences, chunks)
    with eager_routing(network) as calls:
        expected = eager_logits(network, sequences)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 0.5, "logits this flat would prove nothing"
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    steps = list(schedule(lengths, chunks))
    num_layers = len(model.moe_layers)
    for ordinal in range(num_layers):
        ours = unpack(list(zip(steps, recorder.seen[ordinal], strict=True)), len(sequences))
        for index, ids in enumerate(ours):
            assert torch.equal(ids.sort().values, calls[index * num_layers + ordinal][0].sort().values)


def assert_no_worse_than_eager(path: Path, dtype: str) -> None:
    """In half precision a near tie may route either way: our distance from float32 is held against eager's own."""
    sequences = random_sequences(read_spec(path).vocab_size)
    found = packed_logits(load(path, dtype), sequences, CHUNKS)
    exact = packed_logits(load(path, "float32"), sequences, CHUNKS)
    theirs = eager_logits(eager(path, dtype=getattr(torch, dtype)), sequences)
    ours_off, theirs_off = (
        torch.cat([(half.float() - full).abs().mean(dim=-1) for half, full in zip(halves, exact, strict=True)])
        for halves in (found, theirs)
    )
    assert bool(ours_off.isfinite().all())
    assert ours_off.median() <= 2 * theirs_off.median() + 1e-3
