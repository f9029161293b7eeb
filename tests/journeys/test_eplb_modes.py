"""Experts move in every mode that is admitted: precisions, kernels, dispatchers, depths; and off means absent."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from eplb_watch import LIMITS, SAMPLING, Watch, balanced, prompts, rank_balancers

from trimtab import LLM, SamplingParams
from trimtab.kernels.native.exchange import Senders
from trimtab.kernels.native.library import Format, native_kernels
from trimtab.testing.checkpoints import make_tiny_checkpoint

MODES: dict[str, dict[str, Any]] = {
    "depth 2": {"async_depth": 2},
    "Gloo tokens, depth 2": {"async_depth": 2, "all2all_backend": "gloo"},
    "all Gloo": {"all2all_backend": "gloo", "eplb": {"communicator": "torch_gloo"}},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "portable bf16": {"dtype": "bfloat16"},  # in fp32 its small products depend on the batch, experts moved or not
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixtral"), seed=4)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the native core where the mode says so."""
    if "portable" in request.node.name:
        native_kernels.cache_clear()
        monkeypatch.setenv("TRIMTAB_NATIVE", "off")
    yield
    monkeypatch.undo()
    native_kernels.cache_clear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["DP 2", "TP 2"])
def test_tokens_stay_bitwise_the_same_in_every_mode_in_which_experts_move(
    checkpoint: Path, kernels: None, mode: str, layout: dict[str, int]
) -> None:
    """B17, B19, B50: rearranged after every step; weights, scales and packed forms travel together. Slots hold their
    experts' bytes (rule 1), also where two steps are in flight."""
    if mode == "int8" and not native_kernels().supports(Format.INT8):
        pytest.skip("no native int8 kernel here")
    options = dict(MODES[mode])
    eplb = options.pop("eplb", {})
    plain = {name: value for name, value in options.items() if name in ("dtype", "quantization")}
    with LLM(str(checkpoint), **LIMITS | plain) as llm:
        expected = llm.generate(prompts(8), SAMPLING, use_tqdm=False)
        assert llm._parts.models[0].moe_layers[0].kernel.name == ("portable" if "portable" in mode else "native")
    with balanced(checkpoint, eplb, **options | layout) as llm:
        watch = Watch(llm)
        watch.run_until(
            lambda: llm.eplb_stats()["moves"] > 30 and llm.eplb_stats()["mixed_layer_steps"] > 2, prompts(8), expected
        )
        stats = llm.eplb_stats()
        while llm.engine.has_work:
            llm.engine.step()
        watch.placement = watch.ranks[0].placement
        watch.check()
    assert stats["rearrangements"]["aborted"] == stats["rearrangements"]["failed"] == 0


def test_prompts_so_long_that_ranks_compute_their_own_tokens_around_the_others_keep_their_bits(
    checkpoint: Path,
) -> None:
    """The order of many tokens (shared-memory dispatch), with experts on the move and ranks that have unlike loads."""
    options: dict[str, Any] = {"max_model_len": 320, "max_num_batched_tokens": 320, "kv_cache_memory_bytes": "8MiB"}
    sizes = (290, 30, 300, 250, 10, 280)
    rng = random.Random(3)
    token_ids = [[rng.randrange(3, 90) for _ in range(size)] for size in sizes]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    with LLM(str(checkpoint), **LIMITS | options) as llm:
        expected = llm.generate(token_ids, params, use_tqdm=False)
    with balanced(checkpoint, data_parallel_size=2, **options) as llm:
        seen: list[set[Senders]] = []
        for model in llm._parts.models:
            exchange: Any = model.moe_layers[0].dispatcher._exchange  # type: ignore[attr-defined]
            senders: set[Senders] = set()

            def arrivals(*arguments: Any, found: Any = exchange.arrivals, senders: Any = senders) -> Any:
                senders.add(arguments[0])
                return found(*arguments)

            exchange.arrivals = arrivals
            seen.append(senders)
        watch = Watch(llm)
        watch.run_until(lambda: llm.eplb_stats()["moves"] > 10, token_ids, expected, params)
    assert seen == [set(Senders)] * 2, "both orders, on both ranks"


class Log:
    def __init__(self) -> None:
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def record(self, operation: str, sizes: tuple[int, ...]) -> None:
        self.operations.append((operation, sizes))


@pytest.mark.parametrize("phase", ["all", "prefill", "decode"])
def test_rule_09_collectives_are_the_same_on_all_ranks_busy_idle_filtered_or_warming_up(
    checkpoint: Path, phase: str
) -> None:
    """B06, B27, B28: the phase filter decides what a rank submits alone; moves and warm-ups add no collective,
    and take none away."""
    rng = random.Random(11)
    with balanced(checkpoint, {"load_collection_phase": phase}, data_parallel_size=2) as llm:
        logs = [Log() for _ in llm._parts.models]
        for model, log in zip(llm._parts.models, logs, strict=True):
            model.moe_layers[0].dispatcher.log = log
        num_forwards = 0
        step = 0
        while step < 150 or (step < 5000 and llm.eplb_stats()["moves"] == 0):
            step += 1
            if rng.random() < 0.15 or not llm.engine.has_unfinished:
                params = SamplingParams(max_tokens=rng.randint(1, 9), detokenize=False)
                llm.engine.add_request(str(step), [5, 6, step % 90], params, data_parallel_rank=rng.choice([0, 0, 1]))
            with llm.engine.warm_up() if step % 50 < 10 else nullcontext():
                llm.engine.step()
            num_forwards += 1
        assert llm.eplb_stats()["moves"] > 0 and llm.eplb_stats()["clock"] < num_forwards
        num_layers = len(llm._parts.models[0].moe_layers)
    assert len(logs[0].operations) == num_forwards * num_layers * len(set(name for name, _ in logs[0].operations))
    assert all(log.operations == logs[0].operations for log in logs)


def test_rule_05_recorded_load_is_that_of_the_experts_whatever_moved(checkpoint: Path) -> None:
    """Folded under the placement that it was counted with: over all windows, what an engine counts without it."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(checkpoint), **LIMITS) as llm, llm.expert_usage() as usage:
        expected = llm.generate(prompts(6), params, use_tqdm=False)
        counts = usage.counts
    with balanced(checkpoint, data_parallel_size=2, enable_prefix_caching=False) as llm:
        controller: Any = llm._controller()
        found, add = [], controller.window.add

        def note(report: Any) -> Any:
            found.append(report.counts)
            return add(report)

        controller.window.add = note
        number = Watch(llm).run_until(lambda: llm.eplb_stats()["moves"] > 0, prompts(6), expected, params)
        found += [rank._bucket.counts + rank._load.fold(rank.placement) for rank in rank_balancers(llm)]
    assert sum(found).tolist() == (number * counts).tolist()


OFF = """
import json, sys, threading, os
from trimtab import LLM, SamplingParams
with LLM(sys.argv[1], data_parallel_size=2, enable_expert_parallel=True, distributed_executor_backend="threads",
         all2all_backend="gloo",
         **json.loads(sys.argv[2])) as llm:
    outputs = llm.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True,
                                                                    logprobs=2), use_tqdm=False)
    print(json.dumps({
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "logprobs": [[entry.logprob for step in output.outputs[0].logprobs for entry in step.values()]
                     for output in outputs],
        "modules": [name for name in sys.modules if name.startswith(
            ("trimtab.experts.control", "trimtab.experts.movement", "trimtab.experts.balancer"))],
        "threads": [thread.name for thread in threading.enumerate()],
        "segments": sum("memfd:trimtab" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                        if os.path.islink(f"/proc/self/fd/{fd}")),
        "memory": sorted(llm.stats()["memory_bytes"]),
        "recorders": [type(layer.look_up).__name__ for model in llm._parts.models for layer in model.moe_layers],
    }))
"""


def test_rule_13_off_means_absent(checkpoint: Path) -> None:
    """No module, thread, segment, recorder or memory of balancing, and the bits of one process."""
    with LLM(str(checkpoint), **LIMITS) as llm:
        expected = llm.generate(prompts(3), SAMPLING, use_tqdm=False)
    command = [sys.executable, "-c", OFF, str(checkpoint), json.dumps(LIMITS), json.dumps(prompts(3))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["modules"] == []
    assert not [name for name in found["threads"] if "mover" in name]
    assert found["segments"] == 0, "Gloo dispatches without"
    assert found["memory"] == ["kv_cache", "weights"]
    assert "RecordingLookUp" not in found["recorders"]
    assert found["tokens"] == [output.outputs[0].token_ids for output in expected]
    assert found["logprobs"] == [
        [entry.logprob for step in output.outputs[0].logprobs or [] for entry in step.values()] for output in expected
    ]


@pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])
def test_extra_memory_is_redundant_slots_staging_and_tables_within_five_percent(
    tmp_path: Path, communicator: str
) -> None:
    """B52: what ranks hold for balancing, counted where it is allocated, against what is reported at start; and it
    stays the same."""
    path = make_tiny_checkpoint(tmp_path, seed=5, hidden_size=128, intermediate_size=256)

    def held(llm: LLM) -> int:
        slots = sum(
            layer.kernel.num_slots * layer.kernel.slot_nbytes
            for model in llm._parts.models
            for layer in model.moe_layers
        )
        for rank in rank_balancers(llm):
            if not hasattr(rank, "mover"):
                continue
            mover: Any = rank.mover
            slots += mover._communicator.num_bytes + mover._table().nbytes
            slots += rank._load.counts.nbytes  # type: ignore[attr-defined]
        return slots

    ranked: dict[str, Any] = {"data_parallel_size": 2, **LIMITS}
    with LLM(str(path), enable_expert_parallel=True, distributed_executor_backend="threads", **ranked) as llm:
        before = held(llm)
        expected = llm.generate(prompts(8), SAMPLING, use_tqdm=False)
    with balanced(path, {"communicator": communicator}, **ranked) as llm:
        extra, reported = held(llm) - before, llm.stats()["memory_bytes"]
        Watch(llm).run_until(lambda: llm.eplb_stats()["moves"] > 0, prompts(8), expected)
        assert held(llm) - before == extra
    accounted = reported["redundant_experts"] + reported["staging"]
    assert abs(extra - accounted) <= 0.05 * accounted, (extra, reported)
