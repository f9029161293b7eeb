"""Families beyond the four that are proven layer by layer: whole requests through the engine, against transformers.

Each has something of its own; `docs/supported-models.md` says that a packed forward of them is right, this says that
the engine's caches, windows and steps are.
"""

import random
from pathlib import Path

import pytest
from eager_network import EagerNetwork

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint

FAMILIES = {
    "olmoe": {"clip_qkv": 0.5},  # B97: norm over the whole projection, then the clamp
    "qwen2_moe": {  # B96: a gated shared expert, a dense layer among sparse ones; windows that no keyword tells
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "phimoe": {},  # a sparse mixer as router, windows that only the mask tells
    "glm4_moe": {},  # a correction bias, partial rotary, a leading dense layer
    "granitemoe": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gemma4_text": {},  # dense and MoE blocks side by side, embeddings per layer
    "minimax_m2": {},
    "exaone_moe": {},  # windows whose module names a wrong one
    "deepseek_v2": {},  # B92: MLA with softmax routing
    "mimo_v2_flash": {},  # sinks, windows, keys and values of different sizes
    "afmoe": {},
    "laguna": {},
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True, detokenize=False)


def prompts_with_a_common_beginning(seed: int) -> list[list[int]]:
    print(f"seed {seed}")
    rng = random.Random(seed)
    short, long = ([rng.randrange(100) for _ in range(length)] for length in (3, 26))
    return [short, long, [*long, 5, 6], long[:16], long]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_get_the_networks_own_tokens_and_logprobs(tmp_path: Path, family: str) -> None:
    """Chunks of at most 9 tokens, windows of 8, blocks of 4, prefix hits, two steps in flight."""
    path = make_tiny_checkpoint(tmp_path, family, seed=5, **FAMILIES[family])
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_with_a_common_beginning(21)]
    options = {"max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 9, "block_size": 4, "async_depth": 2}
    with LLM(str(path), kv_cache_memory_bytes="2MiB", num_threads=1, **options) as llm:
        outputs = [
            *llm.generate(prompts[:2], PARAMS, use_tqdm=False),
            *llm.generate(prompts[2:], PARAMS, use_tqdm=False),
        ]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True, True, True]
    network = EagerNetwork(path)
    for output in outputs:
        network.judge(output)
