"""With many tokens a rank computes its own around those of the others, and so need not wait for a slower one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from trimtab.experts.data.dispatch.base import Dispatcher
from trimtab.experts.data.dispatch.choice import choose_dispatcher, create_resources, open_dispatcher
from trimtab.experts.data.dispatch.shared_memory import MANY_PAIRS_PER_SLOT
from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.kernels.reference import ReferenceExpertKernel
from trimtab.experts.formats.base import ExpertShape, ExpertTensors, make_activation
from trimtab.kernels.native.exchange import exchange_refusal
from trimtab.testing.ranks import run_ranks

if exchange_refusal() is not None:
    pytest.skip("the native core is not built", allow_module_level=True)

NUM_SLOTS, TOP_K, HIDDEN = 4, 2, 8  # slots of one rank
SHAPE = ExpertShape(HIDDEN, 8, True, False, make_activation("silu"))
MANY = MANY_PAIRS_PER_SLOT * 2 * NUM_SLOTS // TOP_K  # tokens of one rank


class Told:
    """A kernel that tells, before it computes, how many rows it was given: the rank's n-th call."""

    def __init__(self, kernel: ExpertKernel, tell: Callable[[int], None]) -> None:
        self.kernel, self.tell = kernel, tell
        self.num_slots, self.combine = kernel.num_slots, kernel.combine
        self.rows: list[int] = []

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        self.rows.append(len(rows))
        self.tell(len(self.rows))
        return self.kernel.experts(rows, slot_ids)


def kernels() -> tuple[ExpertKernel, list[ExpertKernel]]:
    """One that holds all experts, and two that hold half of them each."""
    generator = torch.Generator().manual_seed(3)
    experts = [
        ExpertTensors(torch.randn(16, HIDDEN, generator=generator), torch.randn(HIDDEN, 8, generator=generator))
        for _ in range(2 * NUM_SLOTS)
    ]

    def holding(some: list[ExpertTensors]) -> ExpertKernel:
        kernel = ReferenceExpertKernel(SHAPE, len(some), torch.float32)
        for slot, expert in enumerate(some):
            kernel.load_slot(slot, expert)
        return kernel

    return holding(experts), [holding(experts[:NUM_SLOTS]), holding(experts[NUM_SLOTS:])]


def run(
    folder: Path, num_tokens: int, tell: list[Callable[[int], None]], before: list[Callable[[], None]]
) -> list[Told]:
    """Both ranks through one layer; `before` is called by each before it comes. Outputs are those of one kernel."""
    plan = choose_dispatcher(
        num_ranks=2, num_sharing=1, max_tokens=num_tokens, max_top_k=TOP_K, max_hidden_size=HIDDEN,
        backend="shared_memory", timeout_s=20.0,
    )  # fmt: skip
    resources = create_resources(plan, folder)
    oracle, halves = kernels()
    told = [Told(kernel, tell[rank]) for rank, kernel in enumerate(halves)]

    def tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        ids = torch.rand(num_tokens, 2 * NUM_SLOTS, generator=generator).argsort(dim=1)[:, :TOP_K]
        return torch.randn(num_tokens, HIDDEN, generator=generator), ids, torch.rand(num_tokens, TOP_K)

    def work(rank: int) -> None:
        dispatcher: Dispatcher = open_dispatcher(resources.plan, rank)
        before[rank]()
        hidden, ids, weights = tokens(rank)
        out = dispatcher.run_experts(cast(ExpertKernel, told[rank]), hidden, ids, weights)
        torch.testing.assert_close(out, oracle(hidden, ids, weights), rtol=1e-5, atol=1e-6)

    run_ranks(2, work)
    return told


def nothing(*_: int) -> None:
    return None


def test_a_rank_begins_with_its_own_tokens_before_the_other_has_come(tmp_path: Path) -> None:
    """Rank 1 comes only once rank 0 computes: one that waited for all tokens first would meet its deadline."""
    computes = threading.Event()

    def come() -> None:
        assert computes.wait(30.0)

    told = run(tmp_path, MANY, [lambda call: computes.set(), nothing], [nothing, come])
    assert [len(kernel.rows) for kernel in told] == [3, 3] and all(min(kernel.rows) > 0 for kernel in told)
    assert sum(sum(kernel.rows) for kernel in told) == 2 * MANY * TOP_K


def test_a_rank_has_answered_before_it_ends_with_its_own_tokens(tmp_path: Path) -> None:
    """Rank 1 is through the whole layer while rank 0 still has a part to compute."""
    through = threading.Event()
    calls: list[int] = []

    def hold(call: int) -> None:
        calls.append(call)
        if call == 3:
            assert through.wait(10.0), "rank 1 waits for an answer that rank 0 could have given"

    # Rank 1's third call is its last work; what it then still needs is the answer of rank 0, which stands still.
    told = run(tmp_path, MANY, [hold, lambda call: through.set() if call == 3 else None], [nothing, nothing])
    assert calls == [1, 2, 3] and len(told[1].rows) == 3


def test_few_tokens_read_their_experts_once(tmp_path: Path) -> None:
    told = run(tmp_path, MANY - 1, [nothing, nothing], [nothing, nothing])
    assert [len(kernel.rows) for kernel in told] == [1, 1]
