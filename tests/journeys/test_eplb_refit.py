"""New weights while experts move and requests run: those of a fresh engine afterwards, to the last bit, or the old."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eplb_watch import LIMITS, SHUFFLE, Traffic, Watch, assert_same, nothing_is_left, prompts, rank_balancers, reasons

from trimtab import LLM, SamplingParams, ranks
from trimtab.engine.engine import EngineDeadError, MixedWeightsError
from trimtab.experts.balancer import FIRST_EXCHANGE_TIMEOUT_S
from trimtab.experts.movement.faults import Point
from trimtab.experts.movement.mover import BackgroundMover
from trimtab.experts.placement import Placement
from trimtab.models.language_model import LanguageModel
from trimtab.outputs import RequestOutput
from trimtab.testing.checkpoints import make_tiny_checkpoint
from trimtab.testing.movement import ScriptedFaults, never_ready

SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = prompts(6, longest=24)
LONG = list(range(3, 40))
DP2: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "distributed_executor_backend": "threads",
}
EPLB: dict[str, Any] = {"enable_eplb": True, "eplb_config": SHUFFLE}
CAPTURE: dict[str, Any] = {"enable_return_routed_experts": True, "max_num_seqs": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": DP2,
    "threads, EPLB": DP2 | EPLB,
    "shared tokens, EPLB": {**DP2, "data_parallel_size": 1, "tensor_parallel_size": 2, **EPLB},
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("new"), seed=2)


def answers(checkpoint: Path) -> list[RequestOutput]:
    with LLM(str(checkpoint), **LIMITS) as llm:
        return llm.generate(PROMPTS, SAMPLING, use_tqdm=False)


@pytest.fixture(scope="module")
def of_old(old: Path) -> list[RequestOutput]:
    return answers(old)


@pytest.fixture(scope="module")
def of_new(new: Path) -> list[RequestOutput]:
    return answers(new)


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path, of_old: list[RequestOutput], of_new: list[RequestOutput]) -> Iterator[None]:
    with nothing_is_left(tmp_path):
        yield


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, SAMPLING, use_tqdm=False)


def generate_until_moved(llm: LLM, expected: list[RequestOutput]) -> None:
    before = llm.eplb_stats()["moves"]
    for _ in range(200):
        assert_same(generate(llm), expected)
        if llm.eplb_stats()["moves"] > before:
            return
    raise AssertionError(f"no expert moved: {llm.eplb_stats()}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b23_after_new_weights_outputs_are_those_of_a_fresh_engine_wherever_experts_are(
    old: Path, new: Path, of_old: list[RequestOutput], of_new: list[RequestOutput], layout: str
) -> None:
    """B23. Requests that run go on; cached prefixes are forgotten; captured rows say which weights they come from; what
    ranks agree on is exchanged anew, so that experts go on moving."""
    with LLM(str(old), **LIMITS | CAPTURE | LAYOUTS[layout]) as llm:
        assert_same(generate(llm), of_old)
        if "EPLB" in layout:
            generate_until_moved(llm, of_old)
        assert weights_of(generate(llm)[0]) == {0}
        llm.engine.add_request("running", LONG, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        for _ in range(10):
            llm.engine.step()
        assert llm.update_weights(str(new)) == 1
        (running,) = [output for output in run_to_the_end(llm) if output.request_id == "running"]
        assert running.error is None and len(running.outputs[0].token_ids) == 40
        assert weights_of(running) == {0, 1}
        first = generate(llm)
        assert_same(first, of_new)
        assert all(output.num_cached_tokens == 0 for output in first)
        assert weights_of(first[0]) == {1}
        if "EPLB" in layout:
            generate_until_moved(llm, of_new)
            assert llm.eplb_stats()["rearrangements"]["failed"] == 0
            Watch(llm).check()
        assert llm.update_weights(str(old)) == 2
        assert_same(generate(llm), of_old)


def weights_of(output: RequestOutput) -> set[int]:
    meta = output.outputs[0].routed_experts_meta
    assert meta is not None
    return {version for _, version in meta.weights_versions}


def run_to_the_end(llm: LLM) -> list[RequestOutput]:
    """Of requests that were given to the engine itself: the LLM may have stepped some of them already."""
    finished = [output for output in llm._outputs.values() if output.finished]
    llm._outputs.clear()
    while llm.engine.has_unfinished:
        finished += [output for output in llm.engine.step() if output.finished]
    return finished


def test_b23_new_weights_while_experts_are_staged_abort_and_never_interleave(
    old: Path, new: Path, of_old: list[RequestOutput], of_new: list[RequestOutput]
) -> None:
    with LLM(str(old), **LIMITS | DP2 | EPLB) as llm:
        traffic = Traffic(llm, PROMPTS, of_old, SAMPLING)
        traffic.until_one_more("done")
        mover: Any = rank_balancers(llm)[1].mover
        for point in (Point.STAGE, Point.ARRIVED, Point.STAGED):
            mover._faults = ScriptedFaults({point: never_ready})
            traffic.until(lambda: point in [found for found, _ in mover._faults.reached])  # noqa: B023
            traffic.finish()
            llm.update_weights(str(new))
            assert "new weights" in reasons(llm, "aborted")[-1]
            mover._faults = ScriptedFaults()
            traffic.expected = of_new
            traffic.until_one_more("done")
            traffic.finish()
            Watch(llm).check()
            llm.update_weights(str(old))
            traffic.expected = of_old
        traffic.until_one_more("done")
        traffic.finish()


def test_files_that_do_not_fit_are_refused_and_the_old_weights_serve_on(
    old: Path, of_old: list[RequestOutput], tmp_path: Path
) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", seed=3, intermediate_size=64)
    cut = tmp_path / "cut"
    shutil.copytree(old, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with LLM(str(old), **LIMITS | DP2 | EPLB) as llm:
        generate(llm)
        for path in (other, cut):
            with pytest.raises(ValueError, match=r"cannot be loaded: rank 0: .*the old ones serve on"):
                llm.update_weights(str(path))
            assert_same(generate(llm), of_old)
        for name, reason in (
            (str(tmp_path / "nowhere"), r"path \(.*nowhere\) does not exist; pass a folder with config.json"),
            ("some/repo", "looks like a Hugging Face id, but only local folders are read: run `hf download some/repo"),
            (str(weights), "is a file; name the folder that holds it"),
        ):
            with pytest.raises(ValueError, match=reason):
                llm.update_weights(name)
            assert llm.engine.refit_result is not None and llm.engine.refit_result.problem, "no rank was asked"
        assert llm.engine.weights_version == 0
        Watch(llm).check()


@pytest.mark.parametrize("eplb", [EPLB, {}], ids=["EPLB", "off"])
@pytest.mark.parametrize("victim", [0, 1])
def test_b23_a_failure_after_the_first_byte_on_one_rank_serves_nobody_until_weights_are_whole(
    old: Path,
    new: Path,
    of_new: list[RequestOutput],
    eplb: dict[str, Any],
    victim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = ranks.refit

    def refit(model: LanguageModel, path: str, placement: Placement | None, rank: int) -> None:
        whole(model, path, placement, rank)
        if rank == victim:
            raise OSError("the disk went away")

    with LLM(str(old), **LIMITS | DP2 | eplb) as llm:
        generate(llm)
        llm.engine.add_request("running", LONG, SAMPLING)
        llm.engine.step()
        monkeypatch.setattr(ranks, "refit", refit)
        with pytest.raises(MixedWeightsError, match=f"rank {victim}: OSError: the disk went away"):
            llm.update_weights(str(new))
        assert not llm.engine.has_unfinished, "requests that ran have failed"
        with pytest.raises(MixedWeightsError, match="the disk went away"):
            llm.engine.add_request("late", [1, 2], SAMPLING)
        if eplb:
            with pytest.raises(MixedWeightsError, match="the disk went away"):
                llm.rearrange_experts()
        with pytest.raises(MixedWeightsError, match="the disk went away"):
            llm.update_weights(str(new))
        monkeypatch.setattr(ranks, "refit", whole)
        assert llm.update_weights(str(new)) == 1
        for _ in range(3):
            assert_same(generate(llm), of_new)
        if eplb:
            Watch(llm).check()
            assert llm.eplb_stats()["rearrangements"]["failed"] == 0


@pytest.mark.parametrize("layout", ["threads", "threads, EPLB"])
def test_weights_that_take_longer_than_their_deadline_end_the_engine_and_say_what_to_do(
    old: Path, new: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, goes_on = ranks.refit, threading.Event()

    def slow(model: LanguageModel, path: str, placement: Placement | None, rank: int) -> None:
        if rank == 1:
            goes_on.wait()
        whole(model, path, placement, rank)

    with LLM(str(old), **LIMITS | LAYOUTS[layout]) as llm:
        for timeout_s in (0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=r"timeout_s \(.*\) must be above 0 seconds; leave it out"):
                llm.update_weights(str(new), timeout_s=timeout_s)
        assert llm.update_weights(str(new), timeout_s=1e6) == 1
        monkeypatch.setattr(ranks, "refit", slow)
        remedy = "it was reading new weights: give update_weights a larger timeout_s"
        try:
            with pytest.raises(EngineDeadError, match=rf"did not answer step \d+ within 0\.5 s.*; {remedy}"):
                llm.update_weights(str(old), timeout_s=0.5)
        finally:
            goes_on.set()


def test_the_deadline_of_new_weights_grows_with_their_bytes(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(old), **LIMITS | DP2) as llm:
        found: list[float] = []
        request_refit = llm.engine.request_refit

        def noted(path: str, num_ranks: int, timeout_s: float) -> None:
            found.append(timeout_s)
            request_refit(path, num_ranks, timeout_s)

        monkeypatch.setattr(llm.engine, "request_refit", noted)
        llm.update_weights(str(new))
        monkeypatch.setattr("trimtab.llm.weights_nbytes", lambda folder: 10**12)
        llm.update_weights(str(new))
        assert found == [600.0, 2 * 10**12 / 20e6]


def test_ranks_that_read_new_weights_at_different_speeds_wait_for_each_other_as_long_as_their_step_may_take(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    exchange = BackgroundMover.exchange

    def noted(mover: BackgroundMover, placement: Placement, timeout_s: float) -> None:
        found.append(timeout_s)
        exchange(mover, placement, timeout_s)

    monkeypatch.setattr(BackgroundMover, "exchange", noted)
    with LLM(str(old), **LIMITS | DP2 | EPLB) as llm:
        llm.update_weights(str(new), timeout_s=1234.0)
    assert found == [FIRST_EXCHANGE_TIMEOUT_S, FIRST_EXCHANGE_TIMEOUT_S, 1234.0, 1234.0]


def test_ranks_that_agree_on_a_table_agree_on_the_new_weights(old: Path, new: Path) -> None:
    """Rule 1: the table of checksums after new weights is the one of an engine that started with them."""
    tables: list[np.ndarray] = []
    for first, second in ((old, new), (new, None)):
        with LLM(str(first), **LIMITS | DP2 | EPLB) as llm:
            if second is not None:
                generate(llm)
                llm.update_weights(str(second))
            found = [rank.mover._table() for rank in rank_balancers(llm)]  # type: ignore[attr-defined]
            np.testing.assert_array_equal(found[0], found[1])
            tables.append(found[0].copy())
    np.testing.assert_array_equal(tables[0], tables[1])
