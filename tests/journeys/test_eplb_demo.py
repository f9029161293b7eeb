"""The demo model with experts far apart, moving all the time: bitwise the answers of one process, in bf16 and int8."""

from pathlib import Path
from typing import Any

import pytest
from eplb_watch import Watch, balanced, prompts

from trimtab import LLM, SamplingParams
from trimtab.kernels.native.library import Format, native_kernels

pytestmark = pytest.mark.demo

SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": "32MiB", "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("quantization", "layout"),
    [(None, {"data_parallel_size": 2}), ("int8", {"tensor_parallel_size": 2})],
    ids=["bf16, DP 2", "int8, TP 2"],
)
def test_noisy_demo_experts_move_and_change_no_bit(
    demo_noisy_path: Path, quantization: str | None, layout: dict[str, int]
) -> None:
    """B19, rule 11: tokens that one rank owns, and tokens that ranks share."""
    if quantization == "int8" and not native_kernels().supports(Format.INT8):
        pytest.skip("no native int8 kernel here")
    options = {**OPTIONS, "num_threads": 1, "max_model_len": 96, "quantization": quantization}
    with LLM(str(demo_noisy_path), **options) as llm:
        expected = llm.generate(prompts(4), SAMPLING, use_tqdm=False)
    with balanced(demo_noisy_path, **options | layout) as llm:
        watch = Watch(llm)
        watch.looks = False  # each look reads all experts again
        watch.run_until(
            lambda: llm.eplb_stats()["moves"] > 30 and llm.eplb_stats()["mixed_layer_steps"] > 5,
            prompts(4), expected, SAMPLING,
        )  # fmt: skip
        watch.look()
    assert watch.most_replicas > 1
