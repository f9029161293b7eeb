"""The checkpoint with a router of our choosing: the same model elsewhere, and nearly all tokens where we want them."""

import numpy as np
import pytest

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint
from trimtab.testing.skewed_router import write_skewed_checkpoint

HOT = range(16)
SIZES = {"num_experts": 32, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_moe", **SIZES)


def routed_to_hot(model) -> float:
    prompts = np.random.default_rng(5).integers(3, 90, (6, 12)).tolist()
    options = {"max_model_len": 32, "kv_cache_memory_bytes": "2MiB", "num_threads": 1, "dtype": "float32"}
    with LLM(str(model), enable_prefix_caching=False, **options) as llm, llm.expert_usage() as usage:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    counts = usage.counts.numpy()
    return counts[:, list(HOT)].sum() / counts.sum()


def test_most_tokens_go_to_the_preferred_experts(checkpoint, tmp_path) -> None:
    skewed = write_skewed_checkpoint(checkpoint, tmp_path / "skewed", HOT, factor=8.0)
    assert routed_to_hot(checkpoint) < 0.7
    assert routed_to_hot(skewed) > 0.9


def test_a_router_of_another_name_is_an_error(checkpoint, tmp_path) -> None:
    with pytest.raises(ValueError, match="must be the end of a tensor's name"):
        write_skewed_checkpoint(checkpoint, tmp_path / "none", HOT, router=".gate.w")
