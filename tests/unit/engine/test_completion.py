"""What the user sees of one sequence, step by step."""

from __future__ import annotations

import numpy as np

from trimtab.engine.completion import Completion
from trimtab.engine.request import Request
from trimtab.engine.scheduler import Progress
from trimtab.plan import TokenLogprobs
from trimtab.sampling_params import SamplingParams


def candidates(*token_ids: int, rank: int) -> TokenLogprobs:
    scores = -np.arange(1, len(token_ids) + 1, dtype=np.float32)
    return TokenLogprobs(np.array(token_ids, dtype=np.int64), scores, rank)


def make_completion(**sampling: object) -> Completion:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Completion(Request("r", [1, 2, 3], params, seed=0, max_total_tokens=10), None)


def test_chosen_token_keeps_its_rank_and_candidates_are_numbered() -> None:
    completion = make_completion(logprobs=2)
    completion.request.accept(9)
    completion.take(Progress(completion.request, 9, candidates(9, 5, 6, rank=40)))
    (entry,) = completion.output(0).logprobs or []
    assert [(token, found.rank) for token, found in entry.items()] == [(9, 40), (5, 1), (6, 2)]
    assert completion.cumulative_logprob == -1.0


def test_chosen_token_among_the_candidates_is_listed_once() -> None:
    completion = make_completion(logprobs=2)
    completion.request.accept(5)
    completion.take(Progress(completion.request, 5, candidates(5, 5, 6, rank=1)))
    (entry,) = completion.output(0).logprobs or []
    assert [(token, found.rank) for token, found in entry.items()] == [(5, 1), (6, 2)]


def test_prompt_logprobs_computed_again_after_a_preemption_are_taken_once() -> None:
    completion = make_completion(prompt_logprobs=0)
    for prompt_start, tokens in ((0, [2]), (0, [2, 3])):
        progress = Progress(completion.request, prompt_start=prompt_start)
        progress.prompt_logprobs = [candidates(token, rank=1) for token in tokens]
        completion.take(progress)
    assert completion.prompt_logprobs is not None
    assert [entry and list(entry) for entry in completion.prompt_logprobs] == [None, [2], [3]]


def test_outputs_given_out_do_not_grow_afterwards() -> None:
    completion = make_completion(logprobs=0)
    outputs = []
    for token in (7, 8):
        completion.request.accept(token)
        completion.take(Progress(completion.request, token, candidates(token, rank=1)))
        outputs.append(completion.output(0))
    assert [len(output.token_ids) for output in outputs] == [1, 2]
    assert [len(output.logprobs or []) for output in outputs] == [1, 2]
