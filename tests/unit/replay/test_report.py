"""The report's numbers against counts made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_networks import choices, make_network, random_ids, routes_for

from trimtab.replay import report_replay
from trimtab.replay.report import LayerMismatch, RunReport


def test_mismatch_counts_sets_of_experts_and_pairs() -> None:
    run = RunReport([LayerMismatch(0), LayerMismatch(4)])
    rollout = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    trainer = np.array([[[1, 0], [2, 9]], [[4, 5], [8, 9]]])  # another order is no mismatch
    run.count_experts(rollout, trainer)
    assert [layer.row_share for layer in run.layers] == [0.0, 1.0]
    assert [layer.pair_share for layer in run.layers] == [0.0, 0.75]
    assert run.agreement == 1 - 3 / 8
    assert run.row_mismatch == 0.5


def test_kl_estimators_are_the_named_ones() -> None:
    run = RunReport([])
    assert run.kl_k1 is None and run.kl_k3 is None
    run.count_logprobs(np.log([0.5, 0.25]), np.log([0.25, 0.5]))
    assert run.kl_k1 == pytest.approx(0.0)  # log 2 - log 2
    assert run.kl_k3 == pytest.approx(((0.5 - 1 + np.log(2)) + (2 - 1 - np.log(2))) / 2)


def rollout_of(network: Any, ids: torch.Tensor, num_prompt_tokens: int) -> Any:
    with torch.no_grad():
        logprobs = network(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    sampled = [float(logprobs[place - 1, ids[place]]) for place in range(num_prompt_tokens, len(ids))]
    return routes_for(
        network, ids, num_prompt_tokens=num_prompt_tokens, logprobs=np.array(sampled, np.float32), request_id="r"
    )


def test_equal_weights_agree_and_have_no_divergence_either_way() -> None:
    network = make_network("qwen3_moe").requires_grad_(False)
    report = report_replay(network, [rollout_of(network, ids, 3) for ids in random_ids(9, 12)])
    assert (report.num_completions, report.num_rows, report.without.num_tokens) == (2, 8 + 11, 6 + 9)
    for run in (report.without, report.with_replay):
        assert run.agreement == 1.0
        assert abs(run.kl_k1) < 1e-5 and 0 <= run.kl_k3 < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_other_weights_mismatch_without_replay_and_never_with_it(family: str) -> None:
    rollout = make_network(family).requires_grad_(False)
    sequences = random_ids(30, 21)
    routes = [rollout_of(rollout, ids, 4) for ids in sequences]
    trainer = make_network(family).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for name, weight in trainer.named_parameters():
        if "gate.weight" in name:
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    report = report_replay(trainer, routes)
    assert report.with_replay.agreement == 1.0 and report.with_replay.row_mismatch == 0.0
    assert 0.5 < report.without.agreement < 1.0

    expected = np.mean(
        [
            (np.sort(choices(trainer, ids)[:-1]) != np.sort(entry.experts)).any(axis=2).mean(axis=1).sum()
            for ids, entry in zip(sequences, routes, strict=True)
        ]
    ) / np.mean([entry.num_rows for entry in routes])
    assert report.without.row_mismatch == pytest.approx(expected)
    assert report.without.kl_k3 > 0 and report.with_replay.kl_k3 > 0


def test_completions_without_rows_are_listed_and_without_logprobs_only_routed() -> None:
    network = make_network("mixtral").requires_grad_(False)
    (ids,) = random_ids(6)
    full = routes_for(network, ids)
    aborted = replace(full, experts=full.experts[:0], finish_reason="abort", request_id="gone")
    seen: list[int] = []
    report = report_replay(network, [aborted, full], seen.append)
    assert report.left_out == ["request gone completion 0"] and report.num_completions == 1
    assert report.without.kl_k1 is None and seen == [1, 2]
    assert report.as_dict()["with_replay"]["kl_k3"] is None
    with pytest.raises(ValueError, match="nothing to compare"):
        report_replay(network, [aborted])


def test_rows_from_a_start_and_a_row_for_the_last_token_are_compared_in_their_places() -> None:
    network = make_network("mixtral").requires_grad_(False)
    (ids,) = random_ids(9)
    own = choices(network, ids)
    for routes in (routes_for(network, ids, own[4:], start=4), routes_for(network, ids, own)):
        report = report_replay(network, [routes])
        assert report.num_rows == routes.num_rows
        assert report.without.agreement == report.with_replay.agreement == 1.0
