"""Wherever a mover stands still, forwards go on: it holds nothing that they need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eplb_watch import LIMITS, Traffic, Watch, balanced, nothing_is_left, prompts, rank_balancers

from trimtab import LLM, SamplingParams
from trimtab.experts.movement.faults import NoFaults, Point
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint
from trimtab.testing.movement import ScriptedFaults, waits_for

SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = prompts(9, longest=24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixtral"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[RequestOutput]:
    with LLM(str(checkpoint), **LIMITS) as llm:
        return llm.generate(PROMPTS, SAMPLING, use_tqdm=False)


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path, checkpoint: Path, expected: list[RequestOutput]) -> Iterator[None]:
    with nothing_is_left(tmp_path):
        yield


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
        traffic = Traffic(llm, PROMPTS, expected, SAMPLING)
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
