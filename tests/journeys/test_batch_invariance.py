"""A request's numbers are bitwise its own: alone, among others, decoded beside prefills (B109)."""

import random

import pytest

from trimtab import LLM, SamplingParams
from trimtab.kernels.native.library import Format, native_kernels
from trimtab.testing.checkpoints import make_tiny_checkpoint

# Torch's sigmoid rounds what is left over from whole vectors in another way, so a router that uses one is invariant
# where its number of experts fills vectors: 32, as every published size does.
FAMILIES = {"mixtral": {}, "qwen3_moe": {}, "gpt_oss": {}, "deepseek_v3": {"n_routed_experts": 32}}

pytestmark = pytest.mark.skipif(not native_kernels().supports(Format.FP32), reason="promised with native kernels only")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_bitwise_the_same_alone_and_in_company(family: str, dtype: str, tmp_path) -> None:
    path = make_tiny_checkpoint(tmp_path, family=family, seed=3, **FAMILIES[family])
    rng = random.Random(5)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
    options = {"dtype": dtype, "max_model_len": 64, "block_size": 16, "kv_cache_memory_bytes": "4MiB", "num_threads": 1}
    with LLM(str(path), enable_prefix_caching=False, **options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, "equal floats, not close ones"
