"""The engine's step against a fake model that remembers what was written to its KV memory."""

from __future__ import annotations

import pytest

from trimtab.engine.config import CacheConfig, SchedulerConfig
from trimtab.engine.engine import Engine
from trimtab.outputs import RequestOutput
from trimtab.plan import KVCacheConfig, KVCacheGroupSpec
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scripted_executor import ScriptedExecutor, solo_tokens

VOCAB = 97


def make_kv_cache(
    num_blocks: int = 65, block_size: int = 4, windows: tuple[int | None, ...] = (None,)
) -> KVCacheConfig:
    groups = tuple(KVCacheGroupSpec((layer,), window, 8) for layer, window in enumerate(windows))
    return KVCacheConfig(block_size, num_blocks, groups)


def run(engine: Engine) -> dict[str, RequestOutput]:
    finished = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


@pytest.mark.parametrize("async_depth", [1, 2])
def test_requests_of_mixed_length_get_the_tokens_of_their_solo_runs(async_depth: int) -> None:
    kv_cache = make_kv_cache()
    executor = ScriptedExecutor(kv_cache, vocab_size=VOCAB)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, max_model_len=64, async_depth=async_depth)
    engine = Engine(executor, kv_cache, config, vocab_size=VOCAB, cache=CacheConfig(block_size=4))
    prompts = {f"r{n}": [(7 * n + i) % VOCAB for i in range(n)] for n in (1, 3, 4, 9, 17, 30)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=5, seed=1))
    outputs = run(engine)
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == solo_tokens(prompt, 5, vocab_size=VOCAB, seed=1)
        assert outputs[request_id].outputs[0].finish_reason == "length"
    assert executor.max_in_flight == async_depth
