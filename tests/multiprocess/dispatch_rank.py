"""One rank of tests/multiprocess/test_dispatch_processes.py.

Runs random steps through a MoE layer whose experts are spread over the ranks, and sends "ready", then "done DIGEST"
of its results, or "failed REASON".
"""

from __future__ import annotations

import hashlib
from multiprocessing.connection import Connection

import torch

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.data.dispatch.base import Dispatcher
from trimtab.experts.data.dispatch.choice import DispatchPlan, open_dispatcher
from trimtab.experts.data.dispatch.local import LocalDispatcher
from trimtab.experts.data.kernels import make_expert_kernel
from trimtab.experts.formats.base import ExpertShape, ExpertTensors, make_activation

NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 8, 2, 64, 12
SHAPE = ExpertShape(HIDDEN, 32, True, False, make_activation("silu"))


def run(dispatcher: Dispatcher, rank: int, num_ranks: int, num_steps: int, token_group: int) -> str:
    """A digest over the results of the token group's steps; `rank` of `num_ranks` holds its part of the experts."""
    generator = torch.Generator().manual_seed(7)
    experts = [
        ExpertTensors(
            (torch.randn(64, HIDDEN, generator=generator) / 8).bfloat16(),
            (torch.randn(HIDDEN, 32, generator=generator) / 6).bfloat16(),
        )
        for _ in range(NUM_EXPERTS)
    ]
    kernel = make_expert_kernel(SHAPE, NUM_EXPERTS // num_ranks, torch.bfloat16)
    for slot in range(kernel.num_slots):
        kernel.load_slot(slot, experts[rank * kernel.num_slots + slot])
    digest = hashlib.sha256()
    generator.manual_seed(100 + token_group)
    for _ in range(num_steps):
        num_tokens = max(0, int(torch.randint(-4, MAX_TOKENS + 1, (), generator=generator)))
        hidden = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        ids = torch.randint(-1, NUM_EXPERTS, (num_tokens, TOP_K), generator=generator)
        out = dispatcher.run_experts(kernel, hidden, ids, torch.rand(num_tokens, TOP_K, generator=generator))
        digest.update(out.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def single_process(num_steps: int, token_group: int) -> str:
    return run(LocalDispatcher(), 0, 1, num_steps, token_group)


def serve(plan: DispatchPlan, rank: int, num_steps: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    dispatcher = open_dispatcher(plan, rank)
    try:
        connection.send("ready")
        connection.send(f"done {run(dispatcher, rank, plan.num_ranks, num_steps, rank // plan.num_sharing)}")
        dispatcher.close()
    except RankFailureError as error:
        connection.send(f"failed {error}")
    except BaseException:  # a signal may come between two layers too
        dispatcher.abort()
        raise
