"""The demo model in bfloat16 with experts far apart, spread over ranks: bitwise the answers of one process."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from trimtab import LLM, SamplingParams
from trimtab.experts.formats.base import ExpertTensors
from trimtab.models.demo import DOMAIN_PROMPTS
from trimtab.models.language_model import LanguageModel

pytestmark = pytest.mark.demo

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
OPTIONS = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64,
           "kv_cache_memory_bytes": "64MiB", "num_threads": 1,
           "enable_prefix_caching": False}  # fmt: skip
LAYOUTS = {
    "DP 4": {"data_parallel_size": 4},
    "TP 2": {"tensor_parallel_size": 2},
}
NOISE = 0.5
Answer = tuple[list[int], list[float]]


def perturb(model: LanguageModel, rank: int, num_ranks: int) -> None:
    """Adds noise of half the weights' spread to every expert: its own weights, shifted by a distance of its own."""
    for layer in model.moe_layers:
        slots_per_rank = layer.num_experts // num_ranks
        for slot in range(layer.kernel.num_slots):
            expert = rank * slots_per_rank + slot
            tensors = layer.kernel.read_slot(slot).tensors()
            shifted = {
                name: (tensor + NOISE * tensor.roll(101 * (1 + expert) + layer.ordinal)).to(tensor.dtype)
                for name, tensor in tensors.items()
            }
            layer.kernel.load_slot(slot, ExpertTensors(**shifted))


def answers_of(llm: LLM, prompts: list[list[int]]) -> list[Answer]:
    """Tokens, and the log-probabilities that any other bit in the network would show in."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [
        (
            output.outputs[0].token_ids,
            [
                entry[token].logprob
                for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def prompts(demo_path: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(demo_path)
    return [tokenizer.encode(texts[index])[:16] for texts in DOMAIN_PROMPTS.values() for index in (0, 1)]


@pytest.fixture(scope="module")
def expected(demo_path: Path, prompts: list[list[int]]) -> list[Answer]:
    with LLM(str(demo_path), **OPTIONS) as llm:
        plain = answers_of(llm, prompts)
        perturb(llm._parts.models[0], 0, 1)
        answers = answers_of(llm, prompts)
    changed = sum(ours[0] != theirs[0] for ours, theirs in zip(plain, answers, strict=True))
    assert changed >= 6, f"the noise must decide what is said, and changed {changed} of {len(prompts)} answers"
    return answers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_over_ranks_are_bitwise_those_of_one_process(demo_path, prompts, expected, layout) -> None:
    """Each rank computes the experts it owns and the token's rank sums them in k order, so neither bfloat16 nor
    expert outputs of very different size leave room for another bit, tokens shared by ranks included."""
    with LLM(
        str(demo_path),
        enable_expert_parallel=True,
        distributed_executor_backend="threads",
        **OPTIONS,
        **LAYOUTS[layout],
    ) as llm:
        models = llm._parts.models
        for rank, model in enumerate(models):
            perturb(model, rank, len(models))
        assert answers_of(llm, prompts) == expected
        if layout == "TP 2":
            expect_that_a_wrong_expert_shows(llm, prompts, expected)


def expect_that_a_wrong_expert_shows(llm: LLM, prompts: list[list[int]], expected: list[Answer]) -> None:
    kernel = llm._parts.models[0].moe_layers[15].kernel
    with torch.inference_mode():
        kernel.load_slot(0, kernel.read_slot(1))
    assert answers_of(llm, prompts) != expected
