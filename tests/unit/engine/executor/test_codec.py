"""Messages between controller and workers: everything a plan or an output can hold arrives as it was sent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from trimtab.engine.executor.codec import (
    Failed,
    Output,
    Step,
    Stop,
    decode_command,
    decode_report,
    decode_setup,
    encode,
    encode_setup,
)
from trimtab.experts.ports import Abort, Collect, Commit, LoadReport, Plan, Quiescent, Stage, Staged
from trimtab.plan import OpenRow, RoutedRows, ScheduledRow, StepOutput, StepPlan, TokenLogprobs, join_token_groups
from trimtab.sampling_params import SamplingParams


def test_plan_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(
        n=2, temperature=0.1, top_k=-1, seed=-(2**63), max_tokens=None, stop=["é\0"],
        logit_bias={7: -5.5, 2**31 - 1: 1},
        allowed_token_ids=[1, 2], bad_words=["x"], logprobs=0,
    )  # fmt: skip
    opened = OpenRow(3, "räquest", [1, 2**31], 2, sampling, 2**63 - 1, [5], [[1, 2], [3]])
    scheduled = [ScheduledRow(3, 0, 2, True, ([1, 2], [])), ScheduledRow(0, 9, 1, False, ([], []))]
    plan = StepPlan(12, [4], [opened], scheduled, [], runs_forward=True)
    command = decode_command(encode(Step(plan)))
    assert isinstance(command, Step) and command.plan == plan
    assert isinstance(decode_command(encode(Stop())), Stop)


def test_output_arrives_as_it_was_sent_arrays_included() -> None:
    logprobs = TokenLogprobs(np.array([3, 1], dtype=np.int64), np.array([-0.5, -np.inf], dtype=np.float32), 1)
    output = StepOutput(5, {0: 3}, {0: logprobs}, {1: [logprobs, logprobs]}, {2: "no"})
    output.routed_experts = RoutedRows(np.arange(6, dtype=np.uint8).reshape(3, 1, 2), np.array([7, 8, 9]))
    report = decode_report(encode(Output(1, output)))
    assert isinstance(report, Output) and report.rank == 1
    arrived = report.output
    assert (arrived.step_id, arrived.token_ids, arrived.failures) == (5, {0: 3}, {2: "no"})
    assert arrived.routed_experts is not None and arrived.routed_experts.experts.dtype == np.uint8
    assert np.array_equal(arrived.routed_experts.experts, output.routed_experts.experts)
    assert np.array_equal(arrived.routed_experts.slot_mapping, output.routed_experts.slot_mapping)
    for found in (arrived.logprobs[0], *arrived.prompt_logprobs[1]):
        assert found.token_ids.dtype == np.int64 and found.logprobs.dtype == np.float32
        assert np.array_equal(found.token_ids, logprobs.token_ids)
        assert np.array_equal(found.logprobs, logprobs.logprobs)
        found.logprobs[0] = 1  # writable, and its own


def test_balancing_commands_and_reports_arrive_as_they_were_sent() -> None:
    slots, shares = np.array([[0, 1, 1]]), np.array([[3, 1, 2]])
    sent = [Collect(True), Plan(4, slots, shares, "digest"), Stage(4, 0), Commit(4, 0), Abort(4, "why")]
    command = decode_command(encode(Step(StepPlan(0, commands=sent))))
    assert isinstance(command, Step)
    arrived = command.plan.commands
    assert [arrived[0], *arrived[2:]] == [sent[0], *sent[2:]]
    plan = arrived[1]
    assert isinstance(plan, Plan) and (plan.transaction, plan.start_digest) == (4, "digest")
    assert np.array_equal(plan.slot_to_expert, slots) and np.array_equal(plan.shares, shares)
    load = LoadReport(1, np.array([[5, 0]]), 2, 1, 0.5)
    report = decode_report(encode(Output(1, StepOutput(0, reports=[load, Staged(1, 4, 0, 8), Quiescent(1, 4)]))))
    assert isinstance(report, Output)
    found = report.output.reports
    assert found[1:] == [Staged(1, 4, 0, 8), Quiescent(1, 4)]
    assert isinstance(found[0], LoadReport) and np.array_equal(found[0].counts, load.counts)
    assert (found[0].rank, found[0].num_steps, found[0].num_recorded_steps, found[0].step_s) == (1, 2, 1, 0.5)


def test_reports_of_all_ranks_of_a_token_group_reach_the_controller() -> None:
    outputs = [StepOutput(0, {0: rank}, reports=[Quiescent(rank, 1)]) for rank in range(4)]
    joined = join_token_groups(outputs, 2)
    assert [output.token_ids for output in joined] == [{0: 0}, {0: 2}]
    assert [[report.rank for report in output.reports] for output in joined] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "array", [np.zeros((0, 4), np.int32), np.array(7.5), np.array([True, False]), np.ones((2, 3)).T]
)
def test_array_keeps_shape_type_and_values(array: np.ndarray) -> None:
    found = decode_setup(encode_setup({"array": array}))["array"]
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)


def test_message_with_a_field_of_the_wrong_type_is_refused() -> None:
    good = {"type": "Failed", "rank": 1, "reason": "r", "is_mistake": False, "is_consequence": False}
    assert decode_report(msgspec.msgpack.encode(good)) == Failed(1, "r", False, False)
    for bad in ({**good, "rank": "1"}, {**good, "type": "Run"}, {"type": "Failed"}):
        with pytest.raises(msgspec.ValidationError):
            decode_report(msgspec.msgpack.encode(bad))


def test_objects_that_are_no_data_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="function cannot cross a process boundary"):
        encode(Output(0, StepOutput(0, reports=[test_plan_arrives_as_it_was_sent])))
    with pytest.raises(AssertionError, match="arrays of objects"):
        encode(Output(0, StepOutput(0, reports=[np.array([object()])])))
