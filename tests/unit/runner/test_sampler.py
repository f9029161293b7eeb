"""The sampler: right distributions, independent rows, penalties by hand, log-probabilities of the raw logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.plan import OpenRow, StepOutput
from trimtab.runner.candidates import RowMass, block_maxima, top_tokens
from trimtab.runner.logprobs import token_logprobs
from trimtab.runner.sampler import Sampler, SamplerOutput
from trimtab.runner.sampling_batch import SamplingTable, uniforms
from trimtab.sampling_params import SamplingParams

INF = math.inf


class Rows:
    """A sampling table with open rows; `sample` draws one token for each of them (or for some) from given logits."""

    def __init__(self, vocab_size: int, num_rows: int = 64, model_length: int = 64) -> None:
        self.token_ids = torch.zeros(num_rows, model_length, dtype=torch.int32)
        self.table = SamplingTable(self.token_ids, vocab_size)
        self.positions: dict[int, int] = {}

    def open(
        self,
        row: int = 0,
        *,
        prompt: list[int] = [0],  # noqa: B006
        output: list[int] = [],  # noqa: B006
        seed: int = 0,
        stops: list[int] = [],  # noqa: B006
        bad_words: list[list[int]] = [],  # noqa: B006
        **sampling: Any,
    ) -> None:
        tokens = [*prompt, *output]
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        params = SamplingParams(**{"max_tokens": 1000, **sampling})
        self.table.open(OpenRow(row, str(row), tokens, len(prompt), params, seed, stops, bad_words))
        self.positions[row] = len(tokens)

    def raw_sample(
        self, logits: torch.Tensor, rows: list[int] | None = None, masks: torch.Tensor | None = None
    ) -> SamplerOutput:
        rows = list(self.positions) if rows is None else rows
        batch = self.table.gather(np.array(rows), np.array([self.positions[row] for row in rows]))
        return Sampler()(logits.clone(), batch, masks)

    def sample(
        self, logits: torch.Tensor, rows: list[int] | None = None, masks: torch.Tensor | None = None
    ) -> StepOutput:
        rows = list(self.positions) if rows is None else rows
        output = StepOutput(step_id=0)
        self.raw_sample(logits, rows, masks).to("cpu").report(np.array(rows), output)
        return output


def greedy_token(logits: list[float], **row: Any) -> int:
    rows = Rows(len(logits))
    rows.open(temperature=0.0, **row)
    return rows.sample(torch.tensor([logits])).token_ids[0]


# --- greedy


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(4, 40_000)
    logits[0, 39_999] = 1.0
    logits[1, [7, 9, 30_000]] = 2.0
    logits[2, [30_000, 30_001]] = 2.0
    rows = Rows(40_000)
    for row in range(4):
        rows.open(row, temperature=0.0)
    assert rows.sample(logits).token_ids == {0: 39_999, 1: 7, 2: 30_000, 3: 0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 0.0])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """B116: logits / temperature would overflow."""
    rows = Rows(3)
    rows.open(temperature=temperature)
    assert rows.sample(torch.tensor([[50.0, 50.1, -50.0]])).token_ids == {0: 1}


def test_greedy_rows_with_masked_tokens_leave_sampled_neighbours_finite() -> None:
    """B116: a greedy row must never be divided by a marker temperature: -inf would become +inf, then NaN."""
    rows = Rows(4)
    rows.open(0, temperature=0.0, logprobs=3)
    rows.open(1, temperature=1.0, logprobs=3)
    rows.open(2, temperature=1e-5, logprobs=3)
    logits = torch.tensor([[1.0, -INF, 0.0, 0.5], [-INF, 3.0, -INF, 1.0], [1e4, -INF, 2e4, -1e4]])
    output = rows.sample(logits)
    assert output.failures == {}
    assert output.token_ids[0] == 0 and output.token_ids[1] in (1, 3) and output.token_ids[2] == 2
    assert all(not np.isnan(entry.logprobs).any() for entry in output.logprobs.values())


# --- distributions


def expected(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The textbook: filters on the sorted probabilities, in fp64. vLLM's order: min_p, top_k, top_p."""
    probs = torch.softmax(logits.double() / temperature, -1)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    order = torch.sort(probs, descending=True, stable=True).indices
    if top_k:
        probs[order[top_k:]] = 0
    probs = probs / probs.sum()
    before = probs[order].cumsum(0) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("vocab_size", "temperature", "top_k", "top_p", "min_p"),
    [
        (12, 1.0, 0, 1.0, 0.0),
        (12, 0.7, 5, 1.0, 0.0),
        (12, 1.3, 0, 0.8, 0.0),
        (12, 1.0, 0, 1.0, 0.2),
        (12, 1.5, 6, 0.7, 0.05),
        (12, 1.0, 1, 1.0, 0.0),
        (300, 1.0, 0, 1.0, 0.0),  # more than one mass block
        (300, 2.0, 100, 1.0, 0.0),  # more than the first candidates
        (300, 2.0, 0, 0.95, 0.0),
        (300, 2.0, 0, 0.95, 0.001),
        (300, 3.0, 150, 0.9, 0.001),
    ],
)
def test_draws_follow_the_filtered_softmax(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square over 30,000 draws of one request at 30,000 positions. A fixed seed, so the verdict is fixed too."""
    seed = 11
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.5
    num_rows, num_rounds = 1000, 30
    rows = Rows(vocab_size, num_rows=num_rows)
    for row in range(num_rows):
        rows.open(row, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    all_rows = np.arange(num_rows)
    for round_ in range(num_rounds):
        batch = rows.table.gather(all_rows, 1 + round_ * num_rows + all_rows)
        counts += torch.bincount(Sampler()(logits.repeat(num_rows, 1), batch).token_ids, minlength=vocab_size)
    probs = expected(logits, temperature, top_k, top_p, min_p)
    assert counts[probs == 0].sum() == 0
    wanted = probs * counts.sum()
    pooled = wanted < 8  # too rare for the chi-square's normal approximation: one cell for all of them
    observed = torch.cat([counts[~pooled].double(), counts[pooled].sum().double().reshape(1)])
    wanted = torch.cat([wanted[~pooled], wanted[pooled].sum().reshape(1)])
    used = wanted > 0
    chi_square = ((observed[used] - wanted[used]) ** 2 / wanted[used]).sum().item()
    freedom = int(used.sum()) - 1
    # Mean `freedom`, variance 2 * freedom: five standard deviations.
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom), (seed, chi_square, freedom)


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in (
        uniforms(np.zeros(100_000, np.uint64), np.arange(100_000)),
        uniforms(np.arange(100_000, dtype=np.uint64), np.full(100_000, 5)),
    ):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.bincount((numbers * 50).astype(int), minlength=50)
        assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * math.sqrt(98)
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_seeds_differ_in_their_draws_and_a_seed_may_be_negative() -> None:
    rows = Rows(1000)
    for row, seed in enumerate([0, 1, -1, 2**63 - 1]):
        rows.open(row, seed=seed)
    assert len(set(rows.sample(torch.zeros(4, 1000)).token_ids.values())) == 4


def test_equal_logits_at_the_cut_are_kept_by_the_lower_id() -> None:
    """topk's own choice among equals is unspecified; here 200 equal logits straddle every candidate step."""
    logits = torch.full((1, 5000), -1.0)
    logits[0, 100:300] = 2.0
    rows = Rows(5000)
    for row in range(50):
        rows.open(row, seed=row, top_k=3)
    drawn = set(rows.sample(logits.expand(50, -1)).token_ids.values())
    assert drawn == {100, 101, 102}
    values, ids = top_tokens(logits, block_maxima(logits), 70)
    assert ids[0].tolist() == list(range(100, 170)) and (values == 2.0).all()


@pytest.mark.parametrize(
    ("asked", "kept"), [({"top_p": 0.5}, {0, 1}), ({"min_p": 1.0}, {0, 1, 2, 3}), ({"top_k": 1}, {0})]
)
def test_a_limit_that_is_met_exactly_is_met(asked: dict[str, Any], kept: set[int]) -> None:
    """Four tokens of a quarter each: two of them are half of the mass, each is as likely as the likeliest."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -math.inf]])
    rows = Rows(5)
    for row in range(60):
        rows.open(row, seed=row, **asked)
    assert set(rows.sample(logits.expand(60, -1)).token_ids.values()) == kept


# --- rows are independent

MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.01},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.95},
    {"temperature": 1.0, "logprobs": 7},
    {"temperature": 1.0, "logprobs": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 0, "logit_bias": {3: 4.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 5, 9, 4000]},
    {"temperature": 1.0, "top_p": 0.99},
    {"temperature": 0.5},
]


@pytest.mark.parametrize("vocab_size", [5003, 33_000])
def test_a_row_is_the_same_alone_in_any_company_and_in_any_order(vocab_size: int) -> None:
    """B108, B109: tokens and log-probabilities, bitwise. The larger vocabulary is past torch's grain size, where a
    lone row's sum would be split over threads."""
    print("seed 5")
    logits = torch.randn(len(MIXED), vocab_size, generator=torch.Generator().manual_seed(5))
    rows = Rows(vocab_size)
    for row, sampling in enumerate(MIXED):
        rows.open(row, prompt=[1, 2, 3], output=[row, 5], seed=100 + row, **sampling)
    together = rows.sample(logits)
    shuffled = [7, 2, 11, 0, 6, 3]
    partial = rows.sample(logits[shuffled], shuffled)
    for row in range(len(MIXED)):
        alone = rows.sample(logits[row : row + 1], [row])
        assert alone.token_ids[row] == together.token_ids[row]
        for other in (alone, partial):
            if row in other.logprobs:
                assert (other.logprobs[row].logprobs == together.logprobs[row].logprobs).all()
                assert (other.logprobs[row].token_ids == together.logprobs[row].token_ids).all()
                assert other.logprobs[row].rank == together.logprobs[row].rank
    assert {row: together.token_ids[row] for row in shuffled} == partial.token_ids
    assert set(together.logprobs) == {6, 7, 8}


def test_a_masses_sum_is_bitwise_the_same_in_any_batch() -> None:
    logits = torch.randn(8, 100_001, generator=torch.Generator().manual_seed(1))
    peak = logits.amax(1, keepdim=True)
    together = RowMass(logits, peak).total
    for row in range(8):
        alone = slice(row, row + 1)
        assert RowMass(logits[alone], peak[alone]).total.item() == together[row].item()


def test_a_reopened_row_draws_what_it_would_have_drawn() -> None:
    """Preemption: the row closes and opens elsewhere with the tokens known so far."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    rows = Rows(500)
    settings: dict[str, Any] = {"prompt": [1, 2], "seed": 9, "frequency_penalty": 1.0, "temperature": 3.0}
    rows.open(0, output=[4, 4, 7], **settings)
    before = rows.sample(logits, [0]).token_ids[0]
    rows.table.close(0)
    rows.open(5, output=[4, 4, 7], **settings)
    assert rows.sample(logits, [5]).token_ids[5] == before


# --- processors, by hand


def test_penalties_follow_the_formulas() -> None:
    """Prompt [0, 1], output [1, 2, 2]: repetition divides positive logits of 0, 1, 2 and multiplies negative ones;
    frequency counts the output, presence marks it."""
    rows = Rows(4)
    rows.open(
        temperature=0.0,
        prompt=[0, 1],
        output=[1, 2, 2],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    batch = rows.table.gather(np.array([0]), np.array([5]))
    logits = torch.tensor([[4.0, -1.0, 3.0, 1.0]])
    for _ in range(2):  # twice: nothing is left behind by the first
        processed = logits.clone()
        for processor, selected in batch.processors:
            processor.apply(processed, selected)
        # 4/2; -1*2 - 0.5 - 0.25; 3/2 - 2*0.5 - 0.25; untouched
        assert processed.tolist() == [[2.0, -2.75, 0.25, 1.0]]


def test_penalties_see_only_the_tokens_before_the_position() -> None:
    """The rest of a row of the request table is not this request's."""
    rows = Rows(3)
    rows.open(temperature=0.0, prompt=[0], output=[1], presence_penalty=2.0)
    rows.token_ids[0, 2:] = 2
    assert rows.sample(torch.tensor([[0.0, 2.5, 1.0]])).token_ids[0] == 2


def test_logit_bias_is_added() -> None:
    assert greedy_token([1.0, 0.0, 0.5], logit_bias={1: 2.0, 0: -1.0}) == 1


def test_only_allowed_tokens_are_chosen() -> None:
    assert greedy_token([9.0, 1.0, 2.0, 3.0], allowed_token_ids=[1, 2, 2]) == 2


def test_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    logits = [0.0, 1.0, 3.0, 2.0]
    assert greedy_token(logits, prompt=[0, 0], min_tokens=2, stops=[2, 3, 99]) == 1
    assert greedy_token(logits, prompt=[0, 0], output=[1], min_tokens=2, stops=[2, 3]) == 1
    assert greedy_token(logits, prompt=[0, 0], output=[1, 1], min_tokens=2, stops=[2, 3]) == 2


def test_bad_words_mask_the_token_that_would_complete_them() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    assert greedy_token(logits, bad_words=[[3]]) == 2
    assert greedy_token(logits, bad_words=[[1, 2, 3], [2], [99], []], output=[0, 1, 2]) == 1
    assert greedy_token(logits, bad_words=[[1, 2, 3]], output=[2, 1]) == 3
    assert greedy_token(logits, bad_words=[[1, 3]], output=[0, 0, 1]) == 2
    # The prompt's tokens are no part of the output.
    assert greedy_token(logits, bad_words=[[1, 3]], prompt=[1], output=[]) == 3


def test_a_closed_row_leaves_nothing_to_the_next_request() -> None:
    rows = Rows(3)
    rows.open(temperature=0.0, logit_bias={2: 50.0}, bad_words=[[1]], allowed_token_ids=[2], logprobs=1)
    assert rows.sample(torch.tensor([[0.0, 1.0, 0.5]])).token_ids[0] == 2
    rows.table.close(0)
    rows.open(temperature=0.0)
    output = rows.sample(torch.tensor([[0.0, 1.0, 0.5]]))
    assert output.token_ids[0] == 1 and output.logprobs == {}


def test_a_grammar_mask_forbids_tokens() -> None:
    rows = Rows(3)
    rows.open(0, temperature=0.0, logprobs=1)
    rows.open(1, top_k=2)
    masks = torch.tensor([[True, True, False], [False, False, True]])
    output = rows.sample(torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 0.0]]), masks=masks)
    assert output.token_ids == {0: 1, 1: 2}
    assert output.logprobs[0].rank == 2  # of the model's own logits


def test_a_step_in_which_no_row_samples_gives_no_token() -> None:
    """A step of prompt chunks alone."""
    rows = Rows(100)
    rows.open(0)
    no_rows = np.zeros(0, dtype=np.int64)
    sampled = Sampler()(torch.zeros(0, 100), rows.table.gather(no_rows, no_rows))
    output = StepOutput(step_id=0)
    sampled.report(no_rows, output)
    assert sampled.token_ids.shape == (0,) and output.token_ids == {} and output.failures == {}


# --- failures


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}])
def test_a_row_without_finite_logits_fails_alone(sampling: dict[str, Any]) -> None:
    logits = torch.zeros(5, 100)
    logits[0, 50] = math.nan
    logits[1] = -INF
    logits[2, 3] = INF
    logits[3] = math.nan
    logits[4, 60] = 100.0
    rows = Rows(100)
    for row in range(5):
        rows.open(row, logprobs=2, **sampling)
    output = rows.sample(logits)
    assert output.token_ids == {4: 60} and set(output.logprobs) == {4}
    assert set(output.failures) == {0, 1, 2, 3}
    assert "not finite (nan)" in output.failures[0] and "no token is left" in output.failures[1]
    assert "not finite (inf)" in output.failures[2]
    raw = rows.raw_sample(logits).token_ids
    assert ((raw >= 0) & (raw < 100)).all(), "a failed row's token may reach a step in flight: it must be a token"


# --- log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_log_softmax_of_the_raw_logits(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 777, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    rows = Rows(777)
    for row in range(5):
        # Bias and temperature change the choice, not what is reported.
        rows.open(row, temperature=1.5, top_k=10, logit_bias={7: 3.0}, logprobs=row if row != 3 else None)
    output = rows.sample(logits)
    assert set(output.logprobs) == {0, 1, 2, 4}
    for row, entry in output.logprobs.items():
        reference = torch.log_softmax(logits[row].double(), -1)
        assert len(entry.token_ids) == 1 + row and entry.token_ids[0] == output.token_ids[row]
        np.testing.assert_allclose(entry.logprobs, reference[torch.from_numpy(entry.token_ids)], atol=1e-5)
        order = torch.sort(reference, descending=True, stable=True).indices.tolist()
        assert entry.token_ids[1:].tolist() == order[:row]
        assert entry.rank == order.index(output.token_ids[row]) + 1


def test_more_prompt_positions_than_are_worked_on_at_a_time_are_all_reported() -> None:
    logits = torch.randn(70, 90, generator=torch.Generator().manual_seed(4))
    token_ids = torch.arange(70)
    result = token_logprobs(logits, token_ids, 200)  # more candidates than tokens: all of them
    assert result.token_ids.shape == (70, 91)
    reference = torch.log_softmax(logits, -1)
    torch.testing.assert_close(result.logprobs, reference.gather(1, result.token_ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, INF, -3, 1e308, "x", True])
def test_impossible_sampling_parameters_never_reach_the_sampler(name: str, value: Any) -> None:
    """B115: range checks that NaN passes."""
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_a_top_k_beyond_the_vocabulary_keeps_every_token() -> None:
    """B115: top_k of 0, -1 and more than the vocabulary all mean no limit."""
    drawn = []
    for top_k in (0, -1, 101):
        rows = Rows(100)
        for row in range(64):
            rows.open(row, seed=row, top_k=top_k)
        drawn.append(rows.sample(torch.zeros(64, 100)).token_ids)
    assert drawn[0] == drawn[1] == drawn[2]
