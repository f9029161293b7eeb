"""Outputs of a step are waited for as long as its deadline, and what it was doing says what to do about that."""

import pytest

from trimtab.engine.executor.collector import StepCollector, WorkerFailedError
from trimtab.plan import StepOutput


def answered(*ranks: int) -> StepCollector:
    collector = StepCollector(2)
    for rank in ranks:
        collector.put(rank, StepOutput(step_id=7))
    return collector


def test_a_rank_that_does_not_answer_is_named_with_the_deadline() -> None:
    with pytest.raises(WorkerFailedError, match=r"^rank 1: did not answer step 7 within 0\.01 s$"):
        answered(0).take(7, 0.01)


def test_a_step_that_reads_new_weights_has_a_deadline_of_its_own_and_a_remedy() -> None:
    remedy = "it was reading new weights: give update_weights a larger timeout_s"
    with pytest.raises(WorkerFailedError, match=rf"^rank 0: did not answer step 7 within 0\.01 s; .*; {remedy}"):
        answered().take(7, 600.0, weights_timeout_s=0.01)


def test_waiting_tells_whether_taking_would_wait() -> None:
    assert not answered(0).wait(7, 0.01) and not answered(0).wait(7, -1.0) and not answered(0, 1).wait(8, 0.0)
    whole = answered(0, 1)
    assert whole.wait(7, 0.0) and [output.step_id for output in whole.take(7)] == [7, 7]
    broken = answered(0)
    broken.fail(WorkerFailedError(1, "gone"))
    assert broken.wait(7, 0.0), "there is something to raise"
    with pytest.raises(WorkerFailedError, match="rank 1: gone"):
        broken.take(7)
