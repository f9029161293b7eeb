"""What crossed a process boundary holds no view of the channel's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from trimtab.engine.executor.codec import Output, decode_report, encode
from trimtab.engine.executor.detach import detach_zero_copy_from_model_runner_output
from trimtab.experts.ports import LoadReport
from trimtab.plan import RoutedRows, StepOutput, TokenLogprobs


class Pair(NamedTuple):
    left: np.ndarray
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: np.ndarray


@dataclasses.dataclass(slots=True)
class GrownOutput(StepOutput):
    """A step's output as a later version may have it: a field that nobody told the walk about."""

    added: np.ndarray | None = None
    nested: dict[str, list[tuple[Pair, Frozen]]] = dataclasses.field(default_factory=dict)


CHANNEL = bytearray(range(200))


def view(count: int = 4) -> np.ndarray:
    """An array over the channel's memory, as it arrives without a copy: read-only."""
    array = np.frombuffer(memoryview(CHANNEL).toreadonly(), dtype=np.uint8)[:count]
    assert not array.flags.writeable
    return array


def full_output() -> GrownOutput:
    logprobs = TokenLogprobs(view(), view(), 1)
    return GrownOutput(
        step_id=3,
        token_ids={0: 7},
        logprobs={0: logprobs},
        prompt_logprobs={0: [TokenLogprobs(view(), view(), 2)]},
        failures={1: "no"},
        routed_experts=RoutedRows(view(), view()),
        reports=[LoadReport(0, view(), 1, 1)],
        added=view(),
        nested={"x": [(Pair(view(), [1, 2]), Frozen(view()))]},
    )


def arrays(value: Any) -> Iterator[np.ndarray]:
    """Every array that can be reached, by Python's own means of looking into things."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays(item)
    else:
        names = getattr(value, "__struct_fields__", None) or list(getattr(value, "__dataclass_fields__", ()))
        for name in names:
            yield from arrays(getattr(value, name))


def test_every_array_of_the_record_is_walked_also_one_in_a_field_added_later() -> None:
    """B69."""
    output = full_output()
    num_arrays = len(list(arrays(output)))
    assert num_arrays == 10, "the record has an array in each kind of place"
    detached = detach_zero_copy_from_model_runner_output(output)
    assert len(list(arrays(detached))) == num_arrays
    before = [array.tolist() for array in arrays(detached)]
    for array in arrays(detached):
        assert array.flags.writeable and not np.shares_memory(array, view(200))
    CHANNEL[:] = bytes(200)
    assert [array.tolist() for array in arrays(detached)] == before == [[0, 1, 2, 3]] * num_arrays
    CHANNEL[:] = bytes(range(200))


def test_containers_keep_their_types_and_lists_stay_as_they_are() -> None:
    ids, own = [1, 2, 3], np.arange(3)
    pair = Pair(view(), ids)
    record: dict[str, Any] = {"pair": pair, "own": own, "ids": ids}
    detached = detach_zero_copy_from_model_runner_output(record)
    assert detached is record and detached["ids"] is ids and detached["own"] is own
    assert type(detached["pair"]) is Pair and detached["pair"].right is ids
    assert type(detach_zero_copy_from_model_runner_output(Frozen(view()))) is Frozen
    untouched = (1, Frozen(own))
    assert detach_zero_copy_from_model_runner_output(untouched) is untouched


def test_a_value_that_cannot_be_searched_is_an_error() -> None:
    class Opaque:
        hidden = view()

    with pytest.raises(TypeError, match=r"Opaque .* cannot be searched for arrays"):
        detach_zero_copy_from_model_runner_output([Opaque()])


def test_outputs_kept_over_200_steps_stay_as_they_arrived() -> None:
    """B69: whoever keeps outputs holds none of the buffers they came in."""
    kept = []
    for step in range(200):
        output = StepOutput(step, routed_experts=RoutedRows(np.full((2, 1, 1), step, np.uint8), np.array([step, 1])))
        message = bytearray(encode(Output(0, output)))
        report = decode_report(message)
        message[:] = bytes(len(message))  # the channel's memory is used again
        assert isinstance(report, Output)
        kept.append(report.output)
    for step, output in enumerate(kept):
        assert output.routed_experts is not None and output.routed_experts.experts.flags.writeable
        assert output.routed_experts.experts.tolist() == [[[step % 256]]] * 2
        assert output.routed_experts.slot_mapping.tolist() == [step, 1]


def test_reports_with_arrays_stay_structs_of_their_kind() -> None:
    report = detach_zero_copy_from_model_runner_output(LoadReport(0, view(), 1, 1))
    assert isinstance(report, LoadReport) and isinstance(report, msgspec.Struct) and report.counts.flags.writeable
