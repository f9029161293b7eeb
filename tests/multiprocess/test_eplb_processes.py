"""Experts move between processes: right to the last bit, new weights included; and a rank that is lost meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eplb_watch import LIMITS, Traffic, balanced, nothing_is_left, prompts

from trimtab import LLM, SamplingParams, ranks
from trimtab.engine.engine import EngineDeadError
from trimtab.engine.executor.multiprocess import MultiprocessExecutor
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint

SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = prompts(6, longest=24)
DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(checkpoints: list[Path]) -> list[list[RequestOutput]]:
    found = []
    for path in checkpoints:
        with LLM(str(path), **LIMITS) as llm:
            found.append(llm.generate(PROMPTS, SAMPLING, use_tqdm=False))
    return found


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """While this file is there, movers do not finish. Sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="tt", dir="/tmp") as folder:
        file = Path(folder) / "hold"
        monkeypatch.setenv("EPLB_HOLD", str(file))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        monkeypatch.setattr(ranks, "WORKER", "eplb_rank")
        with nothing_is_left(Path(folder)):
            yield file


@pytest.mark.parametrize(
    ("communicator", "all2all_backend", "async_depth", "blow", "victim"),
    [("shared_memory", "shared_memory", 2, "SIGKILL", 1), ("torch_gloo", "gloo", 1, "SIGSTOP", 0)],
)
def test_a_rank_that_is_lost_during_a_transfer_ends_the_engine_within_five_seconds(
    checkpoints: list[Path], expected: list[list[RequestOutput]], hold: Path, communicator: str, all2all_backend: str,
    async_depth: int, blow: str, victim: int,
) -> None:  # fmt: skip
    """B123, rule 15: balancing or not, it is the engine's failure; no process, folder, memory or socket is left. Before
    it, experts move, new weights come (B23), and experts move on."""
    options: dict[str, Any] = {"distributed_executor_backend": "mp", "data_parallel_size": 2}
    options |= {"all2all_backend": all2all_backend, "async_depth": async_depth}
    with balanced(checkpoints[0], {"communicator": communicator}, **options) as llm:
        traffic = Traffic(llm, PROMPTS, expected[0], SAMPLING)
        traffic.until(lambda: traffic.outcome("done") >= 5 and traffic.num_right >= 6)
        traffic.finish()
        assert llm.update_weights(str(checkpoints[1])) == 1
        traffic.expected = expected[1]
        done, right = traffic.outcome("done"), traffic.num_right
        traffic.until(lambda: traffic.outcome("done") >= done + 5 and traffic.num_right >= right + 6)
        assert llm.eplb_stats()["moves"] > 50
        hold.touch()
        traffic.until(lambda: llm.eplb_stats()["state"].startswith("STAGING") and llm.engine.num_unfinished == 4)
        for _ in range(10):
            traffic.step()
        assert llm.eplb_stats()["state"].startswith("STAGING"), "the transfer is under way"
        assert isinstance(llm.engine.executor, MultiprocessExecutor)
        workers = llm.engine.executor.workers
        os.kill(workers.processes[victim].pid, getattr(signal, blow))
        began = time.monotonic()
        while not traffic.failures:
            traffic.step(may_fail=True, tops_up=False)
        assert time.monotonic() - began < DEADLINE_S
        assert all(f"rank {victim}: its process" in why for why in traffic.failures)
        assert not llm.engine.has_unfinished
        with pytest.raises(EngineDeadError, match=f"rank {victim}: "):
            llm.engine.add_request("late", [1])
        llm.shutdown()
        assert not any(Path(f"/proc/{process.pid}").exists() for process in workers.processes)
        hold.unlink()


def test_rule_18_shutdown_during_a_transfer_aborts_it_on_all_ranks_before_they_end(
    checkpoints: list[Path], expected: list[list[RequestOutput]], hold: Path
) -> None:
    options: dict[str, Any] = {"distributed_executor_backend": "mp", "data_parallel_size": 2}
    with balanced(checkpoints[0], **options) as llm:
        traffic = Traffic(llm, PROMPTS, expected[0], SAMPLING)
        traffic.until(lambda: traffic.outcome("done") >= 1)
        hold.touch()
        traffic.until(lambda: llm.eplb_stats()["state"].startswith("STAGING") and llm.engine.num_unfinished == 4)
        assert isinstance(llm.engine.executor, MultiprocessExecutor)
        processes = llm.engine.executor.workers.processes
        llm.shutdown()
        ended = [entry for entry in llm.eplb_stats()["events"] if entry["event"] == "aborted"]
        assert [entry["reason"] for entry in ended] == ["drain"], "all ranks said that their movers rest"
        assert llm._controller().is_at_rest and all(process.returncode is not None for process in processes)
        hold.unlink()
