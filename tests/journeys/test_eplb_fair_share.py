"""Wherever a mover stands still, forwards go on: it holds nothing that they need."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from eplb_watch import (
    FEW_PROMPTS,
    FEW_TOKENS,
    Traffic,
    Watch,
    balanced,
    rank_balancers,
)

from trimtab.experts.movement.faults import NoFaults, Point
from trimtab.outputs import RequestOutput
from trimtab.testing.movement import ScriptedFaults, waits_for

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("communicator", "all2all_backend"), [("shared_memory", "shared_memory"), ("torch_gloo", "gloo")]
)
def test_b07_forwards_go_on_while_all_movers_stand_still_at_any_point(
    checkpoint: Path, expected: list[RequestOutput], communicator: str, all2all_backend: str, num_threads: int
) -> None:
    """B07: with one thread and with two, movers and forwards on the same kind of transport. A forward that needed what
    a mover holds would never end here."""
    options = {"data_parallel_size": 2, "all2all_backend": all2all_backend, "num_threads": num_threads}
    with balanced(checkpoint, {"communicator": communicator}, **options) as llm:
        traffic = Traffic(llm, FEW_PROMPTS, expected, FEW_TOKENS)
        movers = [rank.mover for rank in rank_balancers(llm)]
        for point in Point:
            goes_on = threading.Event()
            faults = ScriptedFaults({point: waits_for(goes_on)})
            try:
                for mover in movers:
                    mover._faults = faults  # type: ignore[attr-defined]
                traffic.until(lambda: point in [found for found, _ in faults.reached])  # noqa: B023
                right = traffic.num_right
                traffic.until(lambda: traffic.num_right >= right + 4)  # noqa: B023
            finally:
                goes_on.set()
                for mover in movers:
                    mover._faults = NoFaults()  # type: ignore[attr-defined]
        traffic.until_one_more("done")
        traffic.finish()
        assert traffic.outcome("aborted") == 0 and not traffic.failures
        Watch(llm).check()
