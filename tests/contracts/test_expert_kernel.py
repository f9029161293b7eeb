"""What every expert kernel must do; a kernel joins with one line in KERNELS."""

# T tokens  K top-k  H hidden size  I intermediate size

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from trimtab.experts.data.kernels.base import ExpertKernel, in_place_experts
from trimtab.experts.data.kernels.native import NativeExpertKernel, native_refusal
from trimtab.experts.data.kernels.portable import PortableExpertKernel
from trimtab.experts.data.kernels.reference import ReferenceExpertKernel
from trimtab.experts.formats.base import ACTIVATION_KINDS, Activation, ExpertShape, ExpertTensors, make_activation
from trimtab.kernels import linear


@dataclass(frozen=True)
class Kernel:
    """`build(shape, num_slots, dtype)`; `tolerance` by dtype is relative to the largest output."""

    build: Callable[[ExpertShape, int, torch.dtype], ExpertKernel]
    tolerance: dict[torch.dtype, float]
    # The reference multiplies in fp32 with F.linear, whose bits depend on the number of rows.
    row_invariant: bool = True


class PortableWithoutCore(PortableExpertKernel):
    """As where no compiler was: its linears are torch's."""

    def load_slot(self, slot: int, tensors: ExpertTensors) -> None:
        with mock.patch.object(linear, "native_format", return_value=None):
            super().load_slot(slot, tensors)


# Half an ulp at the output's top is 2**-9 in bf16 and 2**-12 in fp16; kernels may also round the inner values.
DENSE = {torch.float32: 5e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
KERNELS = {
    "reference": Kernel(ReferenceExpertKernel, DENSE, row_invariant=False),
    "portable": Kernel(PortableExpertKernel, DENSE),
    "portable_without_core": Kernel(PortableWithoutCore, DENSE),
}
if native_refusal(ExpertShape(8, 8, True, False, make_activation("silu")), torch.bfloat16) is None:
    KERNELS["native"] = Kernel(NativeExpertKernel, {torch.float32: 5e-6, torch.bfloat16: 1.2e-2})
CASES = [(name, dtype) for name, kernel in KERNELS.items() for dtype in kernel.tolerance]
every_kernel = pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
SEED = 20_260_101


def softplus_gated(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, dim=-1)
    return torch.nn.functional.softplus(gate) * up


def activation(kind: str, has_gate: bool = True) -> Activation:
    if kind == "custom":
        return Activation("custom", softplus_gated)
    return make_activation(kind, has_gate=has_gate)


def make_shape(
    hidden: int = 48, inner: int = 32, kind: str = "silu", *, has_gate: bool = True, has_bias: bool = False
) -> ExpertShape:
    return ExpertShape(hidden, inner, has_gate, has_bias, activation(kind, has_gate))


def random_expert(shape: ExpertShape, dtype: torch.dtype, generator: torch.Generator) -> ExpertTensors:
    def draw(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) / size[-1] ** 0.5).to(dtype)

    hidden, inner, rows = shape.hidden_size, shape.intermediate_size, shape.gate_up_size
    biases = (draw(rows), draw(hidden)) if shape.has_bias else ()
    return ExpertTensors(draw(rows, hidden), draw(hidden, inner), *biases)


def loaded(
    name: str, dtype: torch.dtype, shape: ExpertShape, num_slots: int, generator: torch.Generator
) -> tuple[ExpertKernel, list[ExpertTensors]]:
    kernel = KERNELS[name].build(shape, num_slots, dtype)
    experts = [random_expert(shape, dtype, generator) for _ in range(num_slots)]
    for slot, expert in enumerate(experts):
        kernel.load_slot(slot, expert)
    return kernel, experts


def batch(
    shape: ExpertShape, num_slots: int, num_tokens: int, top_k: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(num_tokens, shape.hidden_size, generator=generator).to(dtype)
    slot_ids = torch.rand(num_tokens, num_slots, generator=generator).argsort(dim=1)[:, :top_k]
    return hidden, slot_ids, torch.rand(num_tokens, top_k, generator=generator)


def token_by_token(
    shape: ExpertShape, experts: list[ExpertTensors], hidden: Tensor, slot_ids: Tensor, gate_weights: Tensor
) -> Tensor:
    """The independent oracle: one token and one expert at a time, in fp64."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(len(hidden)), torch.arange(slot_ids.shape[1])).tolist():
        if slot_ids[t, k] < 0:
            continue
        expert = experts[slot_ids[t, k]]
        pre = expert.gate_up.double() @ hidden[t].double()
        if expert.gate_up_bias is not None:
            pre += expert.gate_up_bias.double()
        part = expert.down.double() @ shape.activation.function(pre[None])[0]
        if expert.down_bias is not None:
            part += expert.down_bias.double()
        out[t] += gate_weights[t, k].double() * part
    return out


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    if found.numel():
        scale = expected.abs().max().clamp(min=1e-3)
        error = ((found.double() - expected.double()).abs().max() / scale).item()
        assert error <= tolerance, f"relative error {error:.2e} above {tolerance:.2e}"


@every_kernel
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_equals_one_token_and_expert_at_a_time_for_every_activation(name: str, dtype: torch.dtype, kind: str) -> None:
    if name == "native" and kind == "custom":
        pytest.skip("native kernels know named formulas only; make_expert_kernel chooses another kernel")
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(kind=kind, has_bias=kind == "swiglu_clamped")
    kernel, experts = loaded(name, dtype, shape, 4, generator)
    tokens = batch(shape, 4, 9, 2, dtype, generator)
    out = kernel(*tokens)
    assert out.dtype == dtype
    assert_close(out, token_by_token(shape, experts, *tokens), KERNELS[name].tolerance[dtype])


@every_kernel
@pytest.mark.parametrize("kind", ["silu", "gelu", "relu2"])
def test_experts_without_a_gate_apply_the_activation_to_the_only_projection(
    name: str, dtype: torch.dtype, kind: str
) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(hidden=31, inner=45, kind=kind, has_gate=False, has_bias=True)
    kernel, experts = loaded(name, dtype, shape, 3, generator)
    tokens = batch(shape, 3, 5, 1, dtype, generator)
    assert_close(kernel(*tokens), token_by_token(shape, experts, *tokens), KERNELS[name].tolerance[dtype])


@every_kernel
@pytest.mark.parametrize("seed", range(6))
def test_odd_shapes_and_token_counts_equal_the_reference(name: str, dtype: torch.dtype, seed: int) -> None:
    print(f"seed {SEED + seed}")
    generator = torch.Generator().manual_seed(SEED + seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    shape = make_shape(pick(1, 150), pick(1, 150), has_bias=bool(pick(0, 1)))
    num_slots = pick(1, 12)
    top_k = pick(1, min(num_slots, 8))
    kernel, experts = loaded(name, dtype, shape, num_slots, generator)
    reference = ReferenceExpertKernel(shape, num_slots, torch.float32)
    for slot, expert in enumerate(experts):
        reference.load_slot(slot, expert)
    for num_tokens in (1, pick(2, 40), pick(41, 700)):
        hidden, slot_ids, weights = batch(shape, num_slots, num_tokens, top_k, dtype, generator)
        expected = reference(hidden.float(), slot_ids, weights)
        assert_close(kernel(hidden, slot_ids, weights), expected, KERNELS[name].tolerance[dtype])


@every_kernel
def test_five_thousand_tokens_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(40, 24)
    kernel, experts = loaded(name, dtype, shape, 6, generator)
    reference = ReferenceExpertKernel(shape, 6, torch.float32)
    for slot, expert in enumerate(experts):
        reference.load_slot(slot, expert)
    hidden, slot_ids, weights = batch(shape, 6, 5000, 2, dtype, generator)
    expected = reference(hidden.float(), slot_ids, weights)
    assert_close(kernel(hidden, slot_ids, weights), expected, KERNELS[name].tolerance[dtype])


@every_kernel
def test_no_tokens_give_an_empty_result(name: str, dtype: torch.dtype) -> None:
    shape = make_shape()
    kernel, _ = loaded(name, dtype, shape, 4, torch.Generator().manual_seed(SEED))
    out = kernel(torch.zeros(0, 48, dtype=dtype), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert out.shape == (0, 48)
    assert out.dtype == dtype


@every_kernel
def test_one_expert_takes_every_token_and_the_others_none(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape()
    kernel, experts = loaded(name, dtype, shape, 5, generator)
    hidden, _, weights = batch(shape, 5, 33, 1, dtype, generator)
    slot_ids = torch.full((33, 1), 4)
    expected = token_by_token(shape, experts, hidden, slot_ids, weights)
    assert_close(kernel(hidden, slot_ids, weights), expected, KERNELS[name].tolerance[dtype])


@every_kernel
def test_an_expert_chosen_twice_by_a_token_counts_twice(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape()
    kernel, experts = loaded(name, dtype, shape, 3, generator)
    hidden, _, weights = batch(shape, 3, 4, 2, dtype, generator)
    slot_ids = torch.full((4, 2), 1)
    expected = token_by_token(shape, experts, hidden, slot_ids, weights)
    assert_close(kernel(hidden, slot_ids, weights), expected, KERNELS[name].tolerance[dtype])


@every_kernel
def test_ids_of_minus_one_contribute_nothing(name: str, dtype: torch.dtype) -> None:
    """B20: the drop test comes before any look-up, so the last slot sees nothing of padding."""
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape()
    kernel, experts = loaded(name, dtype, shape, 4, generator)
    hidden, slot_ids, weights = batch(shape, 4, 6, 2, dtype, generator)
    slot_ids[1] = -1
    slot_ids[3, 0] = -1
    out = kernel(hidden, slot_ids, weights)
    assert torch.equal(out[1], torch.zeros(48, dtype=dtype))
    assert_close(out, token_by_token(shape, experts, hidden, slot_ids, weights), KERNELS[name].tolerance[dtype])


@every_kernel
def test_padding_yields_zeros_whatever_earlier_calls_and_its_own_row_held(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape()
    kernel, _ = loaded(name, dtype, shape, 4, generator)
    hidden, slot_ids, weights = batch(shape, 4, 6, 2, dtype, generator)
    kernel(torch.full_like(hidden, float("inf")), slot_ids, weights)
    hidden[2] = float("nan")
    weights[2] = float("nan")
    slot_ids[2] = -1
    out = kernel(hidden, slot_ids, weights)
    assert torch.equal(out[2], torch.zeros(48, dtype=dtype))
    assert out.isfinite().all()


@every_kernel
def test_a_batch_of_nothing_but_padding_gives_zeros(name: str, dtype: torch.dtype) -> None:
    shape = make_shape()
    kernel, _ = loaded(name, dtype, shape, 4, torch.Generator().manual_seed(SEED))
    out = kernel(torch.ones(3, 48, dtype=dtype), torch.full((3, 2), -1), torch.ones(3, 2))
    assert torch.equal(out, torch.zeros(3, 48, dtype=dtype))


@every_kernel
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_parts_are_summed_in_fp32_and_rounded_once(name: str, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    """Eight parts of 1/512 beside one of 1: summed in bf16 each small part would be lost."""
    shape = ExpertShape(32, 32, False, True, make_activation("relu", has_gate=False))
    kernel = KERNELS[name].build(shape, 2, dtype)
    zero = torch.zeros(32, 32, dtype=dtype)
    for slot, value in enumerate((1.0, 2.0**-9)):
        bias = torch.full((32,), value, dtype=dtype)
        kernel.load_slot(slot, ExpertTensors(zero, zero, torch.zeros(32, dtype=dtype), bias))
    slot_ids = torch.tensor([[0] + [1] * 8])
    out = kernel(torch.zeros(1, 32, dtype=dtype), slot_ids, torch.ones(1, 9, dtype=weights_dtype))
    assert torch.equal(out, torch.full((1, 32), 1 + 8 * 2.0**-9, dtype=dtype))


@every_kernel
def test_a_result_survives_the_next_call_and_inputs_are_left_alone(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape()
    kernel, _ = loaded(name, dtype, shape, 4, generator)
    first = batch(shape, 4, 7, 2, dtype, generator)
    before = [tensor.clone() for tensor in first]
    out = kernel(*first)
    kept = out.clone()
    kernel(*batch(shape, 4, 7, 2, dtype, generator))
    assert torch.equal(out, kept)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(first, before, strict=True))
    assert torch.equal(kernel(*first), kept)


@every_kernel
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_slot_gives_back_the_expert_it_was_given(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    shape = make_shape(37, 21, has_bias=has_bias)
    kernel, experts = loaded(name, dtype, shape, 3, torch.Generator().manual_seed(SEED))
    for slot, expert in enumerate(experts):
        found = kernel.read_slot(slot).tensors()
        assert found.keys() == expert.tensors().keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expert.tensors().items())
    assert kernel.slot_nbytes >= sum(tensor.nbytes for tensor in experts[0].tensors().values())


@every_kernel
def test_loading_a_slot_again_changes_what_its_tokens_get_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape()
    kernel, experts = loaded(name, dtype, shape, 4, generator)
    hidden, _, weights = batch(shape, 4, 4, 1, dtype, generator)
    slot_ids = torch.arange(4)[:, None]
    before = kernel(hidden, slot_ids, weights)
    experts[2] = random_expert(shape, dtype, generator)
    kernel.load_slot(2, experts[2])
    after = kernel(hidden, slot_ids, weights)
    assert (before != after).any(dim=1).tolist() == [False, False, True, False]
    assert_close(after, token_by_token(shape, experts, hidden, slot_ids, weights), KERNELS[name].tolerance[dtype])


@every_kernel
def test_a_slot_keeps_its_expert_when_the_source_tensors_change(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(has_bias=True)
    kernel, experts = loaded(name, dtype, shape, 4, generator)
    tokens = batch(shape, 4, 5, 2, dtype, generator)
    before = kernel(*tokens)
    for expert in experts:
        for tensor in expert.tensors().values():
            tensor.zero_()
    assert torch.equal(kernel(*tokens), before)


@every_kernel
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("hidden_size", "inner"), [(64, 96), (70, 32)])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_at_any_position(
    name: str, dtype: torch.dtype, num_threads: int, hidden_size: int, inner: int
) -> None:
    """B109: batch mates, padding and position never show in a token's output."""
    if not KERNELS[name].row_invariant:
        pytest.skip("the reference is the mathematics, not a kernel that serves")
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(hidden_size, inner, has_bias=True)
    kernel, _ = loaded(name, dtype, shape, 5, generator)
    hidden, slot_ids, weights = batch(shape, 5, 1200, 2, dtype, generator)
    slot_ids[50:60] = -1
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = kernel(hidden, slot_ids, weights)
        for start, end in [(0, 1), (7, 8), (49, 51), (3, 6), (40, 65), (100, 133), (1, 1000), (1199, 1200)]:
            part = kernel(hidden[start:end], slot_ids[start:end], weights[start:end])
            assert torch.equal(part, whole[start:end]), f"rows {start} to {end}"
        shuffled = torch.randperm(1200, generator=generator)
        assert torch.equal(kernel(hidden[shuffled], slot_ids[shuffled], weights[shuffled]), whole[shuffled])
    finally:
        torch.set_num_threads(threads_before)


@every_kernel
@pytest.mark.parametrize("inner", [1, 21, 75, 96])
def test_no_activation_and_no_odd_width_shows_a_rows_company(name: str, dtype: torch.dtype, inner: int) -> None:
    """B109: torch computes a vector's tail, a contiguous tensor and a strided one by different code."""
    if not KERNELS[name].row_invariant:
        pytest.skip("the reference is the mathematics, not a kernel that serves")
    generator = torch.Generator().manual_seed(SEED)
    known = [kind for kind in ACTIVATION_KINDS if kind != "custom"]
    cases = [(kind, True) for kind in known] + [(kind, False) for kind in known if kind != "swiglu_clamped"]
    for kind, has_gate in cases:
        shape = make_shape(37, inner, kind, has_gate=has_gate)
        kernel, _ = loaded(name, dtype, shape, 3, generator)
        hidden, slot_ids, weights = batch(shape, 3, 61, 2, dtype, generator)
        whole = kernel(hidden, slot_ids, weights)
        alone = [kernel(hidden[t : t + 1], slot_ids[t : t + 1], weights[t : t + 1]) for t in range(61)]
        assert torch.equal(torch.cat(alone), whole), (kind, has_gate)
        order = torch.randperm(61, generator=generator)
        assert torch.equal(kernel(hidden[order], slot_ids[order], weights[order]), whole[order]), (kind, has_gate)
        assert torch.equal(kernel(hidden[30:33], slot_ids[30:33], weights[30:33]), whole[30:33]), (kind, has_gate)


@every_kernel
def test_a_missing_or_misshapen_tensor_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(has_bias=True)
    kernel = KERNELS[name].build(shape, 2, dtype)
    complete = random_expert(shape, dtype, generator)
    with pytest.raises(ValueError, match=r"down_bias \(shape None\) must have shape \(48,\)"):
        kernel.load_slot(0, ExpertTensors(complete.gate_up, complete.down, complete.gate_up_bias))
    with pytest.raises(ValueError, match=r"down \(shape \(32, 48\)\) must have shape \(48, 32\)"):
        kernel.load_slot(0, ExpertTensors(complete.gate_up, complete.down.t(), *list(complete.tensors().values())[2:]))


@every_kernel
@pytest.mark.parametrize("hidden_size", [48, 64, 131])
def test_experts_and_combine_give_the_bits_of_the_whole_call(name: str, dtype: torch.dtype, hidden_size: int) -> None:
    """Expert parallelism: outputs travel unweighted, and the token's owner sums them."""
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(hidden_size, 32, has_bias=True)
    kernel, _ = loaded(name, dtype, shape, 6, generator)
    hidden, slot_ids, weights = batch(shape, 6, 37, 3, dtype, generator)
    slot_ids[torch.rand(slot_ids.shape, generator=generator) < 0.2] = -1
    slot_ids[5] = -1
    whole = kernel(hidden, slot_ids, weights)
    tokens, k = (slot_ids >= 0).nonzero(as_tuple=True)
    outputs = torch.full((37, 3, hidden_size), float("nan"))  # a dropped pair's row may hold anything
    halves = (torch.arange(len(tokens)) % 2 == 0, torch.arange(len(tokens)) % 2 == 1)
    parts = halves if KERNELS[name].row_invariant else (torch.ones(len(tokens), dtype=torch.bool),)
    for part in parts:
        rows, slots = hidden[tokens[part]], slot_ids[tokens[part], k[part]]
        outputs[tokens[part], k[part]] = kernel.experts(rows, slots)
    before = outputs.clone()
    out = torch.empty_like(hidden)
    kernel.combine(outputs, slot_ids, weights, out)
    assert torch.equal(out, whole)
    assert torch.equal(outputs.nan_to_num(7.0), before.nan_to_num(7.0)), "what was received is only read"
    assert kernel.experts(hidden[:0], slot_ids[:0, 0]).shape == (0, hidden_size)


@every_kernel
def test_rows_and_outputs_may_lie_anywhere_for_kernels_that_take_addresses(name: str, dtype: torch.dtype) -> None:
    """Rows in other ranks' memory, one of them for two slots; what lies between the outputs is not touched."""
    generator = torch.Generator().manual_seed(SEED)
    shape = make_shape(131, 32, has_bias=True)
    kernel, _ = loaded(name, dtype, shape, 6, generator)
    if (in_place := in_place_experts(kernel, dtype)) is None:
        pytest.skip("this kernel takes rows one after the other")
    hidden = torch.randn(300, 131, generator=generator).to(dtype)
    source = torch.randint(300, (1000,), generator=generator)
    slot_ids = torch.randint(6, (1000,), generator=generator)
    target = torch.randperm(2000, generator=generator)[:1000]
    outputs = torch.full((2000, 131), 7.0)
    in_place.experts_in_place(
        dtype, hidden.data_ptr() + source * hidden.stride(0) * hidden.itemsize, slot_ids,
        outputs.data_ptr() + target * 131 * 4,
    )  # fmt: skip
    assert torch.equal(outputs[target], kernel.experts(hidden[source], slot_ids))
    outputs[target] = 7.0
    assert (outputs == 7.0).all()
