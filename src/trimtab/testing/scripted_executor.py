"""A fake model over a fake paged KV memory: the oracle for scheduling.

Every position's value is a hash of its token, its position and all values it attends to, read through the row's block
tables from what earlier plans really wrote. The next token is that value modulo the vocabulary. So a wrong block table,
a stale or shared block, a missing write or a wrong prefix hit raises or changes the tokens; a correct schedule gives
each request the tokens of `solo_tokens`, whatever its batch mates, chunks, hits and preemptions were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.engine.block_pool import NULL_BLOCK
from trimtab.experts.routed_experts import RoutedExpertsLayout
from trimtab.plan import KVCacheConfig, OpenRow, ScheduledRow, StepOutput, StepPlan, TokenLogprobs
from trimtab.testing.scripted_routes import ScriptedRoutes


def _value(token_id: int, position: int, attended: Iterable[tuple[int, ...]]) -> int:
    return hash((token_id, position, *attended))  # of ints only: the same in every process


def _next_token(value: int, vocab_size: int, banned: Iterable[int]) -> int:
    token = value % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def _fake_logprobs(value: int, token_id: int, count: int, vocab_size: int) -> TokenLogprobs:
    """The chosen token first, then `count` candidates; any numbers do, as long as they depend on the context."""
    ids = [token_id, *((token_id + step) % vocab_size for step in range(count))]
    scores = [-((value >> 8) % 1000) / 1000 - max(place - 1, 0) for place in range(count + 1)]
    return TokenLogprobs(np.array(ids, dtype=np.int64), np.array(scores, dtype=np.float32), rank=1)


def solo_tokens(
    prompt: list[int],
    num_tokens: int,
    *,
    vocab_size: int,
    windows: tuple[int | None, ...] = (None,),
    seed: int = 0,
    stop_token_ids: Iterable[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What the fake model gives to a request that runs alone, without any cache."""
    stop, tokens = set(stop_token_ids), list(prompt)
    values: list[int] = []
    while len(tokens) - len(prompt) < num_tokens:
        for position in range(len(values), len(tokens)):
            attended = [tuple(values[0 if w is None else max(position - w + 1, 0) : position]) for w in windows]
            values.append(_value(tokens[position], position, attended))
        num_output = len(tokens) - len(prompt)
        token = _next_token(values[-1] + seed, vocab_size, stop if num_output < min_tokens else ())
        tokens.append(token)
        if token in stop:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Row:
    opened: OpenRow
    tokens: list[int | None]
    next_position: int | None = None
    block_tables: list[list[int]] = field(default_factory=list)


class _PendingStep:
    def __init__(self, executor: ScriptedExecutor, outputs: list[StepOutput]) -> None:
        self.executor, self.outputs = executor, outputs

    def get(self) -> list[StepOutput]:
        assert self.executor.in_flight[0] is self, "outputs are taken in launch order, each once"
        self.executor.in_flight.popleft()
        return self.outputs

    def wait(self, timeout_s: float) -> bool:
        return True


class ScriptedExecutor:
    """An `Executor` that runs a `ScriptedRunner` per rank at launch and hands the tokens out on `get`."""

    def __init__(self, kv_cache: KVCacheConfig, *, num_ranks: int = 1, **options: Any) -> None:
        self.ranks = [ScriptedRunner(kv_cache, **options) for _ in range(num_ranks)]
        self.in_flight: deque[_PendingStep] = deque()
        self.max_in_flight = 0
        self.is_shut_down = False

    @property
    def num_computed_tokens(self) -> int:
        return sum(rank.num_computed_tokens for rank in self.ranks)

    def execute(self, plans: list[StepPlan]) -> _PendingStep:
        assert len({plan.step_id for plan in plans}) == 1, "the ranks are sent to different steps"
        outputs = []
        for rank, plan in zip(self.ranks, plans, strict=True):
            rank.execute(plan)
            outputs.append(rank.sample().get())
        pending = _PendingStep(self, outputs)
        self.in_flight.append(pending)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        return pending

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True


class _PendingOutput:
    def __init__(self, output: StepOutput) -> None:
        self.output = output

    def get(self) -> StepOutput:
        return self.output


class ScriptedRunner:
    """One rank's fake model.

    `fail_row(step_id, request_id)` gives a reason to fail that row, or None; `raise_at_step` breaks the whole step.
    With `routed_experts` tokens choose experts, which a step for which `drop_routes(step_id)` holds does not report.
    """

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        *,
        vocab_size: int = 97,
        fail_row: Callable[[int, str], str | None] | None = None,
        raise_at_step: int | None = None,
        script: Callable[[OpenRow, int], int] | None = None,
        routed_experts: RoutedExpertsLayout | None = None,
        drop_routes: Callable[[int], bool] | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.routes_gid = next((gid for gid, group in enumerate(kv_cache.groups) if group.window is None), 0)
        self.vocab_size = vocab_size
        self.fail_row = fail_row or (lambda step_id, request_id: None)
        self.raise_at_step = raise_at_step
        self.script = script  # (row, number of output tokens so far) -> token, in place of the hash
        self.routes = None if routed_experts is None else ScriptedRoutes(routed_experts)
        self.drop_routes = drop_routes or (lambda step_id: False)
        self.plans: list[StepPlan] = []
        self.num_forwards = 0
        self.rows: dict[int, _Row] = {}
        self._outputs: deque[StepOutput] = deque()
        # block -> slot -> (group, position, value); a block handed out again still holds what the last owner wrote
        self._memory: dict[int, list[tuple[int, int, int] | None]] = {}

    @property
    def num_computed_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)

    def execute(self, plan: StepPlan) -> None:
        if plan.step_id == self.raise_at_step:
            raise RuntimeError(f"the scripted model breaks at step {plan.step_id}")
        assert plan.step_id == len(self.plans), f"step {plan.step_id} comes after {len(self.plans)} steps"
        self.plans.append(plan)
        for row in plan.close_rows:
            del self.rows[row]
        for opened in plan.open_rows:
            assert opened.row not in self.rows, f"row {opened.row} is opened while it is in use"
            tables: list[list[int]] = [[] for _ in self.kv_cache.groups]
            self.rows[opened.row] = _Row(opened, list(opened.token_ids), None, tables)
        assert plan.runs_forward or not plan.scheduled, "rows are scheduled in a step that computes nothing"
        self.num_forwards += plan.runs_forward
        rows = [scheduled.row for scheduled in plan.scheduled]
        assert len(set(rows)) == len(rows), f"a row is scheduled twice in step {plan.step_id}"
        output = StepOutput(plan.step_id)
        for scheduled in plan.scheduled:
            self._run_row(plan.step_id, scheduled, output)
        if self.routes is not None:
            routed = self.routes.take()
            output.routed_experts = None if self.drop_routes(plan.step_id) else routed
        self._outputs.append(output)

    def sample(self) -> _PendingOutput:
        return _PendingOutput(self._outputs.popleft())

    def _run_row(self, step_id: int, scheduled: ScheduledRow, output: StepOutput) -> None:
        row = self.rows[scheduled.row]
        assert scheduled.num_tokens > 0, "a scheduled row computes at least one token"
        assert row.next_position in (None, scheduled.start), f"row {scheduled.row} skips or repeats positions"
        for table, blocks in zip(row.block_tables, scheduled.new_block_ids, strict=True):
            table.extend(blocks)
        end = scheduled.start + scheduled.num_tokens
        values = [self._compute(row, position) for position in range(scheduled.start, end)]
        row.next_position = end
        if self.routes is not None:
            size, table = self.kv_cache.block_size, row.block_tables[self.routes_gid]
            slots = [table[position // size] * size + position % size for position in range(end)]
            self.routes.compute(row.opened.request_id, scheduled.start, slots)
        if (reason := self.fail_row(step_id, row.opened.request_id)) is not None:
            output.failures[scheduled.row] = reason
            row.tokens.extend([0] * scheduled.samples)  # an overrun step in flight may still name it
            return
        sampling = row.opened.sampling
        if sampling.prompt_logprobs is not None:
            output.prompt_logprobs[scheduled.row] = [
                _fake_logprobs(value, row.opened.token_ids[position + 1], sampling.prompt_logprobs, self.vocab_size)
                for position, value in enumerate(values, scheduled.start)
                if position + 1 < row.opened.num_prompt_tokens
            ]
        at_end = row.next_position == len(row.tokens)
        assert scheduled.samples == at_end, "a row samples exactly when all its tokens are computed"
        if at_end:
            token = self._sample(row, values[-1])
            row.tokens.append(token)
            output.token_ids[scheduled.row] = token
            if sampling.logprobs is not None:
                output.logprobs[scheduled.row] = _fake_logprobs(values[-1], token, sampling.logprobs, self.vocab_size)

    def _sample(self, row: _Row, value: int) -> int:
        num_output = len(row.tokens) - row.opened.num_prompt_tokens
        if self.script is not None:
            return self.script(row.opened, num_output)
        banned = row.opened.stop_token_ids if num_output < row.opened.sampling.min_tokens else ()
        return _next_token(value + row.opened.seed, self.vocab_size, banned)

    def _compute(self, row: _Row, position: int) -> int:
        token = row.tokens[position]
        assert token is not None, f"position {position} has no token"
        attended = []
        for group, spec in enumerate(self.kv_cache.groups):
            first = 0 if spec.window is None else max(position - spec.window + 1, 0)
            attended.append(tuple(self._read(row, group, earlier) for earlier in range(first, position)))
        value = _value(token, position, attended)
        for group in range(len(self.kv_cache.groups)):
            slots, offset = self._slots(row, group, position)
            slots[offset] = (group, position, value)
        return value

    def _read(self, row: _Row, group: int, position: int) -> int:
        slots, offset = self._slots(row, group, position)
        held = slots[offset]
        assert held is not None, f"position {position} of group {group} is read and was never written"
        assert held[:2] == (group, position), f"position {position} of group {group} reads what {held[:2]} wrote"
        return held[2]

    def _slots(self, row: _Row, group: int, position: int) -> tuple[list[tuple[int, int, int] | None], int]:
        index, offset = divmod(position, self.kv_cache.block_size)
        block = row.block_tables[group][index]
        assert NULL_BLOCK < block < self.kv_cache.num_blocks, f"position {position} lies in block {block}"
        return self._memory.setdefault(block, [None] * self.kv_cache.block_size), offset
