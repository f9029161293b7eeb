"""Which requests take part in the next step, with how many tokens: continuous batching over paged KV.

First come, first served: running requests first, then waiting ones, as long as the step's token budget, the rows and
the KV blocks last. Plans may be made while earlier steps are in flight. Everything the next plan needs is known then: a
row's next position always, its token's value only to the worker, which keeps it in the row.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trimtab.engine.config import SchedulerConfig
from trimtab.engine.kv_cache import KVCacheAllocator
from trimtab.engine.request import Request, RequestStatus
from trimtab.plan import OpenRow, RoutedRows, ScheduledRow, StepOutput, StepPlan, TokenLogprobs


@dataclass(slots=True)
class Progress:
    """What one step gave one request. `token_id` is None for a chunk that ends before the prompt does."""

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_start: int = 0  # position of the first entry of prompt_logprobs' context
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True, eq=False)
class Part:
    """A request's part in a step in flight."""

    request: Request
    scheduled: ScheduledRow


class RowStore(Protocol):
    """Keeps what the tokens of a rank's requests chose; see `trimtab.engine.routed_experts`."""

    weights_version: int  # of the steps launched from now on

    @property
    def num_bytes(self) -> int: ...

    def launch(self, step_id: int, parts: Sequence[Part]) -> None: ...

    def store(self, step_id: int, routed: RoutedRows | None) -> None: ...

    def freeze(self, request: Request) -> None: ...

    def freeze_arrived(self, part: Part) -> None: ...


class NoRowStore:
    """Nobody wants to know."""

    weights_version = 0
    num_bytes = 0

    def launch(self, step_id: int, parts: Sequence[Part]) -> None:
        pass

    def store(self, step_id: int, routed: RoutedRows | None) -> None:
        pass

    def freeze(self, request: Request) -> None:
        pass

    def freeze_arrived(self, part: Part) -> None:
        pass


class Scheduler:
    """Owns the requests, their rows and, through the allocator, their KV blocks.

    1. `add` queues a request; `finish` ends one from outside (abort, stop string, error).
    2. `schedule` makes the plan of the next step, or None while there is nothing to compute.
    3. `advance` takes the output of the oldest plan in flight: accepts tokens, finds ends, publishes full blocks.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVCacheAllocator, row_store: RowStore | None = None) -> None:
        self.config = config
        self.allocator = allocator
        self.row_store = row_store or NoRowStore()
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # guarded ones first, then by arrival: the last one is preempted first
        self.num_preemptions = 0
        self._arrivals = 0
        self._free_rows = list(range(config.max_num_seqs))
        self._rows_to_close: list[int] = []
        self._launched: dict[int, list[Part]] = {}  # step id -> parts

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    def finish(
        self, request: Request, reason: str, *, stop_reason: str | None = None, error: str | None = None
    ) -> None:
        """Ends a request. Its steps in flight bring nothing any more: their rows are dropped on arrival."""
        if not request.finished:
            self._retire(request)
            request.finish(reason, stop_reason=stop_reason, error=error)

    def schedule(self, step_id: int) -> StepPlan | None:
        plan = StepPlan(step_id)
        parts: list[Part] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(plan, parts, self.config.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions:  # else the blocks just taken would go to the next in line
            self._schedule_waiting(plan, parts, budget)
        if not parts:
            return None  # rows to close stay noted for the next plan
        plan.close_rows, self._rows_to_close = self._rows_to_close, []
        self._launched[plan.step_id] = parts
        self.row_store.launch(step_id, parts)
        return plan

    def advance(self, plan: StepPlan, output: StepOutput) -> list[Progress]:
        """Takes one step's output, in the order of the plans. Requests it finishes have left the scheduler."""
        assert output.step_id == plan.step_id, f"output of step {output.step_id} taken for step {plan.step_id}"
        progress: list[Progress] = []
        self.row_store.store(plan.step_id, output.routed_experts)
        for part in self._launched.pop(plan.step_id):
            request, scheduled = part.request, part.scheduled
            request.num_in_flight -= 1
            request.num_unseen_tokens -= scheduled.samples
            if request.finished:
                continue  # its end was found, or asked for, while this step was in flight
            if (reason := output.failures.get(scheduled.row)) is not None:
                self.finish(request, "error", error=reason)
                progress.append(Progress(request))
                continue
            progress.append(self._accept(part, output))
        return progress

    # -- planning ------------------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan, parts: list[Part], budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_ready = request.num_ready
            num_tokens = min(num_ready, budget)
            if num_tokens > 0:
                new_blocks = self._extend_or_preempt(request, num_tokens)
                if new_blocks is None:
                    break  # it was the last in line and gave way itself
                self._launch(request, num_tokens, num_tokens == num_ready, new_blocks, plan, parts)
                budget -= num_tokens
            index += 1
        return budget

    def _extend_or_preempt(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        while (new_blocks := self.allocator.extend(request, num_tokens)) is None:
            victim = self.running[-1]
            assert not victim.guarded, "guarded requests were admitted as fitting together, and do not"
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _schedule_waiting(self, plan: StepPlan, parts: list[Part], budget: int) -> None:
        held_back: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if self._follows_unfinished_prefill(request):
                held_back.append(self.waiting.pop(0))
                continue
            # A preempted request's last step brings a token it must start again with.
            if request.num_in_flight or not self._admit(request):
                break
            num_ready = request.num_ready
            num_tokens = min(num_ready, budget)
            new_blocks = self.allocator.extend(request, num_tokens)
            assert new_blocks is not None, "admission counted these blocks as free"
            tables = tuple(list(table) for table in request.block_tables)  # prefix hits included: the row starts empty
            self._open_row(request, plan)
            self._launch(request, num_tokens, num_tokens == num_ready, tables, plan, parts)
            budget -= num_tokens
        self.waiting[:0] = held_back

    def _follows_unfinished_prefill(self, request: Request) -> bool:
        """Whether waiting for a sibling's prefill will save this one: the prompt has full blocks to share."""
        leader, allocator = request.leader, self.allocator
        if leader is None or leader.finished or not allocator.enable_prefix_caching:
            return False
        shared = (request.num_prompt_tokens - 1) // allocator.block_size
        return shared > 0 and leader.num_output_tokens == 0 and request.sampling.prompt_logprobs is None

    def _admit(self, request: Request) -> bool:
        """Takes the request off the queue if all its known tokens find room beside what the running ones still need.

        Half-admitted prompts would only preempt each other. One block per running request and group stays free for
        their next tokens.
        """
        allocator = self.allocator
        room = allocator.pool.num_free - len(self.running) * allocator.num_groups
        for other in self.running:
            if other.num_planned < len(other.token_ids):
                room -= allocator.num_blocks_outstanding(other, len(other.token_ids))
        if self.running and room <= 0:
            return False
        hit = allocator.find_prefix(request)
        guarded = request.num_preemptions >= self.config.max_preemptions
        if self.running and (
            allocator.num_blocks_to_admit(hit, request.num_tokens) > room
            or (guarded and not self._fits_for_life(request))
        ):
            return False
        self.waiting.pop(0)
        request.guarded = guarded
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_s is None:
            request.first_scheduled_s = time.monotonic()
        allocator.attach(request, hit)
        insort(self.running, request, key=_rank)
        return True

    def _fits_for_life(self, request: Request) -> bool:
        """Whether this and all running requests can run to their longest possible ends together.

        The guarded ones among them then never lack blocks: all others can be preempted, and these fit. So the number
        of a request's preemptions is bounded (B102).
        """
        life = sum(self.allocator.peak_blocks(r.max_total_tokens - 1) for r in (*self.running, request))
        return life <= self.allocator.pool.num_blocks - 1

    def _open_row(self, request: Request, plan: StepPlan) -> None:
        # A row closed by this plan is free before the plan opens rows.
        request.row = heapq.heappop(self._free_rows)
        plan.open_rows.append(
            OpenRow(
                row=request.row,
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                seed=request.seed,
                stop_token_ids=request.stop_token_ids,
                bad_word_token_ids=request.bad_word_token_ids,
            )
        )

    def _launch(
        self,
        request: Request,
        num_tokens: int,
        samples: bool,
        new_blocks: tuple[list[int], ...],
        plan: StepPlan,
        parts: list[Part],
    ) -> None:
        assert request.row is not None, f"request {request.request_id} runs without a row"
        scheduled = ScheduledRow(request.row, request.num_planned, num_tokens, samples, new_blocks)
        plan.scheduled.append(scheduled)
        parts.append(Part(request, scheduled))
        request.num_planned += num_tokens
        request.num_unseen_tokens += samples
        request.num_in_flight += 1

    # -- results and ends ----------------------------------------------------------------------------------------------

    def _accept(self, part: Part, output: StepOutput) -> Progress:
        request, scheduled = part.request, part.scheduled
        if request.status is RequestStatus.RUNNING:
            # Preempted meanwhile, it holds no blocks; it takes new ones only when none of its steps is in flight.
            # All tokens before this position are accepted: a block that is full now holds what its hash will say.
            request.num_computed = scheduled.start + scheduled.num_tokens
            self.allocator.publish(request)
        else:
            self.row_store.freeze_arrived(part)
        progress = Progress(request, prompt_start=scheduled.start)
        progress.prompt_logprobs = output.prompt_logprobs.get(scheduled.row)
        if scheduled.samples:
            progress.token_id = output.token_ids[scheduled.row]
            progress.logprobs = output.logprobs.get(scheduled.row)
            request.accept(progress.token_id)
            if request.finished:
                self._retire(request)
        return progress

    def _preempt(self, request: Request) -> None:
        """Takes row and blocks away; the request computes its tokens again when it comes back."""
        self._retire(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=lambda r: r.arrival)

    def _retire(self, request: Request) -> None:
        """Removes a request from where it stands and gives back its row and its blocks, steps in flight or not.

        Safe because steps execute in the order of their plans: the row is closed, and the blocks are written by someone
        else, in a later plan than any that still uses them.
        """
        if request.row is None:
            if request in self.waiting:
                self.waiting.remove(request)
            return
        self.running.remove(request)
        self.row_store.freeze(request)
        self.allocator.release(request)
        self._rows_to_close.append(request.row)
        heapq.heappush(self._free_rows, request.row)
        request.row = None
        request.num_planned = request.num_computed = 0


def _rank(request: Request) -> tuple[bool, int]:
    return (not request.guarded, request.arrival)
