"""The benchmark's arithmetic, on an engine whose steps are scripted and a clock that is not real."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import trimtab.cli.bench as bench
from trimtab.cli.bench import measure, offline, percentile, random_prompts, timed_run
from trimtab.cli.options import EngineOptions
from trimtab.outputs import CompletionOutput, RequestOutput


class SlowEngine:
    """Reads one prompt per step (2 s each), then gives every request a token per step (1 s each)."""

    def __init__(self, clock, fail: bool = False, one_by_one: bool = False):
        self.clock, self.fail, self.one_by_one = clock, fail, one_by_one
        self.waiting, self.running, self.tokens = [], [], {}
        self.max_tokens = 0
        self.is_warming_up = False
        self.answers = []  # (while warming up, tokens asked for) of each request

    @contextmanager
    def warm_up(self):
        self.is_warming_up = True
        yield
        self.is_warming_up = False

    @property
    def has_unfinished(self):
        return bool(self.waiting or self.running)

    def add_request(self, request_id, prompt, sampling):
        self.waiting.append(request_id)
        self.max_tokens = sampling.max_tokens
        self.answers.append((self.is_warming_up, self.max_tokens))

    def step(self):
        if self.waiting and not (self.one_by_one and self.running):
            self.clock.now += 2
            moved = [self.waiting.pop(0)]
            self.running += moved
        else:
            self.clock.now += 1
            moved = list(self.running)
        outputs = []
        for request_id in moved:
            self.tokens[request_id] = self.tokens.get(request_id, 0) + 1
            done = self.tokens[request_id] == self.max_tokens
            if done:
                self.running.remove(request_id)
            completion = CompletionOutput(0, "", [1] * self.tokens[request_id])
            error = "broken" if self.fail else None
            outputs.append(RequestOutput(request_id, None, [], [completion], finished=done, error=error))
        return outputs


@pytest.fixture
def clock(monkeypatch):
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: fake.now)
    return fake


def test_percentiles_are_values_that_were_measured():
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 95, 99)] == [50, 95, 99]
    assert percentile([3.0], 99) == 3
    assert percentile([2.0, 1.0], 50) == 1


def test_prefill_ends_with_the_last_first_token_and_full_steps_are_decode(clock):
    run = timed_run(SlowEngine(clock), [[1] * 10] * 3, output_len=5, label="x")
    assert (run.first_token_s, run.prefill_s) == (2, 6)
    assert run.decode_step_s == [1, 1, 1, 1]


def test_rates_count_prompt_tokens_over_prefill_and_new_tokens_over_decode(clock):
    result = measure(SlowEngine(clock), batch_size=3, input_len=10, output_len=5, repetitions=2, vocab_size=50)
    assert result.prefill_tokens_per_s == 30 / 6
    assert result.decode_tokens_per_s == 3
    assert result.step_ms == {"p50": 1000, "p95": 1000, "p99": 1000}
    assert result.num_steps == 8  # two measured runs; the warm-up is not among them


def test_the_run_that_warms_up_is_short_and_no_load_and_progress_is_told_by_run(clock):
    engine, told = SlowEngine(clock), []
    measure(
        engine, batch_size=1, input_len=10, output_len=6, repetitions=2, vocab_size=50,
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )  # fmt: skip
    assert engine.answers == [(True, 4), (False, 6), (False, 6)]
    assert told == [
        ("batch 1, warming up", 0, 3),
        ("batch 1, run 1 of 2", 1, 3),
        ("batch 1, run 2 of 2", 2, 3),
    ]


def test_a_request_that_fails_ends_the_benchmark_with_its_reason(clock):
    with pytest.raises(ValueError, match="x-0 failed: broken"):
        timed_run(SlowEngine(clock, fail=True), [[1]], output_len=5, label="x")


def test_answers_that_end_before_all_prompts_are_read_leave_nothing_to_measure(clock):
    with pytest.raises(ValueError, match=r"output_len \(2\) ends answers before the last of 3 prompts is read"):
        measure(
            SlowEngine(clock, one_by_one=True),
            batch_size=3,
            input_len=10,
            output_len=2,
            repetitions=1,
            vocab_size=50,
        )


def test_prompts_are_the_same_for_the_same_seed_and_inside_the_vocabulary():
    import random

    first, again = (random_prompts(random.Random(3), 2, 20, vocab_size=9) for _ in range(2))
    assert first == again
    assert {len(prompt) for prompt in first} == {20}
    assert all(5 <= token < 9 for prompt in first for token in prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": "1,x"}, r"batch_sizes \('1,x'\) must be whole numbers"),
        ({"batch_sizes": "0"}, "batch_sizes"),
        ({"output_len": 1}, r"output_len \(1\) must be at least 2"),
        ({"input_len": 0}, "input_len"),
        ({"repetitions": 0}, "repetitions"),
        (
            {"batch_sizes": "1,8", "engine": EngineOptions(max_num_seqs=4)},
            r"max_num_seqs \(4\) must be at least 8, the largest of batch_sizes; raise it",
        ),
    ],
)
def test_impossible_settings_are_refused_before_the_model_is_opened(options, message):
    with pytest.raises(ValueError, match=message):
        offline(model="/nowhere", **options)
