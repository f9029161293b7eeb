"""Log-probabilities through chunks, caches, preemption and both runners, against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
from eager_network import EagerNetwork

from trimtab import LLM, SamplingParams
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint

GREEDY = {"temperature": 0, "logprobs": 3, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module", params=["gpt_oss", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.fixture(scope="module")
def network(checkpoint: Path) -> EagerNetwork:
    return EagerNetwork(checkpoint)


def run(path: Path, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> list[RequestOutput]:
    defaults = {"max_model_len": 48, "max_num_seqs": 8, "block_size": 4, "kv_cache_memory_bytes": "4MiB"}
    with LLM(str(path), num_threads=1, **(defaults | options)) as llm:
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "async_depth": 2},
        {"max_num_batched_tokens": 11, "model_runner": "v1"},
        {"block_size": 1, "max_num_batched_tokens": 16, "async_depth": 2},
        {"block_size": 32, "async_depth": 2},  # wider than the window
        {"block_size": 3, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    ],
    ids=str,
)
def test_each_requests_logprobs_are_the_networks_own_in_any_company(
    checkpoint: Path, network: EagerNetwork, options: dict[str, Any]
) -> None:
    """B107, B108: requests with and without prompt logprobs, cold and cached, at chunk ends and in decode, in one
    batch; prompts of whole blocks, answers of one token."""
    rng = random.Random(31)
    print("seed 31")
    long = [rng.randrange(100) for _ in range(16)]
    prompts = [[7], long, long, [*long, 1, 2, 3], [rng.randrange(100) for _ in range(29)], long[:4]] * 2
    params = [
        SamplingParams(max_tokens=1 + index % 6, prompt_logprobs=[2, None, 0][index % 3], **GREEDY)
        for index in range(len(prompts))
    ]
    outputs = run(checkpoint, prompts, params, **options)
    for output, sampling in zip(outputs, params, strict=True):
        assert (output.prompt_logprobs is None) == (sampling.prompt_logprobs is None)
        assert len(output.outputs[0].token_ids) == sampling.max_tokens
        assert all(3 <= len(entry) <= 4 for entry in output.outputs[0].logprobs)
        network.judge(output)


@pytest.mark.parametrize("async_depth", [1, 2])
def test_a_preempted_requests_logprobs_are_whole_and_the_networks_own(
    checkpoint: Path, network: EagerNetwork, async_depth: int
) -> None:
    """B102, B107: what is computed twice is reported once."""
    rng = random.Random(32)
    print("seed 32")
    prompts = [[rng.randrange(100) for _ in range(rng.randint(1, 8))] for _ in range(6)]
    params = [SamplingParams(max_tokens=32, prompt_logprobs=1, **GREEDY)] * 6
    with LLM(str(checkpoint), max_model_len=40, block_size=4, kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        stats = llm.stats()
        block_bytes = stats["memory_bytes"]["kv_cache"] // stats["kv_cache"]["num_blocks"]
    # Blocks of one request of full length in two KV cache groups at most, the null block, and two to spare.
    scarce = {"kv_cache_memory_bytes": block_bytes * (2 * 10 + 3), "max_model_len": 40, "async_depth": async_depth}
    outputs = run(checkpoint, prompts, params, max_num_batched_tokens=8, **scarce)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output in outputs:
        network.judge(output)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_windows_narrower_than_a_block_are_right_with_prefix_hits(tmp_path: Path, window: int) -> None:
    """B93, B105: blocks of 4 and of 16; a hit may begin inside what the window has left behind."""
    path = make_tiny_checkpoint(tmp_path, "gpt_oss", seed=4, sliding_window=window)
    network = EagerNetwork(path)
    rng = random.Random(33)
    print("seed 33")
    long = [rng.randrange(100) for _ in range(32)]
    params = SamplingParams(max_tokens=6, **GREEDY)
    for block_size in (4, 16):
        with LLM(
            str(path), max_model_len=48, block_size=block_size, kv_cache_memory_bytes="4MiB", num_threads=1
        ) as llm:
            for prompt in (long, long, [*long, 4, 5], long[:17], long[:16]):
                [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
                network.judge(output)
            assert llm.stats()["prefix_cache"]["num_hit_tokens"] > 0
