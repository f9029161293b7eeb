"""Routed experts, from request to array: row for row what transformers' own routers choose, whatever the engine did.

The oracle reads the ids that transformers' eager float32 network hands its experts modules, over the whole sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eager_network import EagerNetwork

from trimtab import LLM, SamplingParams
from trimtab.experts.data.capture import NoCapture
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.placement_file import write_placement
from trimtab.models.experts_plug import is_experts_module
from trimtab.outputs import RequestOutput
from trimtab.runner.attention import kv_cache_bytes_per_token
from trimtab.testing.checkpoints import make_tiny_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},  # windows and full attention in turns: rows are kept by the latter (B63)
    "deepseek_v3": {},  # MLA, grouped choice, a shared expert (B76)
    "olmoe": {},
    "qwen2_moe": {  # layer 1 is dense
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "layer_types": ["full_attention"] * 3,
    },
    "glm4_moe": {},
    "granitemoe": {},
    "deepseek_v2": {},
    "gemma4_text": {},  # its top-k has a name of its own (B65)
}
OPTIONS: dict[str, Any] = {
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 9,
    "block_size": 4,
    "kv_cache_memory_bytes": "2MiB",
    "num_threads": 1,
    "enable_return_routed_experts": True,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


class RouterOracle:
    """What transformers' own network routes, by hooks on its experts modules."""

    def __init__(self, path: Path) -> None:
        self.network = EagerNetwork(path).network
        self.calls: list[np.ndarray] = []
        for module in self.network.modules():
            if is_experts_module(module):
                module.register_forward_pre_hook(lambda _, args: self.calls.append(args[1].numpy().copy()))

    def rows(self, token_ids: list[int]) -> np.ndarray:
        """[T, L, K]: T is all tokens but the last, which a serving engine never computes."""
        import torch

        self.calls.clear()
        with torch.no_grad():
            self.network(torch.tensor([token_ids[:-1]]), use_cache=False)
        return np.stack(self.calls, axis=1)

    def judge(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        for completion in output.outputs:
            expected = self.rows(output.prompt_token_ids + completion.token_ids)
            assert completion.routed_experts is not None and completion.routed_experts_meta is not None
            assert len(completion.routed_experts_meta.layer_ids) == expected.shape[1]
            np.testing.assert_array_equal(completion.routed_experts, expected[completion.routed_experts_meta.start :])


def ids(prompts: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def some_prompts(seed: int = 21) -> list[list[int]]:
    """The later ones share beginnings with the earlier ones: whole blocks, and parts of blocks."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    short, long = ([rng.randrange(100) for _ in range(length)] for length in (3, 26))
    return [short, long, [*long, 5, 6], long[:17], long]


def generate(llm: LLM, prompts: list[list[int]], params: Any = PARAMS) -> list[RequestOutput]:
    outputs = llm.generate(ids(prompts), params, use_tqdm=False)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return outputs


def rows_of(outputs: list[RequestOutput]) -> list[np.ndarray]:
    found = [completion.routed_experts for output in outputs for completion in output.outputs]
    assert all(rows is not None and len(rows) for rows in found)
    return found  # type: ignore[return-value]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_choices_of_transformers_own_routers(tmp_path: Path, family: str) -> None:
    """B61, B63, B65, B67, B76: prompt and output; chunks of at most 9 tokens, prefix hits, two steps in flight, and the
    reference runner."""
    path = make_tiny_checkpoint(tmp_path, family, seed=5, **FAMILIES[family])
    prompts = some_prompts()
    oracle = RouterOracle(path)
    for runner in ({"model_runner": "v2", "async_depth": 2}, {"model_runner": "v1"}):
        with LLM(str(path), **OPTIONS | runner) as llm:
            outputs = generate(llm, prompts[:2]) + generate(llm, prompts[2:])
            layers = [layer.layer_id for layer in llm._parts.spec.moe_layers]
        assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True, True, True]
        for output in outputs:
            oracle.judge(output)
            (completion,) = output.outputs
            assert completion.routed_experts.dtype == np.uint8  # type: ignore[union-attr]
            assert list(completion.routed_experts_meta.layer_ids) == layers  # type: ignore[union-attr]
    assert len(np.unique(rows_of(outputs)[1])) > 4, "choices this uniform would prove nothing"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows and full attention in turns: the KV cache has two groups, and rows belong to one of them."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", seed=5, with_tokenizer=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[np.ndarray]:
    """Each prompt alone through the reference runner, nothing cached, in one chunk."""
    options = OPTIONS | {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with LLM(str(checkpoint), model_runner="v1", **options) as llm:
        outputs = [output for prompt in some_prompts() for output in generate(llm, [prompt])]
    oracle = RouterOracle(checkpoint)
    for output in outputs:
        oracle.judge(output)
    return rows_of(outputs)


TWISTS: dict[str, dict[str, Any]] = {
    "chunked prefill in mixed batches": {"max_num_batched_tokens": 5},
    "depth 1": {"async_depth": 1, "max_num_batched_tokens": 48},
    "depth 2": {"async_depth": 2, "max_num_batched_tokens": 48},
    "reference runner, batched": {"model_runner": "v1"},
    "blocks of one token": {"block_size": 1, "async_depth": 2},
}


@pytest.mark.parametrize("twist", TWISTS)
def test_rows_are_those_of_the_request_alone(checkpoint: Path, expected: list[np.ndarray], twist: str) -> None:
    """Same-step prefix hits included: the prompts that share a beginning come together. V1 == V2."""
    with LLM(str(checkpoint), **OPTIONS | TWISTS[twist]) as llm:
        assert_same(rows_of(generate(llm, some_prompts())), expected)
        again = generate(llm, some_prompts())  # prefix hits on all of them
        assert_same(rows_of(again), expected)
        assert sum(output.num_cached_tokens > 0 for output in again) >= 4


def test_rows_outlive_preemptions_and_evictions(checkpoint: Path) -> None:
    """B68: a KV cache so small that requests are preempted and cached prefixes are evicted, over and over."""
    rng = random.Random(4)
    shared = [rng.randrange(100) for _ in range(8)]
    prompts = [shared[: rng.choice([0, 8])] + [rng.randrange(100) for _ in range(4)] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(str(checkpoint), **OPTIONS | {"max_num_seqs": 4}) as llm:
        ample = rows_of(generate(llm, prompts, params))
        spec, num_blocks = llm._parts.spec, 2 + llm.engine.scheduler.ranks[0].allocator.peak_blocks(39)
    block_bytes = 4 * kv_cache_bytes_per_token(spec.attention_layers, spec.dtype)
    num_preemptions = 0
    for depth in (1, 2):
        options = {"kv_cache_memory_bytes": num_blocks * block_bytes, "max_model_len": 40, "async_depth": depth}
        with LLM(str(checkpoint), **OPTIONS | options) as llm:
            tight = generate(llm, prompts, params)
        num_preemptions += sum(output.metrics.num_preemptions for output in tight)
        assert_same(rows_of(tight), ample)
    assert num_preemptions >= 20, num_preemptions


def test_completions_of_one_prompt_have_rows_of_their_own(checkpoint: Path) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, detokenize=False)
    with LLM(str(checkpoint), **OPTIONS) as llm:
        (output,) = generate(llm, [some_prompts()[1]], params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    RouterOracle(checkpoint).judge(output)


def test_stop_strings_single_tokens_and_prompt_starts(checkpoint: Path) -> None:
    """B77. A stop string cuts the text, never the tokens or their rows."""
    prompt = some_prompts()[1]
    with LLM(str(checkpoint), async_depth=2, **OPTIONS) as llm:
        (free,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        letter = next(letter for letter in free.outputs[0].text if letter.strip())
        params = [
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=[letter]),
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, routed_experts_prompt_start=10),
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, routed_experts_prompt_start=len(prompt)),
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, return_routed_experts=False),
        ]
        *outputs, silent = generate(llm, [prompt] * 5, params)
    assert outputs[0].outputs[0].stop_reason == letter
    oracle = RouterOracle(checkpoint)
    for output in outputs:
        oracle.judge(output)
    assert [len(rows) for rows in rows_of(outputs)[1:]] == [26, 26 + 4 - 1 - 10, 3]
    assert silent.outputs[0].routed_experts is None


def test_an_aborted_request_returns_the_longest_prefix_that_is_known(
    checkpoint: Path, expected: list[np.ndarray]
) -> None:
    with LLM(str(checkpoint), async_depth=2, **OPTIONS) as llm:
        for num_steps in range(6):
            llm.engine.add_request("r", some_prompts()[1], PARAMS)
            for _ in range(num_steps):
                llm.engine.step()
            output = llm.engine.abort("r")
            assert output is not None
            (completion,) = output.outputs
            assert completion.finish_reason == "abort" and completion.routed_experts is not None
            num_rows = len(completion.routed_experts)
            np.testing.assert_array_equal(completion.routed_experts, expected[1][:num_rows])
            if completion.token_ids:
                assert num_rows == 26 + len(completion.token_ids) - 1
            llm.engine.reset_prefix_cache()


def test_streamed_outputs_bring_rows_as_they_come(checkpoint: Path, expected: list[np.ndarray]) -> None:
    with LLM(str(checkpoint), **OPTIONS) as llm:
        deltas: list[np.ndarray] = []
        for output in llm.stream(some_prompts()[1], PARAMS):
            (completion,) = output.outputs
            assert completion.routed_experts is not None
            deltas.append(completion.routed_experts[sum(map(len, deltas)) :].copy())
    assert len(deltas) == 6
    np.testing.assert_array_equal(np.concatenate(deltas), expected[1])


LAYOUTS = {
    "DP 2": {"data_parallel_size": 2},
    "DP 4": {"data_parallel_size": 4},
    "TP 2": {"tensor_parallel_size": 2},
    "DP 2 x TP 2": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_one_process_over_any_ranks(
    checkpoint: Path, expected: list[np.ndarray], layout: str
) -> None:
    """B74, B75: 1 to 5 requests over ranks of which some are idle; each rank captures its own tokens."""
    options = {"enable_expert_parallel": True, "distributed_executor_backend": "threads", "async_depth": 2}
    with LLM(str(checkpoint), **OPTIONS | options | LAYOUTS[layout]) as llm:
        for count in range(1, 6):
            assert_same(rows_of(generate(llm, some_prompts()[:count])), expected[:count])
        num_ranks = LAYOUTS[layout].get("data_parallel_size", 1) * LAYOUTS[layout].get("tensor_parallel_size", 1)
        assert len(llm.stats()["workers"]) == num_ranks


@pytest.mark.parametrize("layout", ["DP 2", "DP 2 x TP 2"])
def test_rows_are_logical_experts_wherever_their_replicas_live(
    checkpoint: Path, expected: list[np.ndarray], tmp_path: Path, layout: str
) -> None:
    """Experts shuffled over the ranks, some held two or three times: slots differ, rows do not."""
    num_ranks = 2 if layout == "DP 2" else 4
    rng = random.Random(8)
    slots = [rng.sample([*range(8), *rng.choices(range(8), k=4)], 12) for _ in range(4)]
    write_placement(Placement(Topology(8, 4, num_ranks), slots), tmp_path / "placement.json")
    options = {"enable_expert_parallel": True, "distributed_executor_backend": "threads", "num_redundant_experts": 4}
    placement = {"initial_placement": str(tmp_path / "placement.json")}
    with LLM(str(checkpoint), **OPTIONS | options | placement | LAYOUTS[layout]) as llm:
        assert_same(rows_of(generate(llm, some_prompts())), expected)


@pytest.mark.parametrize("layout", ["DP 2", "TP 2"])
def test_rows_are_the_same_while_experts_move(checkpoint: Path, expected: list[np.ndarray], layout: str) -> None:
    """Rows are logical experts, seen before they become slots: moves in nearly every step change none."""
    eplb = {"window_size": 1, "step_interval": 1, "num_redundant_experts": 4, "min_gain": 0,
            "policy": "trimtab.testing.policies:ShufflingPolicy"}  # fmt: skip
    options = {"enable_expert_parallel": True, "distributed_executor_backend": "threads", "enable_eplb": True}
    with LLM(str(checkpoint), eplb_config=eplb, **OPTIONS | options | LAYOUTS[layout]) as llm:
        placements = set()
        for _ in range(200):
            assert_same(rows_of(generate(llm, some_prompts())), expected)
            llm.engine.reset_prefix_cache()
            placements.add(tuple(llm._parts.models[0].moe_layers[0].routing_table.slots.flatten().tolist()))
            if len(placements) > 4:
                break
    assert len(placements) > 4, "experts did move meanwhile"


def test_rows_come_whole_from_other_processes(checkpoint: Path, expected: list[np.ndarray]) -> None:
    """B69: they are the caller's own to keep and to change."""
    options = {"enable_expert_parallel": True, "distributed_executor_backend": "mp", "data_parallel_size": 2}
    with LLM(str(checkpoint), **OPTIONS | options) as llm:
        found = rows_of(generate(llm, some_prompts()))
    assert_same(found, expected)
    for rows in found:
        rows += 1


def test_int8_experts_over_ranks_route_as_int8_experts_of_one(checkpoint: Path) -> None:
    options = {"quantization": "int8"}
    ranked = {"enable_expert_parallel": True, "distributed_executor_backend": "threads", "data_parallel_size": 2}
    with LLM(str(checkpoint), **OPTIONS | options) as llm:
        one = rows_of(generate(llm, some_prompts()))
    with LLM(str(checkpoint), **OPTIONS | options | ranked) as llm:
        assert_same(rows_of(generate(llm, some_prompts())), one)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_layer_that_writes_nothing_fails_the_requests_of_that_step_alone(
    checkpoint: Path, expected: list[np.ndarray]
) -> None:
    """B61."""
    with LLM(str(checkpoint), **OPTIONS) as llm:
        layer = llm._parts.models[0].moe_layers[1]
        llm.engine.add_request("first", some_prompts()[0], PARAMS)
        llm.engine.step()
        capture, layer.capture = layer.capture, NoCapture()
        failed = llm.engine.step()
        layer.capture = capture
        (completion,) = failed[0].outputs
        assert failed[0].error is not None and f"layers [{layer.layer_id}] did not write" in failed[0].error
        assert completion.finish_reason == "error"
        np.testing.assert_array_equal(completion.routed_experts, expected[0][:3])
        assert_same(rows_of(generate(llm, some_prompts())), expected)


def _share_the_buffer(llm: LLM) -> None:
    """Takes the clones away: what goes to the host is the capturer's own buffer, read when it is waited for."""
    from dataclasses import replace

    capturer = llm.engine.executor.worker.runner.capturer  # type: ignore[attr-defined]
    taken = capturer.get_routed_experts

    def get_routed_experts(slot_mappings: Any, num_tokens: int) -> Any:
        return replace(taken(slot_mappings, num_tokens), experts=capturer.buffer[:num_tokens])

    capturer.get_routed_experts = get_routed_experts


@pytest.mark.parametrize("shared", [False, True])
def test_a_delayed_host_copy_is_right_with_the_clone_and_wrong_without(
    checkpoint: Path, expected: list[np.ndarray], shared: bool
) -> None:
    """With two steps in flight a step's rows are read after the next one has run."""
    with LLM(str(checkpoint), **OPTIONS | {"async_depth": 2}) as llm:
        if shared:
            _share_the_buffer(llm)
        found = rows_of(generate(llm, some_prompts()))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)) != shared


def test_what_cannot_be_captured_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """B63: no group whose blocks live as long as their requests."""
    path = make_tiny_checkpoint(tmp_path, "mixtral", sliding_window=8)
    with pytest.raises(ValueError, match=r"needs a layer with full attention.*\[8\]"):
        LLM(str(path), **OPTIONS)
    with LLM(str(path), **OPTIONS | {"enable_return_routed_experts": False}) as llm:
        (output,) = generate(llm, [[1, 2, 3]])
        assert output.outputs[0].routed_experts is None and output.outputs[0].routed_experts_meta is None
        wish = SamplingParams(return_routed_experts=True)
        (refused,) = llm.generate(ids([[1, 2, 3]]), wish, use_tqdm=False)
        assert "needs an engine with enable_return_routed_experts" in (refused.error or "")


def test_memory_is_reported_and_two_engines_do_not_mix(checkpoint: Path, expected: list[np.ndarray]) -> None:
    """B64: two engines in one process, and one after another."""
    with LLM(str(checkpoint), **OPTIONS) as llm, LLM(str(checkpoint), **OPTIONS) as other:
        (rank,) = llm.engine.scheduler.ranks
        captured = llm.stats()["workers"][0]["routed_experts_bytes"]
        assert captured == 9 * len(llm._parts.spec.moe_layers) * 2 * 4, "int32 [tokens of a step, layers, top-k]"
        assert llm.stats()["memory_bytes"]["routed_experts"] == rank.row_store.num_bytes + captured
        for count in (1, 2):
            assert_same(rows_of(generate(llm, some_prompts()[:count])), expected[:count])
            assert_same(rows_of(generate(other, some_prompts()[2:])), expected[2:])
    with LLM(str(checkpoint), **OPTIONS) as llm:
        assert_same(rows_of(generate(llm, some_prompts()[:1])), expected[:1])
