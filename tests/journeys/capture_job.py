"""One job of many demo prompts through the runners: `python tests/journeys/capture_job.py --prompts 200`.

The same tokens and the same routed experts, row for row, from the reference runner, from V2, and from V2 over two ranks
while every expert keeps moving.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trimtab import LLM, SamplingParams
from trimtab.models.demo import DOMAIN_PROMPTS, calibration_texts, ensure_demo
from trimtab.outputs import RequestOutput

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": "256MiB", "enable_return_routed_experts": True,
}  # fmt: skip
SHUFFLE: dict[str, Any] = {
    "window_size": 1, "step_interval": 1, "num_redundant_experts": 2, "min_gain": 0,
    "policy": "trimtab.testing.policies:ShufflingPolicy",
}  # fmt: skip
RUNNERS: dict[str, dict[str, Any]] = {
    "V1": {"model_runner": "v1"},
    "V2": {"model_runner": "v2", "async_depth": 2},
    "V2, 2 ranks, experts moving": {
        "model_runner": "v2", "data_parallel_size": 2, "max_num_seqs": 8, "enable_expert_parallel": True,
        "distributed_executor_backend": "threads", "enable_eplb": True, "eplb_config": SHUFFLE,
    },
}  # fmt: skip


def demo_prompts(count: int) -> list[str]:
    """The demo's questions, then beginnings of its calibration texts, of 3 to 24 words: all different."""
    found = list(dict.fromkeys(itertools.islice(_prompts(), 4 * count)))[:count]
    assert len(found) == count, f"the demo's texts give {len(found)} prompts, not {count}"
    return found


def _prompts() -> Iterator[str]:
    yield from itertools.chain(*DOMAIN_PROMPTS.values())
    words = [text.split() for texts in calibration_texts().values() for text in texts]
    for turn in itertools.count():
        for index, text in enumerate(words):
            start, length = 5 * turn, 3 + (index + 7 * turn) % 22
            yield " ".join(text[start : start + length])


def run_job(path: Path, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """What was run and seen. AssertionError where a runner differs from the first in a token or a row."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    report: dict[str, Any] = {}
    expected: list[RequestOutput] = []
    for name, runner in RUNNERS.items():
        started = time.monotonic()
        with LLM(str(path), **OPTIONS | runner) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            expected = expected or outputs
            _compare(name, outputs, expected)
            balancing = llm.eplb_stats() if llm.config.enable_eplb else None
            for _ in range(20):  # a few prompts may have been served before any expert moved
                if balancing is None or balancing["moves"]:
                    break
                _compare(name, llm.generate(prompts, params, use_tqdm=False), expected)
                balancing = llm.eplb_stats()
        report[name] = {"seconds": time.monotonic() - started}
        if balancing is not None:
            report[name] |= {"moves": balancing["moves"], "rearrangements": balancing["rearrangements"]}
        print(f"{name}: {report[name]}", flush=True)
    rows = np.concatenate([output.outputs[0].routed_experts for output in expected])  # type: ignore[misc]
    report["rows"], report["choices"] = len(rows), rows.size
    report["tokens"] = sum(len(output.outputs[0].token_ids) for output in expected)
    report["different_tokens"] = len({token for output in expected for token in output.outputs[0].token_ids})
    # Of choices that were always the same, or of one expert, equality would say little.
    shares = [np.bincount(rows[:, layer].reshape(-1)) / rows[:, layer].size for layer in range(rows.shape[1])]
    report["greatest_share_of_an_expert"] = max(float(share.max()) for share in shares)
    report["experts_chosen"] = min(int((share > 0).sum()) for share in shares)
    return report


def _compare(name: str, found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        (our,), (their,) = ours.outputs, theirs.outputs
        assert ours.error is None, f"{name}: {ours.error}"
        assert our.token_ids == their.token_ids, f"{name}: other tokens for {theirs.prompt!r}"
        assert our.routed_experts is not None and their.routed_experts is not None
        assert len(our.routed_experts) == len(theirs.prompt_token_ids) + len(their.token_ids) - 1
        np.testing.assert_array_equal(our.routed_experts, their.routed_experts, f"{name}: {theirs.prompt!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    report = run_job(ensure_demo(), demo_prompts(arguments.prompts), arguments.max_tokens)
    print({what: value for what, value in report.items() if what not in RUNNERS})
    print("tokens and routed experts are the same, row for row")


if __name__ == "__main__":
    main()
