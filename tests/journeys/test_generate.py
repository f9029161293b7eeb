"""From a checkpoint folder to tokens, against transformers' own greedy generation."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trimtab import LLM, SamplingParams
from trimtab.testing.checkpoints import make_tiny_checkpoint

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), family=request.param, seed=3)


def random_prompts(seed: int, count: int, vocab_size: int, longest: int = 40) -> list[list[int]]:
    """Prompts of mixed length; every third begins like the one before, so that the prefix cache has work."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(count):
        fresh = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        prompts.append((prompts[-1] + fresh)[:longest] if index % 3 == 2 else fresh)
    return prompts


def transformers_tokens(path: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    network = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(max_tokens):  # the whole sequence anew: no cache of any kind in the oracle
                tokens.append(int(network(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def generate(path: Path, prompts: list[list[int]], **options) -> list[list[int]]:
    defaults = {
        "max_model_len": 64,
        "max_num_seqs": 8,
        "block_size": 4,
        "kv_cache_memory_bytes": "4MiB",
        "num_threads": 1,
    }
    with LLM(str(path), **(defaults | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    assert all(output.finished and output.error is None for output in outputs), [output.error for output in outputs]
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_equal_transformers_in_mixed_chunked_batches(checkpoint):
    """Continuous batching, prompts cut into chunks of at most 16 tokens, prefix cache on, both depths, both runners."""
    prompts = random_prompts(11, 10, 100)
    expected = transformers_tokens(checkpoint, prompts, GREEDY.max_tokens)
    assert len({tuple(answer) for answer in expected}) > 5, "the oracle's answers differ, or the test sees nothing"
    for options in (
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "async_depth": 2},
        {"max_num_batched_tokens": 512, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "model_runner": "v1"},
    ):
        assert generate(checkpoint, prompts, **options) == expected, options


def test_requests_that_share_too_little_kv_memory_are_preempted_and_still_right(checkpoint):
    """B102: short prompts are all admitted, then outgrow the KV cache; all finish with the right tokens."""
    prompts = random_prompts(12, 6, 100, longest=8)
    params = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, detokenize=False)
    batch = [{"prompt_token_ids": prompt} for prompt in prompts]
    options = {"max_model_len": 40, "max_num_seqs": 6, "block_size": 4, "max_num_batched_tokens": 16, "num_threads": 1}
    with LLM(str(checkpoint), kv_cache_memory_bytes="4MiB", **options) as llm:
        ample = [output.outputs[0].token_ids for output in llm.generate(batch, params, use_tqdm=False)]
        assert llm.stats()["num_preemptions"] == 0
        block_bytes = llm.stats()["memory_bytes"]["kv_cache"] // llm.stats()["kv_cache"]["num_blocks"]
        one_request = 1 + llm.engine.scheduler.ranks[0].allocator.peak_blocks(39)
    for depth in (1, 2):
        scarce = {"kv_cache_memory_bytes": block_bytes * (one_request + 4), "async_depth": depth}
        with LLM(str(checkpoint), **scarce, **options) as llm:
            outputs = llm.generate(batch, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == ample
            assert llm.stats()["num_preemptions"] > 0
            assert llm.stats()["kv_cache"]["num_free_blocks"] == llm.stats()["kv_cache"]["num_blocks"] - 1


def test_a_second_identical_prompt_hits_the_prefix_cache_and_gives_the_same_tokens_and_logprobs(checkpoint):
    """B103, B105: a prompt of exactly four blocks, sent twice, then a longer one on top."""
    prompt = random_prompts(13, 1, 100)[0]
    prompt = (prompt * 16)[:16]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False)
    with LLM(str(checkpoint), max_model_len=64, block_size=4, kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        cold, warm = (llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for _ in range(2))
        longer = llm.generate({"prompt_token_ids": [*prompt, 7, 8, 9]}, params, use_tqdm=False)[0]
        llm.engine.reset_prefix_cache()
        longer_cold = llm.generate({"prompt_token_ids": [*prompt, 7, 8, 9]}, params, use_tqdm=False)[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens, longer.num_cached_tokens) == (0, 12, 16)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert longer.outputs[0].token_ids == longer_cold.outputs[0].token_ids
    for warm_step, cold_step in zip(warm.outputs[0].logprobs, cold.outputs[0].logprobs, strict=True):
        for token_id, entry in cold_step.items():
            assert warm_step[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_sampled_tokens_do_not_depend_on_batch_mates_chunks_depth_or_runner(checkpoint):
    prompts = random_prompts(14, 6, 100)
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=100 + index, max_tokens=10, ignore_eos=True)
        for index in range(len(prompts))
    ]
    batch = [{"prompt_token_ids": prompt} for prompt in prompts]

    def sample(alone: bool, **options) -> list[list[int]]:
        defaults = {"max_model_len": 64, "max_num_seqs": 8, "block_size": 4, "kv_cache_memory_bytes": "4MiB"}
        with LLM(str(checkpoint), num_threads=1, **(defaults | options)) as llm:
            if alone:
                outputs = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in zip(batch, params, strict=True)]
            else:
                outputs = llm.generate(batch, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    alone = sample(alone=True)
    assert sample(alone=False) == alone
    assert sample(alone=False, max_num_batched_tokens=8, async_depth=2) == alone
    assert sample(alone=False, model_runner="v1") == alone


def test_a_bad_request_fails_alone(checkpoint):
    with LLM(str(checkpoint), max_model_len=32, kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        prompts = [[5, 6, 7], [], [5] * 32, [10**6], [8, 9]]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
        again = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "error", "length"]
    assert "empty" in outputs[1].error
    assert "32" in outputs[2].error and "31" in outputs[2].error
    assert "1000000" in outputs[3].error
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_two_engines_live_in_one_process(tmp_path):
    """Registries of transformers are process-global; nothing of one engine may reach the other."""
    one = make_tiny_checkpoint(tmp_path / "one", family="mixtral", seed=1)
    two = make_tiny_checkpoint(tmp_path / "two", family="gpt_oss", seed=2)
    prompts = random_prompts(15, 4, 100)
    alone = generate(one, prompts), generate(two, prompts)
    options = {"max_model_len": 64, "block_size": 4, "kv_cache_memory_bytes": "4MiB", "num_threads": 1}
    with LLM(str(one), **options) as first, LLM(str(two), model_runner="v1", **options) as second:
        streams = [[llm.stream({"prompt_token_ids": prompt}, GREEDY) for prompt in prompts] for llm in (first, second)]
        together: list[list[list[int]]] = [[], []]
        for pair in zip(*streams, strict=True):  # the two engines take turns, step by step
            last = [None, None]
            alive = [True, True]
            while any(alive):
                for index, stream in enumerate(pair):
                    output = next(stream, None)
                    alive[index] = output is not None
                    last[index] = output or last[index]
            for index in range(2):
                together[index].append(last[index].outputs[0].token_ids)
    assert tuple(together) == alone


def test_an_interrupted_call_leaves_an_engine_that_goes_on(tmp_path):
    """Ctrl-C in the middle of a call ends its requests; the next call gets its own answers and all the memory."""
    path = make_tiny_checkpoint(tmp_path, seed=4)
    prompts = random_prompts(16, 4, 100)
    with LLM(str(path), max_model_len=64, block_size=4, kv_cache_memory_bytes="4MiB", num_threads=1) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        steps = iter(range(100))
        whole_step = llm.engine.step

        def interrupted_step():
            if next(steps) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return whole_step()

        llm.engine.step = interrupted_step
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not llm.engine.has_unfinished
        assert llm.stats()["kv_cache"]["num_free_blocks"] == llm.stats()["kv_cache"]["num_blocks"] - 1
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert again == expected
