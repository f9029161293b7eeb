"""What every dispatcher must do; an implementation joins with one line in DISPATCHERS. Ranks are threads here."""

# T tokens  K top-k  H hidden size

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.data.dispatch.base import Dispatcher, RankPlace
from trimtab.experts.data.dispatch.choice import choose_dispatcher, create_resources, open_dispatcher
from trimtab.experts.data.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher
from trimtab.experts.data.dispatch.local import LocalDispatcher
from trimtab.experts.data.dispatch.shared_memory import SharedMemoryDispatcher
from trimtab.experts.data.kernels.base import ExpertKernel, in_place_experts
from trimtab.experts.data.kernels.native import NativeExpertKernel, native_refusal
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.data.load_recorder import SlotLoadRecorder
from trimtab.experts.data.moe_layer import MoELayer
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.formats.base import ExpertShape, ExpertTensors, make_activation
from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.native.exchange import exchange_refusal
from trimtab.testing.loopback import LoopbackWorld
from trimtab.testing.ranks import RecordedCollectives, run_ranks

SEED = 20_260_401
NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 8, 3, 40, 24
SHAPE = ExpertShape(HIDDEN, 32, True, True, make_activation("silu"))

Opener = Callable[[int], Dispatcher]  # called by each rank on its own thread


def loopback(kind: type[AllToAllDispatcher] | type[AllGatherDispatcher]) -> Callable[..., Opener]:
    def build(num_ranks: int, num_sharing: int, folder: Path, timeout_s: float) -> Opener:
        world = LoopbackWorld(num_ranks, timeout_s)
        return lambda rank: kind(world.transport(rank), RankPlace(rank, num_ranks, num_sharing))

    return build


def planned(backend: str) -> Callable[..., Opener]:
    def build(num_ranks: int, num_sharing: int, folder: Path, timeout_s: float) -> Opener:
        plan = choose_dispatcher(
            num_ranks=num_ranks, num_sharing=num_sharing, max_tokens=MAX_TOKENS, max_top_k=TOP_K,
            max_hidden_size=HIDDEN, backend=backend, timeout_s=timeout_s,
        )  # fmt: skip
        resources = create_resources(plan, folder)

        def open_one(rank: int) -> Dispatcher:
            assert resources.plan.backend == backend  # keeps the controller's side alive as long as ranks are opened
            return open_dispatcher(resources.plan, rank)

        return open_one

    return build


def own_around_others(num_ranks: int, num_sharing: int, folder: Path, timeout_s: float) -> Opener:
    """As with many tokens, also for few. Every third rank keeps to the order of few: each decides for itself.

    Ranks that share tokens must all keep to it: they read each other's inboxes, and in any other order did so too early
    or too late, which these tests found.
    """
    open_one = planned("shared_memory")(num_ranks, num_sharing, folder, timeout_s)

    def opener(rank: int) -> Dispatcher:
        dispatcher = open_one(rank)
        assert isinstance(dispatcher, SharedMemoryDispatcher)
        dispatcher._many_pairs_per_slot = 0 if rank % 3 != 2 else 10**6
        return dispatcher

    return opener


def alone(num_ranks: int, num_sharing: int, folder: Path, timeout_s: float) -> Opener:
    return lambda rank: LocalDispatcher()


# name -> how to build it, and the (ranks, ranks that share tokens) it serves
MIXED = [(2, 1), (4, 1), (2, 2), (4, 4), (4, 2)]
SHARED = [(2, 2), (4, 4)]
DISPATCHERS: dict[str, tuple[Callable[..., Opener], list[tuple[int, int]]]] = {
    "local": (alone, [(1, 1)]),
    "loopback_all_to_all": (loopback(AllToAllDispatcher), MIXED),
    "loopback_all_gather": (loopback(AllGatherDispatcher), SHARED),
    "gloo_all_to_all": (planned("gloo"), [(2, 1), (4, 1), (4, 2)]),
    "gloo_all_gather": (planned("gloo"), SHARED),
}
if exchange_refusal() is None:
    DISPATCHERS["shared_memory"] = (planned("shared_memory"), MIXED)
    DISPATCHERS["shared_memory_own_around_others"] = (own_around_others, MIXED)
every_layout = pytest.mark.parametrize(
    ("name", "num_ranks", "num_sharing"),
    [(name, *layout) for name, (_, layouts) in DISPATCHERS.items() for layout in layouts],
)
several_ranks = pytest.mark.parametrize(
    ("name", "num_ranks", "num_sharing"),
    [(name, *layout) for name, (_, layouts) in DISPATCHERS.items() for layout in layouts[:1] if name != "local"],
)

KERNELS: list[tuple[type[PortableExpertKernel] | type[NativeExpertKernel], torch.dtype]] = [
    (PortableExpertKernel, torch.float32),
    (PortableExpertKernel, torch.bfloat16),
]
if native_refusal(SHAPE, torch.bfloat16) is None:
    KERNELS += [(NativeExpertKernel, torch.float32), (NativeExpertKernel, torch.bfloat16)]
every_kernel = pytest.mark.parametrize(
    ("kind", "dtype"), KERNELS, ids=[f"{kind.name}-{str(dtype)[6:]}" for kind, dtype in KERNELS]
)
SERVING = KERNELS[-1]


class Counted:
    """A kernel that remembers which slots it computed, row by row. It takes rows in place where the kernel does."""

    def __init__(self, kernel: ExpertKernel) -> None:
        self.kernel = kernel
        self.num_slots = kernel.num_slots
        self.combine = kernel.combine
        self.slots: list[int] = []
        self.in_place_dtypes = getattr(kernel, "in_place_dtypes", frozenset())

    def experts_in_place(self, dtype: torch.dtype, rows: Tensor, slot_ids: Tensor, outputs: Tensor) -> None:
        self.slots += slot_ids.tolist()
        in_place = in_place_experts(self.kernel, dtype)
        assert in_place is not None
        in_place.experts_in_place(dtype, rows, slot_ids, outputs)

    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        self.slots += slot_ids.tolist()
        return self.kernel.experts(rows, slot_ids)

    def __call__(self, hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor) -> Tensor:
        self.slots += slot_ids[slot_ids >= 0].tolist()
        return self.kernel(hidden, slot_ids, gate_weights)


class Ranks:
    """One MoE layer, spread over ranks by a placement, and the single process that holds it all: the oracle."""

    def __init__(self, num_ranks: int, num_sharing: int, kind: Any, dtype: torch.dtype, redundant: int = 0) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.num_ranks, self.num_sharing, self.dtype = num_ranks, num_sharing, dtype
        self.experts = [_expert(dtype, generator) for _ in range(NUM_EXPERTS)]
        topology = Topology(NUM_EXPERTS, redundant, num_ranks)
        slots = torch.cat([torch.randperm(NUM_EXPERTS, generator=generator), torch.arange(redundant)])
        self.placement = Placement(topology, slots[torch.randperm(len(slots), generator=generator)][None].numpy())
        self.oracle = self._kernel(kind, range(NUM_EXPERTS))
        self.kernels = [
            Counted(
                self._kernel(kind, [int(self.placement.slot_to_expert[0, slot]) for slot in topology.slots_of(rank)])
            )
            for rank in range(num_ranks)
        ]

    def _kernel(self, kind: Any, experts: range | list[int]) -> ExpertKernel:
        kernel: ExpertKernel = kind(SHAPE, len(experts), self.dtype)
        for slot, expert in enumerate(experts):
            kernel.load_slot(slot, self.experts[expert])
        return kernel

    def layer(self, rank: int, dispatcher: Dispatcher) -> MoELayer:
        table = RoutingTable(self.placement, 0, token_group=rank // self.num_sharing)
        return MoELayer(0, 0, NUM_EXPERTS, TOP_K, SHAPE, self.kernels[rank], table, dispatcher)  # type: ignore[arg-type]

    def run(self, opener: Opener, steps: list[list[Batch]]) -> None:
        """steps[i][token group]; every rank's result must be the oracle's, bit by bit."""

        def work(rank: int) -> list[Tensor]:
            layer = self.layer(rank, opener(rank))
            return [layer.forward(*step[rank // self.num_sharing]) for step in steps]

        for rank, outs in enumerate(run_ranks(self.num_ranks, work)):
            for number, (out, step) in enumerate(zip(outs, steps, strict=True)):
                expected = self.oracle(*step[rank // self.num_sharing])
                assert torch.equal(out, expected), f"rank {rank}, step {number}"

    @property
    def num_computed(self) -> int:
        return sum(len(kernel.slots) for kernel in self.kernels)


Batch = tuple[Tensor, Tensor, Tensor]


def _expert(dtype: torch.dtype, generator: torch.Generator) -> ExpertTensors:
    def draw(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) / size[-1] ** 0.5).to(dtype)

    return ExpertTensors(draw(64, HIDDEN), draw(HIDDEN, 32), draw(64), draw(HIDDEN))


def batch(num_tokens: int, dtype: torch.dtype, generator: torch.Generator, padding: float = 0.0) -> Batch:
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    ids[torch.rand(ids.shape, generator=generator) < padding] = -1
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    return hidden, ids, torch.rand(num_tokens, TOP_K, generator=generator)


def build(name: str, num_ranks: int, num_sharing: int, folder: Path, timeout_s: float = 30.0) -> Opener:
    return DISPATCHERS[name][0](num_ranks, num_sharing, folder, timeout_s)


@every_layout
@every_kernel
@pytest.mark.parametrize("redundant", [0, 4])
def test_any_mix_of_tokens_gives_the_bits_of_one_process(
    name: str, num_ranks: int, num_sharing: int, kind: Any, dtype: torch.dtype, redundant: int, tmp_path: Path
) -> None:
    """Zero tokens on some or all ranks, ids of -1, replicas, shared tokens; fp32 and bf16 (B20, B45)."""
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED + num_ranks + redundant)
    ranks = Ranks(num_ranks, num_sharing, kind, dtype, redundant)
    groups = num_ranks // num_sharing
    counts = [[0, 1, 2, 7, MAX_TOKENS][int(i)] for i in torch.randint(5, (5 * groups,), generator=generator)]
    steps = [
        [batch(num_tokens, dtype, generator, padding=0.2) for num_tokens in counts[step * groups :][:groups]]
        for step in range(5)
    ]
    steps.append([batch(0, dtype, generator) for _ in range(groups)])
    ranks.run(build(name, num_ranks, num_sharing, tmp_path), steps)
    real = sum(int((ids >= 0).sum()) for step in steps for _, ids, _ in step)
    assert ranks.num_computed == real, "each (token, expert) once in the whole world, and no padding"


def int8_kernel(shape: ExpertShape, num_slots: int, dtype: torch.dtype) -> ExpertKernel:
    return NativeExpertKernel(shape, num_slots, "int8")


@several_ranks
@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_half_precision_rows_travel_too(
    name: str, num_ranks: int, num_sharing: int, storage: str, tmp_path: Path
) -> None:
    """The native kernel takes fp16 only through fp32: rows cannot be read in place, and the bits are the same."""
    if storage == "int8" and native_refusal(SHAPE, "int8") is not None:
        pytest.skip("the native core is not built")
    kind: Any = int8_kernel if storage == "int8" else PortableExpertKernel
    ranks = Ranks(num_ranks, num_sharing, kind, torch.float16)
    generator = torch.Generator().manual_seed(SEED)
    steps = [[batch(5, torch.float16, generator, 0.2) for _ in range(num_ranks // num_sharing)] for _ in range(3)]
    ranks.run(build(name, num_ranks, num_sharing, tmp_path), steps)


@every_layout
def test_all_tokens_may_choose_one_rank(name: str, num_ranks: int, num_sharing: int, tmp_path: Path) -> None:
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    generator = torch.Generator().manual_seed(SEED)
    expert = int(ranks.placement.slot_to_expert[0, -1])
    step = [batch(MAX_TOKENS, ranks.dtype, generator) for _ in range(num_ranks // num_sharing)]
    for _, ids, _ in step:
        ids.fill_(expert)
    ranks.run(build(name, num_ranks, num_sharing, tmp_path), [step])
    assert [len(kernel.slots) for kernel in ranks.kernels[:-1]] == [0] * (num_ranks - 1)


@every_layout
def test_padding_sends_nothing_and_costs_the_last_expert_nothing(
    name: str, num_ranks: int, num_sharing: int, tmp_path: Path
) -> None:
    """B20, B30: one real token padded to four is K rows of work in all, and -1 is not the last expert."""
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    generator = torch.Generator().manual_seed(SEED)
    groups = num_ranks // num_sharing
    step = [batch(4, ranks.dtype, generator) for _ in range(groups)]
    for group, (_, ids, _) in enumerate(step):
        ids[1 if group == 0 else 0 :] = -1
    wanted = [int(slot) for slot in RoutingTable(ranks.placement, 0).look_up(step[0][1])[0]]
    ranks.run(build(name, num_ranks, num_sharing, tmp_path), [step])
    computed = [rank * kernel.num_slots + slot for rank, kernel in enumerate(ranks.kernels) for slot in kernel.slots]
    assert sorted(computed) == sorted(wanted)


@every_layout
def test_rule_04_recorded_load_is_real_tokens_times_top_k_whatever_is_shared(
    name: str, num_ranks: int, num_sharing: int, tmp_path: Path
) -> None:
    """Over all ranks each pair is counted once, by its expert; idle ranks and padding add nothing (B04, B30)."""
    ranks = Ranks(num_ranks, num_sharing, *SERVING, redundant=4)
    generator = torch.Generator().manual_seed(SEED + 4)
    groups = num_ranks // num_sharing
    opener = build(name, num_ranks, num_sharing, tmp_path)
    steps = [[batch((step + 3 * group) % 8, ranks.dtype, generator, 0.2) for group in range(groups)] for step in (0, 5)]

    def work(rank: int) -> Tensor:
        layer = ranks.layer(rank, opener(rank))
        recorder = SlotLoadRecorder(ranks.placement, RankPlace(rank, num_ranks, num_sharing))
        recorder.attach([layer])
        for step in steps:
            recorder.begin_step(True)
            tokens = step[rank // num_sharing]
            if len(tokens[0]):
                assert torch.equal(layer.forward(*tokens), ranks.oracle(*tokens)), "recording changes no bit"
            else:
                layer.forward_idle()
        return torch.from_numpy(recorder.fold(ranks.placement))

    counted = torch.stack(run_ranks(num_ranks, work)).sum(0)[0]
    chosen = torch.cat([ids.flatten() for step in steps for _, ids, _ in step])
    assert torch.equal(counted, chosen[chosen >= 0].bincount(minlength=NUM_EXPERTS))
    assert counted.sum() > 0 and (chosen < 0).any()


@pytest.mark.parametrize("name", [name for name, (_, layouts) in DISPATCHERS.items() if (4, 4) in layouts])
def test_fewer_tokens_than_ranks_that_share_them_give_complete_rows(name: str, tmp_path: Path) -> None:
    """B74: batches of 1 to 5 tokens on four ranks that hold the same tokens."""
    ranks = Ranks(4, 4, *SERVING)
    generator = torch.Generator().manual_seed(SEED)
    steps = [[batch(num_tokens, ranks.dtype, generator)] for num_tokens in (1, 2, 3, 4, 5)]
    ranks.run(build(name, 4, 4, tmp_path), steps)


@pytest.mark.parametrize("name", [name for name, (_, layouts) in DISPATCHERS.items() if (2, 1) in layouts])
def test_an_idle_rank_needs_to_know_nothing_of_the_others_tokens(name: str, tmp_path: Path) -> None:
    """It brings zero rows of fp32 where the others' are bf16, and computes what its experts are sent."""
    num_ranks = 2
    ranks = Ranks(num_ranks, 1, *SERVING)
    opener = build(name, num_ranks, 1, tmp_path)
    tokens = batch(9, ranks.dtype, torch.Generator().manual_seed(SEED))

    def work(rank: int) -> Tensor | None:
        layer = ranks.layer(rank, opener(rank))
        return layer.forward(*tokens) if rank == 1 else layer.forward_idle()

    out = run_ranks(num_ranks, work)[1]
    assert out is not None and torch.equal(out, ranks.oracle(*tokens))
    assert all(kernel.slots for kernel in ranks.kernels)


@several_ranks
def test_results_are_the_callers_and_inputs_are_left_alone(
    name: str, num_ranks: int, num_sharing: int, tmp_path: Path
) -> None:
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    opener = build(name, num_ranks, num_sharing, tmp_path)
    generator = torch.Generator().manual_seed(SEED)
    first, second = (batch(6, ranks.dtype, generator) for _ in range(2))

    def work(rank: int) -> None:
        layer = ranks.layer(rank, opener(rank))
        own = [tensor.clone() for tensor in first]
        out = layer.forward(*own)
        kept = out.clone()
        layer.forward(*second)
        assert torch.equal(out, kept)
        assert all(torch.equal(tensor, source) for tensor, source in zip(own, first, strict=True))
        assert layer.dispatcher.times.take().num_layers == 2

    run_ranks(num_ranks, work)


@several_ranks
def test_all_ranks_log_the_same_operations_over_200_random_steps(
    name: str, num_ranks: int, num_sharing: int, tmp_path: Path
) -> None:
    """Busy or idle, with few tokens or many: the order and the agreed sizes of collectives are every rank's."""
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    opener = build(name, num_ranks, num_sharing, tmp_path)
    logs = [RecordedCollectives() for _ in range(num_ranks)]

    def work(rank: int) -> None:
        generator = torch.Generator().manual_seed(SEED + rank // num_sharing)
        dispatcher = opener(rank)
        dispatcher.log = logs[rank]
        layer = ranks.layer(rank, dispatcher)
        for _ in range(200):
            num_tokens = max(0, int(torch.randint(-4, 5, (), generator=generator)))
            if num_tokens:
                layer.forward(*batch(num_tokens, ranks.dtype, generator, padding=0.1))
            else:
                layer.forward_idle()

    run_ranks(num_ranks, work)
    assert len(logs[0].operations) >= 200
    assert all(log.operations == logs[0].operations for log in logs)


class Broken(Counted):
    def experts(self, rows: Tensor, slot_ids: Tensor) -> Tensor:
        raise MemoryError("no room for experts")

    def experts_in_place(self, dtype: torch.dtype, rows: Tensor, slot_ids: Tensor, outputs: Tensor) -> None:
        raise MemoryError("no room for experts")


@several_ranks
def test_a_rank_that_fails_takes_the_others_along_and_keeps_its_own_reason(
    name: str, num_ranks: int, num_sharing: int, tmp_path: Path
) -> None:
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    ranks.kernels[1] = Broken(ranks.kernels[1].kernel)
    opener = build(name, num_ranks, num_sharing, tmp_path, timeout_s=5.0)
    tokens = batch(6, ranks.dtype, torch.Generator().manual_seed(SEED))

    def work(rank: int) -> str:
        layer = ranks.layer(rank, opener(rank))
        with pytest.raises((RankFailureError, MemoryError)) as caught:
            layer.forward(*tokens)
        if rank != 1:
            with pytest.raises(RankFailureError):  # never reused
                layer.forward(*tokens)
        return type(caught.value).__name__

    found = run_ranks(num_ranks, work)
    assert found == ["MemoryError" if rank == 1 else "RankFailureError" for rank in range(num_ranks)]


@several_ranks
def test_a_rank_that_never_comes_is_an_error_after_the_deadline(
    name: str, num_ranks: int, num_sharing: int, tmp_path: Path
) -> None:
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    opener = build(name, num_ranks, num_sharing, tmp_path, timeout_s=0.5)
    tokens = batch(6, ranks.dtype, torch.Generator().manual_seed(SEED))

    def work(rank: int) -> None:
        layer = ranks.layer(rank, opener(rank))
        if rank != 1:
            with pytest.raises(RankFailureError, match=r"within 0\.5 s|gave up|aborted"):
                layer.forward(*tokens)

    run_ranks(num_ranks, work)


@several_ranks
def test_a_slot_that_no_rank_owns_is_an_error(name: str, num_ranks: int, num_sharing: int, tmp_path: Path) -> None:
    ranks = Ranks(num_ranks, num_sharing, *SERVING)
    opener = build(name, num_ranks, num_sharing, tmp_path, timeout_s=5.0)
    hidden, _, weights = batch(2, ranks.dtype, torch.Generator().manual_seed(SEED))

    def work(rank: int) -> None:
        dispatcher = opener(rank)
        wrong = torch.full((2, TOP_K), NUM_EXPERTS if rank == 0 else 0)
        with pytest.raises(RuntimeError, match=r"num_slots \(8\)" if rank == 0 else None):
            dispatcher.run_experts(ranks.kernels[rank], hidden, wrong, weights)  # type: ignore[arg-type]

    run_ranks(num_ranks, work)
