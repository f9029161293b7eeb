"""What every format in every kernel must do before its experts may move; a pair joins with one line in PAIRS.

A format of its own, defined here alone, joins like the others: nothing in the package knows it.
"""

# T tokens  K top-k  H hidden size  I intermediate size

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab.experts.data.kernels import make_expert_kernel, plan_slots, slot_storage
from trimtab.experts.data.kernels.base import ExpertKernel
from trimtab.experts.data.kernels.native import NativeExpertKernel, native_refusal
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.data.kernels.reference import ReferenceExpertKernel
from trimtab.experts.formats import registry
from trimtab.experts.formats.base import ExpertShape, ExpertTensors, TensorSpec, check_shapes, make_activation
from trimtab.experts.formats.movable import MOVABLE, StoredBy
from trimtab.experts.formats.registry import find_format, register_format
from trimtab.experts.formats.slot_bytes import SlotBytes
from trimtab.experts.movement.choice import choose_communicator
from trimtab.experts.placement import Placement, Topology
from trimtab.experts.ports import PreparedSlot, SlotStorage
from trimtab.kernels import linear
from trimtab.kernels.checksum import checksum
from trimtab.testing.movement import MovingRanks, fill_slot, random_placement

SEED = 20_261_130
NUM_SLOTS = 5
PLAIN = ExpertShape(48, 32, True, False, make_activation("silu"))
# Sizes that fill no panel, no tile and no group, and every tensor that an expert may have.
ODD = ExpertShape(31, 45, True, True, make_activation("silu"))
UNGATED = ExpertShape(33, 20, False, True, make_activation("relu2", has_gate=False))
SHAPES = {"plain": PLAIN, "odd": ODD, "ungated": UNGATED}


@dataclass(frozen=True)
class ToyFormat:
    """Groups of values share one exponent: value = mantissa * 2 ** exponent."""

    name: str = "toy_shared_exponent"
    group: int = 8

    def specs(self, shape: ExpertShape) -> dict[str, TensorSpec]:
        specs = {}
        for name, spec in find_format("float32").specs(shape).items():
            specs[name] = TensorSpec(spec.shape, torch.int8)
            specs[f"{name}_exponent"] = TensorSpec((-(-spec.nbytes // 4 // self.group),), torch.int8)
        return specs

    def encode(self, shape: ExpertShape, tensors: ExpertTensors) -> dict[str, Tensor]:
        given = tensors.tensors()
        check_shapes({name: spec.shape for name, spec in find_format("float32").specs(shape).items()}, given)
        stored = {}
        for name, tensor in given.items():
            count = tensor.numel()
            padded = torch.zeros(-(-count // self.group), self.group)
            padded.view(-1)[:count] = tensor.float().reshape(-1)
            exponent = (padded.abs().amax(dim=1).clamp(min=2.0**-100).log2().floor() - 5).clamp(-126, 126)
            mantissa = (padded * 2.0 ** -exponent[:, None]).round().clamp(-127, 127)
            stored[name] = mantissa.view(-1)[:count].view(tensor.shape).to(torch.int8)
            stored[f"{name}_exponent"] = exponent.to(torch.int8)
        return stored

    def decode(self, shape: ExpertShape, stored: Mapping[str, Tensor]) -> ExpertTensors:
        check_shapes({name: spec.shape for name, spec in self.specs(shape).items()}, stored)
        decoded = {}
        for name in find_format("float32").specs(shape):
            exponents = stored[f"{name}_exponent"].repeat_interleave(self.group)[: stored[name].numel()]
            decoded[name] = stored[name].float() * 2.0 ** exponents.view(stored[name].shape).float()
        return ExpertTensors(**decoded)


TOY = ToyFormat()
KERNELS: dict[str, type[ReferenceExpertKernel] | type[PortableExpertKernel] | type[NativeExpertKernel]] = {
    "reference": ReferenceExpertKernel,
    "portable": PortableExpertKernel,
    "native": NativeExpertKernel,
}
PAIRS = [
    *(StoredBy(name, "reference") for name in ("float32", "bfloat16", "float16", "int8", TOY.name)),
    *(StoredBy(name, "portable") for name in ("float32", "bfloat16", "float16")),
    *(StoredBy(name, "native") for name in ("float32", "bfloat16", "int8")),
]
ADMITTED = MOVABLE | {StoredBy(TOY.name, "reference")}


@pytest.fixture(autouse=True)
def toy_format(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    register_format(TOY)
    yield


# Without the core, packed linears are torch's: as where no compiler was.
CASES = {f"{pair.kernel}-{pair.format}": (pair, True) for pair in PAIRS}
CASES |= {f"portable-without-core-{pair.format}": (pair, False) for pair in PAIRS if pair.kernel == "portable"}


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoredBy:
    chosen, has_core = request.param
    if not has_core:
        monkeypatch.setattr(linear, "native_format", lambda dtype: None)
    return chosen


every_pair = pytest.mark.parametrize("pair", CASES.values(), ids=CASES, indirect=True)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def build(pair: StoredBy, shape: ExpertShape, num_slots: int = NUM_SLOTS) -> ExpertKernel:
    if pair.kernel == "native" and (refusal := native_refusal(shape, "float32")) is not None:
        pytest.skip(refusal)
    return KERNELS[pair.kernel](shape, num_slots, pair.format)


def random_expert(shape: ExpertShape, generator: torch.Generator, scale: float = 1.0) -> ExpertTensors:
    sizes = {name: spec.shape for name, spec in find_format("float32").specs(shape).items()}
    return ExpertTensors(
        **{name: scale * torch.randn(*size, generator=generator) / size[-1] ** 0.5 for name, size in sizes.items()}
    )


def loaded(pair: StoredBy, shape: ExpertShape, num_slots: int = NUM_SLOTS, seed: int = SEED) -> ExpertKernel:
    """Experts of very different sizes: a scale that stayed behind would show."""
    generator = torch.Generator().manual_seed(seed)
    kernel = build(pair, shape, num_slots)
    for slot in range(num_slots):
        kernel.load_slot(slot, random_expert(shape, generator, scale=4.0**slot))
    return kernel


def row_of(kernel: ExpertKernel, slot: int) -> Tensor:
    out = torch.full((kernel.slot_nbytes,), 0xA5, dtype=torch.uint8)
    assert kernel.export_slot(slot, out) == checksum(out)
    return out


def outputs(kernel: ExpertKernel, num_rows: int = 7) -> list[Tensor]:
    """By slot, the same rows through its expert: fp32 [R, H]."""
    return outputs_of(kernel, range(kernel.num_slots), num_rows)


def outputs_of(kernel: ExpertKernel, slots: Iterable[int], num_rows: int = 7) -> list[Tensor]:
    hidden = torch.randn(num_rows, kernel.shape.hidden_size, generator=torch.Generator().manual_seed(SEED))  # type: ignore[attr-defined]
    return [kernel.experts(hidden, torch.full((num_rows,), slot)) for slot in slots]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def move(kernel: ExpertKernel, rows: Mapping[int, Tensor]) -> None:
    """Every row is prepared before one is installed, and is somebody else's afterwards.

    What a slot computes and gives away is the same as soon as it is installed, on its way home and when it is there.
    """
    prepared = [(slot, data, kernel.prepare(data)) for slot, data in rows.items()]
    loans = [(slot, data, kernel.install(slot, expert)) for slot, data, expert in prepared]
    installed = {slot: row_of(kernel, slot) for slot in rows}
    computed = outputs_of(kernel, rows)
    for slot, data, loan in loans:
        assert torch.equal(installed[slot], data)
        if loan is not None:
            assert loan.copy_home() == checksum(data)
            assert same(outputs_of(kernel, rows), computed)
            loan.give_back()
        data.fill_(0xFF)
    assert same(outputs_of(kernel, rows), computed)
    assert all(torch.equal(row_of(kernel, slot), row) for slot, row in installed.items())


@every_pair
@every_shape
def test_a_slot_gives_every_byte_of_itself_and_the_same_ones_each_time(pair: StoredBy, shape: ExpertShape) -> None:
    kernel = loaded(pair, shape)
    for slot in range(NUM_SLOTS):
        other = torch.zeros(kernel.slot_nbytes, dtype=torch.uint8)
        assert kernel.export_slot(slot, other) == checksum(other)
        assert torch.equal(row_of(kernel, slot), other)
    assert len({checksum(row_of(kernel, slot)) for slot in range(NUM_SLOTS)}) == NUM_SLOTS


@every_pair
@every_shape
def test_a_slots_bytes_are_all_that_another_rank_needs(pair: StoredBy, shape: ExpertShape) -> None:
    """The kernel reads nothing but the view: alone in a new kernel it computes the same bits (B41)."""
    kernel = loaded(pair, shape)
    for slot in range(NUM_SLOTS):
        alone = build(pair, shape, 1)
        move(alone, {0: row_of(kernel, slot)})
        assert torch.equal(outputs(alone)[0], outputs(kernel)[slot])
        assert torch.equal(row_of(alone, 0), row_of(kernel, slot))


@every_pair
@every_shape
def test_the_kernel_reads_every_tensor_of_the_view(pair: StoredBy, shape: ExpertShape) -> None:
    """Each weight, scale and bias, changed through the view, changes what its tokens get and nothing else (B41, B43).

    Doubling changes the scales of quantized values alone, turning the sign the values alone.
    """
    generator = torch.Generator().manual_seed(SEED)
    expert = random_expert(shape, generator)
    for name in expert.tensors():
        for factor in (2.0, -1.0):
            kernel = loaded(pair, shape)
            kernel.load_slot(3, expert)
            before = outputs(kernel)
            changed = replace(expert, **{name: factor * getattr(expert, name)})
            source = build(pair, shape, 1)
            source.load_slot(0, changed)
            move(kernel, {3: row_of(source, 0)})
            after = outputs(kernel)
            assert torch.equal(after[3], outputs(source)[0])
            assert not torch.equal(after[3], before[3]), f"{name} times {factor} was not read"
            assert same(after[:3] + after[4:], before[:3] + before[4:])


@every_pair
def test_ten_random_placements_and_back_are_bitwise_the_first(pair: StoredBy) -> None:
    """B44: nothing wears off, and where slots are memory they stay where they are."""
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    kernel = loaded(pair, ODD)
    rows = [row_of(kernel, slot) for slot in range(NUM_SLOTS)]
    before = outputs(kernel)
    addresses = slot_addresses(kernel)
    holds = list(range(NUM_SLOTS))
    for round_idx in range(11):
        target = torch.randint(0, NUM_SLOTS, (NUM_SLOTS,), generator=generator).tolist()
        # Until the last round every expert stays somewhere, or it could not come back.
        wanted = torch.randperm(NUM_SLOTS, generator=generator).tolist() if round_idx < 10 else list(range(NUM_SLOTS))
        moved = {slot: row_of(kernel, holds.index(expert)) for slot, expert in enumerate(wanted)}
        if round_idx % 2:  # some slots stay untouched
            moved = {slot: row for slot, row in moved.items() if wanted[slot] != holds[slot] or slot in target}
        move(kernel, moved)
        holds = wanted
        assert same(outputs(kernel), [before[expert] for expert in holds])
    assert all(torch.equal(row_of(kernel, slot), rows[slot]) for slot in range(NUM_SLOTS))
    assert slot_addresses(kernel) == addresses


def slot_addresses(kernel: ExpertKernel) -> list[int]:
    if not isinstance(kernel, NativeExpertKernel):
        return []
    layer = kernel._layer
    return [layer.slots.data_ptr(), layer.slot_table.data_ptr(), *layer.slot_table.tolist()]


@every_pair
def test_experts_of_different_scale_swap(pair: StoredBy) -> None:
    kernel = loaded(pair, ODD)
    before = outputs(kernel)
    assert before[4].abs().max() > 20 * before[0].abs().max(), "the scales must differ for this test to mean anything"
    first, last = row_of(kernel, 0), row_of(kernel, 4)
    move(kernel, {0: last, 4: first})
    after = outputs(kernel)
    assert same(after, [before[4], *before[1:4], before[0]])


@every_pair
def test_one_row_fills_two_slots_that_then_live_apart(pair: StoredBy) -> None:
    kernel = loaded(pair, PLAIN)
    before = outputs(kernel)
    row = row_of(kernel, 2)
    move(kernel, {0: row.clone(), 1: row})
    assert same(outputs(kernel), [before[2], before[2], *before[2:]])
    kernel.load_slot(1, random_expert(PLAIN, torch.Generator().manual_seed(1)))
    assert torch.equal(outputs(kernel)[0], before[2])


@every_pair
def test_a_slot_that_was_never_loaded_can_be_installed_but_not_given_away(pair: StoredBy) -> None:
    source, empty = loaded(pair, PLAIN), build(pair, PLAIN)
    with pytest.raises(AssertionError):
        row_of(empty, 1)
    move(empty, {1: row_of(source, 1)})
    assert torch.equal(row_of(empty, 1), row_of(source, 1))


@every_pair
@every_shape
def test_half_present_metadata_is_an_error(pair: StoredBy, shape: ExpertShape) -> None:
    stored_format = find_format(pair.format)
    stored = stored_format.encode(shape, random_expert(shape, torch.Generator().manual_seed(SEED)))
    row = SlotBytes(stored_format, shape)
    out = torch.empty(row.nbytes, dtype=torch.uint8)
    row.write(stored, out)
    assert all(torch.equal(row.read(out)[name], stored[name]) for name in stored)
    for name in stored:
        rest = {other: tensor for other, tensor in stored.items() if other != name}
        for use in (lambda rest=rest: stored_format.decode(shape, rest), lambda rest=rest: row.write(rest, out)):
            with pytest.raises(ValueError, match=rf"expert tensor {name} "):
                use()
        short = {**stored, name: stored[name].reshape(-1)[:-1]}
        with pytest.raises(ValueError, match=rf"expert tensor {name} "):
            row.write(short, out)


def test_a_tensor_of_another_dtype_is_not_written_as_if_it_were() -> None:
    stored = find_format("int8").encode(PLAIN, random_expert(PLAIN, torch.Generator().manual_seed(SEED)))
    row = SlotBytes(find_format("int8"), PLAIN)
    with pytest.raises(ValueError, match=r"gate_up \(torch.float32\) must be torch.int8; encode it first"):
        row.write({**stored, "gate_up": stored["gate_up"].float()}, torch.empty(row.nbytes, dtype=torch.uint8))


@every_pair
def test_rule_06_whole_transactions_move_what_the_kernels_read(pair: StoredBy, tmp_path: Path) -> None:
    """Two ranks with a mover each: after every commit each slot computes bitwise what its expert computed at first."""
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    topology, num_layers = Topology(4, 2, 2), 2
    first = Placement.identity(topology, num_layers)
    build(pair, ODD, 1)
    whole = [loaded(pair, ODD, topology.num_experts, seed=SEED + layer) for layer in range(num_layers)]
    expected = [outputs(kernel) for kernel in whole]

    def load(storage: SlotStorage, layer: int, slot: int, expert: int) -> None:
        fill_slot(storage, slot, row_of(whole[layer], expert))

    plan = choose_communicator(
        num_ranks=2, slots_per_rank=3, slot_nbytes=whole[0].slot_nbytes, communicator="shared_memory", timeout_s=30.0
    )
    kernels: dict[tuple[int, int], ExpertKernel] = {}

    def make_storage(layer: int, rank: int) -> SlotStorage:
        kernels[layer, rank] = build(pair, ODD, 3)
        return slot_storage(kernels[layer, rank], ADMITTED)

    ranks = MovingRanks(plan, first, tmp_path, make_storage, load)
    num_commits = 0

    def check() -> None:
        nonlocal num_commits
        num_commits += 1
        ranks.check_slots()
        for (layer, rank), kernel in kernels.items():
            experts = ranks.placement.slot_to_expert[layer, 3 * rank : 3 * rank + 3].tolist()
            assert same(outputs(kernel), [expected[layer][expert] for expert in experts])

    try:
        ranks.exchange()
        for placement in [*(random_placement(topology, num_layers, generator) for _ in range(4)), first]:
            ranks.rearrange(placement, check)
        assert ranks.placement == first and num_commits == 5 * num_layers
    finally:
        ranks.close()


class ForgetsAScale(ReferenceExpertKernel):
    """B41: scales are kept elsewhere, and stay behind."""

    def install(self, slot: int, prepared: PreparedSlot) -> None:
        assert isinstance(prepared, dict)
        kept = self._slots[slot]
        super().install(slot, prepared if kept is None else {**prepared, "down_scale": kept["down_scale"]})


class GivesAwayAClone(NativeExpertKernel):
    """What moves is what was loaded once, and not what the kernel reads."""

    def export_slot(self, slot: int, out: Tensor) -> int:
        if slot not in (loaded := self.__dict__.setdefault("rows", {})):
            loaded[slot] = out.clone()
            super().export_slot(slot, loaded[slot])
        out.copy_(loaded[slot])
        return checksum(out)


class KeepsTheRow(ReferenceExpertKernel):
    """Computes from staging itself, which is somebody else's afterwards."""

    def prepare(self, data: Tensor) -> PreparedSlot:
        return self._row.read(data)


@pytest.mark.parametrize(
    ("broken", "suite"),
    [
        (ForgetsAScale, test_experts_of_different_scale_swap),
        (GivesAwayAClone, test_ten_random_placements_and_back_are_bitwise_the_first),
        (KeepsTheRow, test_experts_of_different_scale_swap),
    ],
    ids=["scale stays", "stale clone", "keeps staging"],
)
def test_the_suite_finds_a_kernel_that_moves_less_than_it_reads(
    broken: type[ReferenceExpertKernel] | type[NativeExpertKernel],
    suite: Callable[[StoredBy], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: these are the silent corruptions that the suite is for."""
    if broken is GivesAwayAClone and (refusal := native_refusal(PLAIN, "int8")) is not None:
        pytest.skip(refusal)
    monkeypatch.setitem(KERNELS, broken.name, broken)
    with pytest.raises(AssertionError):
        suite(StoredBy("int8", broken.name))


def test_every_pair_that_may_move_is_in_this_suite_and_no_other_may() -> None:
    """B42, B56: a format without a suite is refused, by the code and not by a remark."""
    assert set(PAIRS) == ADMITTED
    for name in registry._FORMATS:
        for kind in KERNELS:
            if StoredBy(name, kind) in MOVABLE or (kind == "native" and native_refusal(PLAIN, name) is not None):
                continue
            with pytest.raises(ValueError, match="cannot be moved while they serve"):
                slot_storage(KERNELS[kind](PLAIN, 1, name))


def test_a_format_without_a_suite_is_refused_by_name_and_serves_otherwise() -> None:
    kernel = loaded(StoredBy(TOY.name, "reference"), PLAIN)
    assert same(outputs(kernel), outputs(kernel))
    with pytest.raises(ValueError, match=r"'toy_shared_exponent' by the reference kernel cannot be moved.*enable_eplb"):
        slot_storage(kernel)
    assert slot_storage(kernel, ADMITTED) is kernel


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "gptq_int4"])
def test_formats_of_other_engines_are_refused_by_name(name: str) -> None:
    """B99, B100, B101: block scales and groups are read from a format that is known, or not at all."""
    with pytest.raises(ValueError, match=rf"expert format \('{name}'\) must be one of"):
        ReferenceExpertKernel(PLAIN, 1, name)


@every_shape
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slot_is_planned_as_it_is_then_built(
    shape: ExpertShape, dtype: torch.dtype, quantization: str | None
) -> None:
    if quantization is not None and native_refusal(shape, quantization) is not None:
        pytest.skip("no native kernel here")
    stored_by, nbytes = plan_slots(shape, dtype, quantization=quantization)
    kernel = make_expert_kernel(shape, 2, dtype, quantization=quantization)
    assert (kernel.format_name, kernel.name, kernel.slot_nbytes) == (*stored_by, nbytes)
    assert stored_by in MOVABLE


@every_pair
def test_layouts_are_equal_exactly_where_bytes_mean_the_same(pair: StoredBy) -> None:
    layouts = {build(pair, shape).layout for shape in SHAPES.values()}
    assert len(layouts) == len(SHAPES)
    assert build(pair, PLAIN, 1).layout == build(pair, PLAIN, 9).layout
    others = [build(other, PLAIN) for other in PAIRS if other.format != pair.format]
    assert build(pair, PLAIN).layout not in {kernel.layout for kernel in others}
