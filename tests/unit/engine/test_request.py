"""One sequence: which token ends it, and for which reason."""

from __future__ import annotations

import pytest

from trimtab.engine.request import Request
from trimtab.sampling_params import SamplingParams


def accept(tokens: list[int], *, eos: set[int] = frozenset(), limit: int = 100, **sampling: object) -> Request:  # type: ignore[assignment]
    params = SamplingParams(max_tokens=None, **sampling)  # type: ignore[arg-type]
    request = Request("r", [1, 1], params, seed=0, eos_token_ids=frozenset(eos), max_total_tokens=limit)
    for token_id in tokens:
        request.accept(token_id)
    return request


def test_eos_has_no_stop_reason_and_a_stop_token_names_itself() -> None:
    """B121"""
    assert (accept([5, 2], eos={2, 7}).finish_reason, accept([5, 7], eos={2, 7}).stop_reason) == ("stop", None)
    assert accept([5, 9], stop_token_ids=[9]).stop_reason == 9


def test_end_token_as_the_last_allowed_token_is_a_stop() -> None:
    assert accept([5, 2], eos={2}, limit=4).finish_reason == "stop"
    assert accept([5, 6], eos={2}, limit=4).finish_reason == "length"


def test_end_tokens_within_min_tokens_end_nothing() -> None:
    request = accept([2, 9], eos={2}, stop_token_ids=[9], min_tokens=2)
    assert not request.finished
    request.accept(9)
    assert request.finish_reason == "stop"


def test_finished_request_accepts_nothing_more() -> None:
    with pytest.raises(AssertionError, match="finished"):
        accept([2, 2], eos={2})


def test_unseen_tokens_count_towards_the_limit() -> None:
    request = accept([5], limit=5)
    request.num_planned, request.num_unseen_tokens = 3, 1
    assert request.num_ready == 1
    request.num_planned, request.num_unseen_tokens = 4, 2
    assert request.num_ready == 0
