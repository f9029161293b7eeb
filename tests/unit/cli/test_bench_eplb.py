"""`trimtab bench eplb`: its arithmetic on numbers that can be checked by eye, and the command on a tiny model."""

import json
import random
from dataclasses import asdict

import numpy as np
import pytest

from trimtab.cli.bench import balancing_line
from trimtab.cli.bench_eplb import (
    Round,
    Side,
    by_domain,
    domain_prompts,
    eplb,
    max_over_mean,
    predicted_ratio,
    print_report,
    run_rounds,
)
from trimtab.cli.eplb_figure import _stretches, save_eplb_figure
from trimtab.cli.options import EngineOptions
from trimtab.experts.placement import Placement, Topology
from trimtab.testing.checkpoints import make_tiny_checkpoint

NATURAL = Placement.initial(Topology(4, 0, 2), 2)  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
TINY = {
    "distributed_executor_backend": "threads", "num_threads": 1, "kv_cache_memory_bytes": "4MiB", "dtype": "float32",
}  # fmt: skip


def a_round(domain: str, off: float = 100.0, on: float = 120.0, moves: int = 0, equal: bool = True) -> Round:
    return Round(domain, Side(1.0, off, 1.5), Side(1.0, on, 1.1), moves, int(moves > 0), equal)


def test_max_over_mean_weights_layers_by_their_pairs() -> None:
    even, skewed = [5, 5, 5, 5], [9, 6, 3, 2]
    assert max_over_mean(np.array([even, even]), NATURAL) == 1
    assert max_over_mean(np.array([skewed, skewed]), NATURAL) == 15 / 10
    assert max_over_mean(np.array([even, [0, 0, 0, 0]]), NATURAL) == 1
    assert max_over_mean(np.array([[10, 10, 10, 10], skewed]), NATURAL) == pytest.approx((40 * 1 + 20 * 1.5) / 60)
    assert max_over_mean(np.zeros((2, 4), dtype=int), NATURAL) == 1


def test_the_prediction_is_one_plus_the_experts_share_of_what_is_uneven() -> None:
    assert predicted_ratio(0.5, 1.8) == pytest.approx(1 + 0.5 * 0.8)
    assert predicted_ratio(0.5, 1.8, 1.8) == 1
    assert predicted_ratio(0.0, 2.0) == 1


def test_prompts_are_of_the_asked_length_and_the_same_every_time() -> None:
    passages = [[1, 1], [2, 2, 2], [3]]
    first, again = (list(domain_prompts(passages, random.Random(3), 4, 9)) for _ in range(2))
    assert first == again and [len(prompt) for prompt in first] == [9] * 4
    assert {token for prompt in first for token in prompt} == {1, 2, 3}


def test_results_are_medians_of_a_domains_second_half() -> None:
    rounds = [a_round("code", on=50, moves=7), a_round("code"), a_round("maths", on=50), a_round("maths", on=90)]
    code, maths = by_domain(rounds, experts_share=0.5)
    assert (code.domain, code.ratio, code.moves, code.rearrangements) == ("code", 1.2, 7, 1)
    assert (maths.domain, maths.ratio, maths.moves) == ("maths", 0.9, 0)
    assert code.predicted_ratio == pytest.approx(1.25 / 1.05)


def test_a_domain_that_comes_back_is_a_stretch_of_its_own() -> None:
    rounds = [a_round("code"), a_round("code"), a_round("maths"), a_round("code")]
    assert _stretches(rounds) == [(1, 2, "code"), (3, 3, "maths"), (4, 4, "code")]
    assert [result.domain for result in by_domain(rounds, 1.0)] == ["code", "maths", "code"]


def test_the_figure_is_written_into_a_folder_that_it_makes(tmp_path) -> None:
    rounds = [a_round("code"), a_round("code", moves=3), a_round("german")]
    path = save_eplb_figure(rounds, tmp_path / "new" / "eplb.png", model="tiny")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_line_of_offline_says_what_balancing_did() -> None:
    stats = {
        "rearrangements": {"done": 2, "aborted": 0}, "balancedness": 0.874, "moves": 1200, "bytes": 3 * 2**20,
        "planning_s": 0.5, "staging_s": 1.25, "committing_s": 0.01,
    }  # fmt: skip
    assert balancing_line(stats) == (
        "rearrangements: 2 done, 0 aborted; balancedness 0.87; 1,200 slots moved, 3 MiB between ranks; "
        "planning 0.50 s, staging 1.25 s, committing 0.01 s"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domains": "code,poetry"}, r"domains \('code,poetry'\) must be some of"),
        ({"rounds": 1}, r"rounds \(1\) must be at least 2"),
        ({"output_len": 0}, r"output_len \(0\) must be at least 1"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        eplb(model="/does/not/exist", **arguments)


def test_a_plot_that_cannot_be_written_is_refused_before_a_model_is_loaded(tmp_path) -> None:
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        eplb(model="/does/not/exist", plot=tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), with_tokenizer=True)


def test_the_command_moves_experts_and_finds_the_same_tokens_on_both_sides(checkpoint, tmp_path, capsys) -> None:
    engine = EngineOptions(**TINY, eplb_config={"step_interval": "4", "window_size": "4"})
    arguments = {"batch_size": 2, "input_len": 12, "output_len": 8, "domains": "code,german"}
    png = tmp_path / "eplb.png"
    for rounds in (2, 8, 32, 128):  # in how many steps experts have moved is the machine's affair
        assert eplb(model=str(checkpoint), rounds=rounds, json_output=True, plot=png, engine=engine, **arguments) == 0
        report = json.loads(capsys.readouterr().out)
        if report["eplb"]["moves"]:
            break
    assert report["tokens_are_equal"] and report["eplb"]["moves"] > 0
    assert [part["domain"] for part in report["rounds"]] == ["code"] * rounds + ["german"] * rounds
    assert [result["domain"] for result in report["domains"]] == ["code", "german"]
    assert report["eplb_config"]["num_redundant_experts"] == 2 and report["eplb_config"]["step_interval"] == 4
    assert all(1 <= part[side]["max_over_mean"] <= 2 for part in report["rounds"] for side in ("off", "on"))
    assert png.exists()


def test_tokens_that_differ_are_told_and_end_with_status_1(checkpoint, monkeypatch, capsys) -> None:
    def other_tokens(*arguments, **named):
        rounds = run_rounds(*arguments, **named)
        return [a_round(rounds[0].domain, equal=False), *rounds[1:]]

    monkeypatch.setattr("trimtab.cli.bench_eplb.run_rounds", other_tokens)
    arguments = {"rounds": 2, "batch_size": 1, "input_len": 4, "output_len": 2, "domains": "code"}
    assert eplb(model=str(checkpoint), engine=EngineOptions(**TINY), **arguments) == 1
    assert "tokens: different in 1 rounds" in capsys.readouterr().out


@pytest.mark.parametrize("moves", [0, 7])
def test_a_run_in_which_nothing_moved_says_that_it_shows_nothing(moves, capsys) -> None:
    rounds = [a_round("code", moves=moves) for _ in range(2)]
    report = {
        "model": "tiny", "batch_size": 1, "input_len": 4, "output_len": 2, "experts_share": 0.5,
        "tokens_are_equal": True, "domains": [asdict(result) for result in by_domain(rounds, 0.5)],
        "rounds": [asdict(part) for part in rounds],
        "eplb": {"moves": moves, "rearrangements": {"done": int(moves > 0)}},
        "machine": {"cpu": "a CPU", "cores": 2, "torch": "2", "date": "2026-11-30"},
    }  # fmt: skip
    print_report(report)
    printed = capsys.readouterr().out
    assert ("no expert moved" in printed and "step_interval" in printed) == (moves == 0)
