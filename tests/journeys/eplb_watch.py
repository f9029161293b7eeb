"""Engines whose experts always move, watched after every step; and what a process holds, before and after."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trimtab import LLM, SamplingParams
from trimtab.experts.balancer import RankBalancer
from trimtab.outputs import RequestOutput

LIMITS: dict[str, Any] = {
    "max_model_len": 96, "max_num_seqs": 2, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": "4MiB",
    "num_threads": 1, "dtype": "float32",
}  # fmt: skip
SHUFFLE: dict[str, Any] = {
    "window_size": 1, "step_interval": 1, "num_redundant_experts": 4, "min_gain": 0,
    "policy": "trimtab.testing.policies:ShufflingPolicy",
}  # fmt: skip
SAMPLING = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)


def prompts(count: int, seed: int = 7, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 90, random.integers(1, longest)).tolist() for _ in range(count)]


# For journeys that are about states and faults: the fixtures of conftest.py serve these.
FEW_TOKENS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
FEW_PROMPTS = prompts(9, longest=24)


@contextmanager
def balanced(checkpoint: Path, eplb: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    options = {"distributed_executor_backend": "threads", "enable_expert_parallel": True, **LIMITS, **options}
    with LLM(str(checkpoint), enable_eplb=True, eplb_config={**SHUFFLE, **(eplb or {})}, **options) as llm:
        yield llm


def rank_balancers(llm: LLM) -> list[RankBalancer]:
    return [worker.runner.balancer for worker in llm._parts.workers]  # type: ignore[attr-defined]


def is_open(llm: LLM) -> bool:
    return llm.eplb_stats()["state"] not in ("IDLE", "DONE", "ABORTED")


def assert_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """To the last bit: of anything that differs in the network, log-probabilities show it."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None, ours.error
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids, "other tokens"
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs, "other log-probabilities"


class Watch:
    """Runs requests step by step and looks at every rank's slots, lookups and placement after each.

    With two steps in flight a rank is in the midst of one when another returns: `look` only at the end then.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.ranks = rank_balancers(llm)
        self.looks = llm.engine.async_depth == 1
        self.num_steps = self.num_open = self.num_commits = self.most_replicas = 0
        self.placement = self.ranks[0].placement

    def run(self, token_ids: Sequence[Sequence[int]], sampling: SamplingParams = SAMPLING) -> list[RequestOutput]:
        engine, finished = self.llm.engine, {}
        for index, prompt in enumerate(token_ids):
            engine.add_request(str(index), prompt, sampling)
        while engine.has_unfinished:
            for output in engine.step():
                assert output.error is None, output.error
                if output.finished:
                    finished[int(output.request_id)] = output
            self.num_steps += 1
            self.num_open += is_open(self.llm)
            if self.looks:
                self.look()
        return [finished[index] for index in range(len(token_ids))]

    def run_until(
        self,
        enough: Callable[[], bool],
        token_ids: Sequence[Sequence[int]],
        expected: Sequence[RequestOutput],
        sampling: SamplingParams = SAMPLING,
        most_times: int = 50,
    ) -> int:
        """Runs and compares, again and again until `enough`; how often. In how many steps policies and movers have
        worked is the machine's affair: a test says what it has to see, not when."""
        for number in range(1, most_times + 1):
            assert_same(self.run(token_ids, sampling), expected)
            if enough():
                return number
            self.llm.engine.reset_prefix_cache()
        raise AssertionError(f"did not come about in {self.num_steps} steps: {self.llm.eplb_stats()}")

    def look(self) -> None:
        (digest,) = {rank.placement.digest() for rank in self.ranks}
        if digest != self.placement.digest():
            self.num_commits += 1
            self.placement = self.ranks[0].placement
            self.most_replicas = max(self.most_replicas, int(self.placement.replica_counts().max()))
            self.check()

    def check(self) -> None:
        """Rule 1: slots hold their experts' bytes, lookups are what the placement says."""
        for rank, model in zip(self.ranks, self.llm._parts.models, strict=True):
            rank.mover.check_slots(self.placement)  # type: ignore[attr-defined]
            for ordinal, layer in enumerate(model.moe_layers):
                for expert, slots in enumerate(self.placement.expert_to_slots(ordinal)):
                    assert set(layer.routing_table.slots[expert].tolist()) == set(slots)


class Traffic:
    """The same prompts again and again, a few at a time; what finishes is compared with `expected` to the last bit.

    `num_right` counts those. A request fails only where `may_fail`; `failures` keeps why.
    """

    def __init__(
        self,
        llm: LLM,
        token_ids: Sequence[Sequence[int]],
        expected: Sequence[RequestOutput],
        sampling: SamplingParams = SAMPLING,
        num_running: int = 4,
    ) -> None:
        self.llm, self.token_ids, self.expected, self.sampling = llm, token_ids, expected, sampling
        self.num_running = num_running
        self.num_sent = self.num_right = self.num_steps = 0
        self.failures: list[str] = []

    def step(self, *, tops_up: bool = True, may_fail: bool = False) -> None:
        engine = self.llm.engine
        while tops_up and engine.num_unfinished < self.num_running:
            engine.add_request(f"t{self.num_sent}", self.token_ids[self.num_sent % len(self.token_ids)], self.sampling)
            self.num_sent += 1
        self.num_steps += 1
        for output in engine.step():
            if output.error is not None:
                assert may_fail, output.error
                self.failures.append(output.error)
            elif output.finished:
                index = int(output.request_id[1:]) % len(self.token_ids)
                assert_same([output], [self.expected[index]])
                self.num_right += 1

    def until(self, condition: Callable[[], bool], most_steps: int = 20_000, **options: Any) -> None:
        for _ in range(most_steps):
            if condition():
                return
            self.step(**options)
        raise AssertionError(f"did not come about in {most_steps} steps: {self.llm.eplb_stats()}")

    def finish(self, **options: Any) -> None:
        while self.llm.engine.has_unfinished:
            self.step(tops_up=False, **options)

    def outcome(self, name: str) -> int:
        return self.llm.eplb_stats()["rearrangements"][name]

    def until_one_more(self, name: str, **options: Any) -> None:
        """Serves until one more rearrangement has ended so."""
        before = self.outcome(name)
        self.until(lambda: self.outcome(name) > before, **options)


def reasons(llm: LLM, event: str) -> list[str]:
    return [entry["reason"] for entry in llm.eplb_stats()["events"] if entry["event"] == event]


def holdings() -> dict[str, Any]:
    """Threads, child processes, open files, named shared memory and temporary folders of this process."""
    gc.collect()
    pid = os.getpid()
    files: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            files[os.readlink(entry).partition(":[")[0]] += 1  # sockets and pipes have numbers of their own
        except FileNotFoundError:
            continue  # the listing's own
    files.pop(f"/proc/{pid}/fd", None)
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": Path(f"/proc/self/task/{pid}/children").read_text().split(),
        "files": dict(files),
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if "trimtab" in name),
        "folders": sorted(str(folder) for folder in Path(tempfile.gettempdir()).glob("trimtab-*")),
    }


@contextmanager
def nothing_is_left(folder: Path) -> Iterator[None]:
    """What the block started has ended and what it opened is closed. `folder` is where it makes temporary ones."""
    before_folder, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        before = holdings()
        yield
        after = holdings()
        left = {kind: (before[kind], after[kind]) for kind in before if before[kind] != after[kind]}
        assert not left, f"(before, after): {left}"
    finally:
        tempfile.tempdir = before_folder
