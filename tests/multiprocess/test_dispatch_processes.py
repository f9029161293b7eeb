"""Dispatch between real processes: the same bits as one, and no hang when a rank is killed or stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dispatch_rank
import pytest

from trimtab.experts.data.dispatch.choice import DispatchResources, choose_dispatcher, create_resources
from trimtab.kernels.native.exchange import exchange_refusal

needs_exchange = pytest.mark.skipif(exchange_refusal() is not None, reason="the native core is not built")
FOREVER = 10**9


# Processes are forked from one that has imported torch: starting one by one costs seconds each.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dispatch_rank"])


@dataclass
class Rank:
    process: Any
    connection: Connection

    def said(self) -> str:
        assert self.connection.poll(60), "a rank hangs"
        return str(self.connection.recv())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def started(
    backend: str, num_ranks: int, num_sharing: int, folder: Path, num_steps: int, timeout_s: float
) -> Iterator[tuple[DispatchResources, list[Rank]]]:
    plan = choose_dispatcher(
        num_ranks=num_ranks, num_sharing=num_sharing, max_tokens=dispatch_rank.MAX_TOKENS,
        max_top_k=dispatch_rank.TOP_K, max_hidden_size=dispatch_rank.HIDDEN, backend=backend, timeout_s=timeout_s,
    )  # fmt: skip
    resources = create_resources(plan, folder)
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the fork server imports this folder's module
        for number in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=dispatch_rank.serve, args=(resources.plan, number, num_steps, theirs))
            process.start()
            theirs.close()
            ranks.append(Rank(process, ours))
    try:
        yield resources, ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
        resources.close()


@pytest.mark.parametrize(
    ("backend", "num_ranks", "num_sharing"),
    [
        pytest.param("shared_memory", 2, 1, marks=needs_exchange),
        pytest.param("shared_memory", 4, 2, marks=needs_exchange),
        ("gloo", 2, 1),
    ],
)
def test_processes_give_the_bits_of_one(backend: str, num_ranks: int, num_sharing: int, tmp_path: Path) -> None:
    with started(backend, num_ranks, num_sharing, tmp_path, 200, timeout_s=60.0) as (_, ranks):
        for rank, process in enumerate(ranks):
            assert process.said() == "ready"
            assert process.said() == f"done {dispatch_rank.single_process(200, rank // num_sharing)}"


@needs_exchange
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_controllers_abort_wakes_ranks_that_wait_for_a_lost_one(blow: signal.Signals, tmp_path: Path) -> None:
    with started("shared_memory", 2, 1, tmp_path, FOREVER, timeout_s=600.0) as (resources, ranks):
        assert [rank.said() for rank in ranks] == ["ready", "ready"]
        ranks[1].signal(blow)
        resources.abort()
        assert ranks[0].said() == "failed the exchange between ranks was aborted by the controller"
        ranks[0].process.join(10)
        assert ranks[0].process.exitcode == 0


@needs_exchange
def test_without_a_controller_the_deadline_ends_the_wait(tmp_path: Path) -> None:
    with started("shared_memory", 2, 1, tmp_path, FOREVER, timeout_s=0.5) as (_, ranks):
        assert [rank.said() for rank in ranks] == ["ready", "ready"]
        ranks[1].signal(signal.SIGKILL)
        assert "rank 1 has not" in (line := ranks[0].said()) and "within 0.5 s" in line


@needs_exchange
def test_a_signal_ends_a_rank_that_waits_in_native_code(tmp_path: Path) -> None:
    """Ctrl-C: the wait comes back to Python often enough, and the rank that leaves wakes the others."""
    with started("shared_memory", 2, 1, tmp_path, FOREVER, timeout_s=600.0) as (_, ranks):
        assert [rank.said() for rank in ranks] == ["ready", "ready"]
        ranks[1].signal(signal.SIGSTOP)
        ranks[0].signal(signal.SIGINT)
        ranks[0].process.join(20)
        assert ranks[0].process.exitcode not in (None, 0)
        ranks[1].signal(signal.SIGCONT)
        assert ranks[1].said() == "failed the exchange between ranks was aborted by rank 0"


def test_a_lost_rank_ends_gloo_with_a_reason(tmp_path: Path) -> None:
    with started("gloo", 2, 1, tmp_path, FOREVER, timeout_s=5.0) as (_, ranks):
        assert [rank.said() for rank in ranks] == ["ready", "ready"]
        ranks[1].signal(signal.SIGKILL)
        assert ranks[0].said().startswith("failed rank 0 could not exchange")
