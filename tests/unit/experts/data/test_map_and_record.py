"""Map and record is one operation: what it computes, that it traces whole, and what it never does."""

# T tokens  K top-k  E experts  P slots

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.experts.data import map_and_record as module
from trimtab.experts.data.dispatch.base import RankPlace
from trimtab.experts.data.load_recorder import SlotLoadRecorder
from trimtab.experts.data.map_and_record import NativeLookUp, map_and_record, map_and_record_reference
from trimtab.experts.data.routing_table import RoutingTable
from trimtab.experts.placement import Placement, Topology
from trimtab.kernels.native.library import NativeKernels, native_kernels


def native(expert_ids: Tensor, slots: Tensor, first: Tensor, counts: Tensor, counted: Tensor, *owned: int) -> Tensor:
    """What a layer calls whose forward nothing traces."""
    if (core := native_kernels().core) is None:
        pytest.skip("no native core here: layers call the operation")
    return NativeLookUp(core, slots, first, counts, counted)(expert_ids, *owned)


IMPLEMENTATIONS = [map_and_record, map_and_record_reference, native]
every_implementation = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=["op", "reference", "native"])
SLOTS = torch.tensor([[0, 0], [1, 3], [2, 2]])  # expert 1 lives in slots 1 and 3


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@every_implementation
def test_tokens_take_columns_by_position_and_owned_pairs_are_counted(run: Callable[..., Tensor]) -> None:
    counts = ints(10, 0, 0, 0)
    ids = torch.tensor([[1, 0], [1, 2], [1, -1]])
    assert run(ids, SLOTS, ints(0), counts, ints(1), 0, 3).tolist() == [[1, 0], [3, 2], [1, -1]]
    assert counts.tolist() == [11, 2, 1, 1]
    assert run(ids, SLOTS, ints(5), counts, ints(1), 1, 2).tolist() == [[3, 0], [1, 2], [3, -1]]
    assert counts.tolist() == [11, 3, 2, 1], "only token 1 is this rank's"


@every_implementation
def test_b20_padding_is_no_load_and_never_the_last_expert(run: Callable[..., Tensor]) -> None:
    """B20: a live count of zero counts nothing; an unknown one is not zero (all rows are real here)."""
    counts = ints(0, 0, 0, 0)
    ids = torch.tensor([[-1, -1], [-1, 0]])
    assert run(ids, SLOTS, ints(0), counts, ints(1), 0, 2).tolist() == [[-1, -1], [-1, 0]]
    assert counts.tolist() == [1, 0, 0, 0]
    assert ids.tolist() == [[-1, -1], [-1, 0]], "the router's ids are left alone"


@every_implementation
def test_rule_04_a_device_flag_gates_the_record(run: Callable[..., Tensor]) -> None:
    counts, ids = ints(0, 0, 0, 0), torch.tensor([[1], [0]])
    assert torch.equal(run(ids, SLOTS, ints(0), counts, ints(0), 0, 2), run(ids, SLOTS, ints(0), counts, ints(1), 0, 0))
    assert counts.sum() == 0


@every_implementation
def test_no_tokens_map_to_no_slots(run: Callable[..., Tensor]) -> None:
    out = run(torch.empty(0, 2, dtype=torch.int64), SLOTS, ints(7), ints(0, 0, 0, 0), ints(1), 0, 0)
    assert out.shape == (0, 2) and out.dtype == torch.int64


@every_implementation
def test_an_expert_id_beyond_the_table_is_refused(run: Callable[..., Tensor]) -> None:
    with pytest.raises(IndexError):
        run(torch.tensor([[3]]), SLOTS, ints(0), ints(0, 0, 0, 0), ints(1), 0, 1)


def random_call(generator: np.random.Generator) -> tuple[Any, ...]:
    experts, redundant = int(generator.integers(1, 9)), int(generator.integers(0, 6))
    slots = np.concatenate([np.arange(experts), generator.integers(0, experts, redundant)])
    table = RoutingTable(Placement(Topology(experts, redundant), slots[None]), 0)
    num_tokens, top_k = int(generator.integers(0, 130)), int(generator.integers(1, 5))
    start, stop = sorted(generator.integers(0, num_tokens + 1, 2).tolist())
    ids = torch.from_numpy(generator.integers(-1, experts, (num_tokens, top_k)))
    if generator.integers(2):  # what a router gives need not be contiguous
        ids = ids.T.contiguous().T
    flag = int(generator.integers(2))
    counts = torch.from_numpy(generator.integers(0, 99, experts + redundant))
    return ids, table.slots, ints(int(generator.integers(0, 10**12))), counts, ints(flag), start, stop


def test_the_operation_equals_its_reference_bit_for_bit() -> None:
    if native_kernels().core is None:
        pytest.skip("no native core here: the operation is the reference")
    seed = 20_261_130
    generator = np.random.default_rng(seed)
    for call in range(300):
        arguments = random_call(generator)
        others = (*arguments[:3], arguments[3].clone(), *arguments[4:])
        direct = (*arguments[:3], arguments[3].clone(), *arguments[4:])
        expected = map_and_record_reference(*others)
        assert torch.equal(map_and_record(*arguments), expected) and torch.equal(arguments[3], others[3]), (seed, call)
        assert torch.equal(native(*direct), expected) and torch.equal(direct[3], others[3]), (seed, call)


def test_without_a_native_core_the_operation_is_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_kernels", lambda: NativeKernels(None, {}, ()))
    counts = ints(0, 0, 0, 0)
    assert map_and_record(torch.tensor([[1, 2]]), SLOTS, ints(1), counts, ints(1), 0, 1).tolist() == [[3, 2]]
    assert counts.tolist() == [0, 0, 1, 1]


def test_rule_04_opcheck_passes() -> None:
    """Schema (what is written, what is not), fake implementation, tracing: torch's own suite for operations."""
    generator = np.random.default_rng(11)
    for _ in range(4):
        torch.library.opcheck(map_and_record, random_call(generator))


def layer_story(recorder: SlotLoadRecorder, table: RoutingTable, *, traced: bool = True) -> Callable[[Tensor], Tensor]:
    class Layer:
        routing_table = table
        look_up: Callable[[Tensor], Tensor] = table.look_up

    layer = Layer()
    recorder.attach([layer], traced=traced)
    look_up = layer.look_up
    return lambda ids: look_up(ids) * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rules_03_04_a_compiled_graph_is_whole_and_follows_three_rearrangements(backend: str) -> None:
    """fullgraph: a branch on data or a break would be an error. Compiled once: its closure holds the live tensors."""
    topology = Topology(3, 1)
    placements = [Placement(topology, [slots]) for slots in ([0, 1, 2, 0], [2, 1, 0, 1], [1, 1, 0, 2], [0, 1, 2, 2])]
    table = RoutingTable(placements[0], 0)
    recorder = SlotLoadRecorder(placements[0], RankPlace())
    num_compiled = 0

    def counted_backend(graph: Any, example_inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        assert [node.target for node in graph.graph.nodes if "map_and_record" in str(node.target)] == [map_and_record]
        return torch._dynamo.lookup_backend(backend)(graph, example_inputs)

    torch._dynamo.reset()
    story = torch.compile(layer_story(recorder, table), fullgraph=True, backend=counted_backend, dynamic=False)
    ids = torch.tensor([[0, 1], [2, -1], [0, 2], [1, 0]])
    total = np.zeros(3, dtype=np.int64)
    for step, placement in enumerate(placements):
        table.refresh(placement, 0)
        recorder.begin_step(step != 2)  # the flag, too, is read and not traced
        expected = map_and_record_reference(
            ids, RoutingTable(placement, 0).slots, ints(step + 1), torch.zeros(4).long(), ints(0), 0, 4
        )
        assert torch.equal(story(ids), expected * 2)
        total += recorder.fold(placement)[0]
    assert total.tolist() == [9, 6, 6]
    assert num_compiled == 1


def test_rule_03_a_trace_of_fixed_shapes_follows_three_rearrangements() -> None:
    topology = Topology(2, 1)
    placement = Placement(topology, [[0, 1, 0]])
    table, recorder = RoutingTable(placement, 0), SlotLoadRecorder(placement, RankPlace())
    ids = torch.tensor([[0, 1], [1, -1]])
    traced = make_fx(layer_story(recorder, table))(ids)
    recorder.fold(placement)
    for slots in ([1, 0, 1], [0, 0, 1], [1, 1, 0]):
        table.refresh(Placement(topology, [slots]), 0)
        recorder.begin_step(True)
        looked_up = traced(ids) // 2
        live = torch.tensor([*slots, -1])
        assert torch.equal(live[looked_up.clamp(min=-1)].masked_fill(ids < 0, -1), ids)
        assert recorder.fold(Placement(topology, [slots])).tolist() == [[1, 2]]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Each makes the host wait for the device, or shapes a result by data.
_WAITS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "equal", "_to_copy", "item")


def test_rule_14_the_hot_path_waits_for_no_data() -> None:
    """What runs on any device, the reference, is a fixed list of operations, whatever the data, and none waits."""
    generator = np.random.default_rng(5)
    lists = []
    for _ in range(10):
        arguments = random_call(generator)
        with Operations() as operations:
            map_and_record_reference(*arguments)
        assert not [name for name in operations.names if any(wait in name for wait in _WAITS)]
        lists.append(operations.names)
    assert all(names == lists[0] for names in lists)
    assert len(lists[0]) > 5, "operations were seen"


@pytest.mark.parametrize(("traced", "expected"), [(True, "trimtab.map_and_record"), (False, "aten.empty_like")])
def test_rule_14_a_recorded_look_up_is_one_operation(traced: bool, expected: str) -> None:
    """Untraced it is no operation of torch's at all, but for the memory of its result."""
    placement = Placement(Topology(2, 1), [[0, 1, 0]])
    recorder = SlotLoadRecorder(placement, RankPlace(1, 4, 2))
    look_up = layer_story(recorder, RoutingTable(placement, 0), traced=traced)
    ids = torch.tensor([[0, 1], [1, -1]])
    if not traced and native_kernels().core is None:
        pytest.skip("no native core here: layers call the operation")
    with Operations() as operations:
        look_up(ids)
    assert operations.names[0] == f"{expected}.default"
    assert len(operations.names) == 2, "and the story's own multiplication"


@pytest.mark.parametrize("place", [RankPlace(rank, 4, sharing) for rank in range(4) for sharing in (1, 2, 4)], ids=str)
def test_rule_04_traced_and_untraced_layers_look_up_and_count_the_same(place: RankPlace) -> None:
    placement = Placement(Topology(5, 3, 4), [[0, 1, 2, 3, 4, 0, 0, 2]])
    found = []
    for traced in (True, False):
        recorder = SlotLoadRecorder(placement, place)
        story = layer_story(recorder, RoutingTable(placement, 0), traced=traced)
        generator = np.random.default_rng(place.rank)
        rows = []
        for num_tokens in (0, 1, 2, 3, 7, 32):
            recorder.begin_step(num_tokens != 3)
            rows.append(story(torch.from_numpy(generator.integers(-1, 5, (num_tokens, 2)))))
        found.append((torch.cat(rows), recorder.counts))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][1].sum() > 0


def test_rule_03_an_untraced_look_up_follows_refreshes_and_outlives_whoever_made_its_tensors() -> None:
    """It knows addresses: the tensors are written in place and stay where they are, kept by the look-up itself."""
    topology = Topology(2, 1)
    placement = Placement(topology, [[0, 1, 0]])
    table, recorder = RoutingTable(placement, 0), SlotLoadRecorder(placement, RankPlace())
    story = layer_story(recorder, table, traced=False)
    ids = torch.tensor([[0, 1], [1, -1]])
    for slots in ([1, 0, 1], [0, 0, 1], [1, 1, 0]):
        table.refresh(Placement(topology, [slots]), 0)
        recorder.begin_step(True)
        live = torch.tensor([*slots, -1])
        assert torch.equal(live[(story(ids) // 2).clamp(min=-1)], ids)
        assert recorder.fold(Placement(topology, [slots])).tolist() == [[1, 2]]
    held = table.slots.clone()
    del table, recorder
    others = [torch.full((2, held.shape[1]), 77) for _ in range(100)]  # what was freed would be handed out again
    assert set((story(ids) // 2).flatten().tolist()) <= {-1, 0, 1, 2}, len(others)
