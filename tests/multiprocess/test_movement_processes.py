"""Movement between real processes: every byte in its place, and no hang when one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import movement_rank
import pytest
import torch

from trimtab.experts.delta import diff
from trimtab.experts.movement.choice import choose_communicator, create_resources
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import Failed, Quiescent, Staged
from trimtab.kernels.checksum import checksum
from trimtab.testing.movement import random_placement

SEED = 20_261_130
# Processes are forked from one that has imported torch: starting one by one costs seconds each.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["movement_rank"])
every_communicator = pytest.mark.parametrize("communicator", ["shared_memory", "torch_gloo"])


class Ranks:
    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def tell(self, *command: object) -> list[Any]:
        """To every rank at once -> their answers, by rank."""
        for connection in self.connections:
            connection.send(command)
        return [self.answer(rank) for rank in range(len(self.connections))]

    def answer(self, rank: int) -> Any:
        assert self.connections[rank].poll(60), f"rank {rank} hangs"
        return self.connections[rank].recv()


@contextmanager
def started(communicator: str, placement: Placement, folder: Path, timeout_s: float) -> Iterator[Ranks]:
    topology = placement.topology
    plan = choose_communicator(
        num_ranks=topology.num_ranks, slots_per_rank=topology.slots_per_rank, slot_nbytes=movement_rank.SLOT_NBYTES,
        communicator=communicator, timeout_s=timeout_s,
    )  # fmt: skip
    resources = create_resources(plan, folder)
    ranks = Ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the fork server imports this folder's module
        for rank in range(topology.num_ranks):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=movement_rank.serve, args=(resources.plan, rank, placement, theirs))
            process.start()
            theirs.close()
            ranks.processes.append(process)
            ranks.connections.append(ours)
    try:
        assert [ranks.answer(rank) for rank in range(topology.num_ranks)] == ["ready"] * topology.num_ranks
        resources.close()  # from now on the ranks hold it
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        resources.close()


@every_communicator
def test_random_placements_between_processes_put_every_byte_in_its_place(communicator: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    topology = Topology(6, 2, 2)
    placement = first = Placement.identity(topology, movement_rank.NUM_LAYERS)
    sums = [
        [checksum(movement_rank.expert_bytes(layer, expert)) for expert in range(6)]
        for layer in range(movement_rank.NUM_LAYERS)
    ]
    num_bytes = num_moves = 0
    with started(communicator, first, tmp_path, timeout_s=30.0) as ranks:
        targets = [*(random_placement(topology, movement_rank.NUM_LAYERS, generator) for _ in range(4)), first]
        for transaction, new in enumerate(targets):
            assert ranks.tell("begin", transaction, new.slot_to_expert.tolist()) == [[], []]
            for delta in diff(placement, new):
                num_moves += delta.num_slots
                for (report,) in ranks.tell("stage", delta.layer):
                    assert isinstance(report, Staged), report
                    num_bytes += report.num_bytes
                held = ranks.tell("commit", delta.layer)
                rows = placement.slot_to_expert.copy()
                rows[delta.layer] = new.slot_to_expert[delta.layer]
                placement = Placement(topology, rows)
                for layer, row in enumerate(rows.tolist()):
                    assert held[0][layer] + held[1][layer] == [sums[layer][expert] for expert in row]
            assert ranks.tell("finish") == [[Quiescent(rank, transaction)] for rank in (0, 1)]
        assert placement == first and num_moves > 20 and num_bytes > 10 * movement_rank.SLOT_NBYTES
        assert ranks.tell("close") == ["closed", "closed"]
        for process in ranks.processes:
            process.join(20)
            assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


@every_communicator
def test_a_killed_rank_is_named_and_the_others_come_to_rest(communicator: str, tmp_path: Path) -> None:
    topology = Topology(4, 0, 2)
    first = Placement.identity(topology, movement_rank.NUM_LAYERS)
    with started(communicator, first, tmp_path, timeout_s=2.0) as ranks:
        ranks.tell("begin", 1, [[3, 1, 2, 0]] * movement_rank.NUM_LAYERS)
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        ranks.processes[1].join()
        survivor = ranks.connections[0]
        survivor.send(("stage", 0))
        (report,) = ranks.answer(0)
        assert isinstance(report, Failed) and "rank 1" in report.reason
        survivor.send(("abort",))
        assert ranks.answer(0) == [Quiescent(0, 1)]
        survivor.send(("close",))
        assert ranks.answer(0) == "closed"
        ranks.processes[0].join(20)
        assert ranks.processes[0].exitcode == 0
