"""Routed experts of a request whose weights change while it runs: each row says whose routers chose it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint

PROMPT = [5, 17, 3, 80, 41, 9, 66, 2, 33, 71, 28]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
TOP_K = 2


def router_weights(path: Path) -> list[torch.Tensor]:
    """[E, H] of each layer, as the checkpoint has them."""
    tensors = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return [tensors[name].float() for name in sorted(tensors) if name.endswith("block_sparse_moe.gate.weight")]


class RouterInputs:
    """What the routers of a running network are asked, position by position, and by which weights it is answered."""

    def __init__(self, llm: LLM) -> None:
        network = llm._parts.models[0].network  # type: ignore[attr-defined]
        gates = [module for name, module in network.named_modules() if name.endswith("mlp.gate")]
        self.hidden: list[list[torch.Tensor]] = [[] for _ in gates]
        self.num_asked: Counter[float] = Counter()  # positions, by a number of the first router's weights
        for layer, gate in zip(self.hidden, gates, strict=True):
            gate.register_forward_pre_hook(lambda _, args, layer=layer: layer.append(args[0].flatten(0, -2).clone()))
        gates[0].register_forward_pre_hook(
            lambda gate, args: self.num_asked.update({float(gate.weight[0, 0]): args[0].flatten(0, -2).shape[0]})
        )

    def choices(self, routers: list[torch.Tensor], num_rows: int) -> np.ndarray:
        """[T, L, K]: what routers of these weights choose for them."""
        chosen = [
            (torch.cat(hidden)[:num_rows] @ router.T).topk(TOP_K).indices.numpy()
            for hidden, router in zip(self.hidden, routers, strict=True)
        ]
        return np.stack(chosen, axis=1)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_after_an_update_of_weights_are_the_new_routers_and_say_so(tmp_path: Path, depth: int) -> None:
    """Keys and values of the old weights go on, so no network computed whole is the judge: both checkpoints' routers
    are asked again, for the hidden states that the running one was asked about."""
    old, new = (make_tiny_checkpoint(tmp_path / str(seed), "mixtral", seed=seed) for seed in (5, 6))
    options = {"max_model_len": 48, "kv_cache_memory_bytes": "2MiB", "num_threads": 1, "dtype": "float32"}
    with LLM(str(old), enable_return_routed_experts=True, async_depth=depth, **options) as llm:
        inputs, outputs = RouterInputs(llm), []
        for output in llm.stream(PROMPT, PARAMS):
            outputs.append(output)
            if len(outputs) == 5:
                assert llm.update_weights(str(new)) == 1
        (completion,) = outputs[-1].outputs
        rows, meta = completion.routed_experts, completion.routed_experts_meta
        assert rows is not None and meta is not None and len(rows) == len(PROMPT) + 12 - 1
        of_old, of_new = (inputs.choices(router_weights(path), len(rows)) for path in (old, new))
        changed = inputs.num_asked[float(router_weights(old)[0][0, 0])]
        assert len(PROMPT) + 4 <= changed < len(rows) - 2, "in the midst of the output"
        assert meta.weights_versions == ((0, 0), (changed, 1))
        np.testing.assert_array_equal(rows[:changed], of_old[:changed])
        np.testing.assert_array_equal(rows[changed:], of_new[changed:])
        assert (of_old != of_new).any(axis=(1, 2)).mean() > 0.9, "routers alike would not tell the versions apart"
        (again,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
        assert again.outputs[0].routed_experts_meta.weights_versions == ((0, 1),)
        assert again.num_cached_tokens == 0, "the old weights' prefix"
