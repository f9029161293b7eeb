"""Which dispatcher serves, and that the choice says why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from trimtab.distributed.errors import RankFailureError
from trimtab.experts.data.dispatch import choice
from trimtab.experts.data.dispatch.choice import DispatchPlan, choose_dispatcher, create_resources, open_dispatcher
from trimtab.kernels.native.exchange import exchange_refusal

has_exchange = pytest.mark.skipif(exchange_refusal() is not None, reason="the native core is not built")


def choose(**changes: Any) -> DispatchPlan:
    arguments = {"num_ranks": 2, "num_sharing": 1, "max_tokens": 64, "max_top_k": 4, "max_hidden_size": 96}
    return choose_dispatcher(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "refusal", "chosen", "words"),
    [
        ({"num_ranks": 1}, None, "local", "one rank holds every expert"),
        ({"num_ranks": 1}, "not built", "local", "one rank holds every expert"),
        ({}, None, "shared_memory", "all ranks are on this machine"),
        ({}, "not built", "gloo", "no native exchange: not built"),
        ({"backend": "gloo"}, None, "gloo", "asked for by all2all_backend"),
        ({"backend": "shared_memory"}, None, "shared_memory", "asked for by all2all_backend"),
    ],
)
@has_exchange
def test_the_choice_is_logged_in_one_line_with_its_reason(
    changes: dict,
    refusal: str | None,
    chosen: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(choice, "exchange_refusal", lambda: refusal)
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        assert choose(**changes).backend == chosen
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert words in line and chosen in line
    assert ("MiB shared" in line) == (chosen == "shared_memory")


def test_a_backend_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"all2all_backend \('nccl'\) must be one of shared_memory, gloo"):
        choose(backend="nccl")
    monkeypatch.setattr(choice, "exchange_refusal", lambda: "not built")
    with pytest.raises(ValueError, match=r"'shared_memory'\) cannot serve here: not built; .*'gloo'"):
        choose(backend="shared_memory")


@has_exchange
def test_shared_memory_is_sized_by_what_a_step_can_send(tmp_path: Path) -> None:
    """Rows and slot ids once, and an fp32 output per token and chosen expert: no more, for every rank."""
    plan = choose()
    per_rank = 64 * 96 * 4 + 64 * 4 * 8 + 64 * 4 * 96 * 4
    assert 2 * per_rank <= plan.sizes().segment_bytes() <= 2 * per_rank + 4096
    assert choose(num_sharing=2, max_tokens=127).sizes() == plan.sizes(), "who shares tokens sends a part of them"
    with pytest.raises(ValueError, match=rf"needs {plan.sizes().segment_bytes()} bytes, and 1000 bytes are available"):
        create_resources(plan, tmp_path, available_bytes=1000)


@has_exchange
def test_a_rank_that_finds_no_memory_says_so(tmp_path: Path) -> None:
    resources = create_resources(choose(), tmp_path)
    resources.close()
    with pytest.raises(RankFailureError, match=r"rank 1 finds no shared memory at /proc/\d+/fd/\d+: No such file"):
        open_dispatcher(resources.plan, 1)


@has_exchange
def test_more_tokens_than_a_step_may_have_are_an_internal_error(tmp_path: Path) -> None:
    import torch

    from trimtab.kernels.native.exchange import NativeExchange

    resources = create_resources(choose(max_tokens=4), tmp_path)
    assert resources.segment is not None
    exchange = NativeExchange(resources.segment.memory, resources.plan.sizes(), 0, is_crowded=False)
    with pytest.raises(AssertionError, match="5 tokens, top-4, 384 bytes per row do not fit"):
        exchange.send(torch.zeros(5, 96), torch.zeros(5, 4, dtype=torch.int64), 8)


@has_exchange
def test_memory_of_another_kind_is_no_segment() -> None:
    from trimtab.distributed.segment import SharedSegment
    from trimtab.kernels.native.exchange import NativeExchange

    segment = SharedSegment.create(1 << 20)
    with pytest.raises(RuntimeError, match="is not a segment of this version"):
        NativeExchange(segment.memory, choose().sizes(), 0, is_crowded=False)
