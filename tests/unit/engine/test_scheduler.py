"""Plans: who runs, with how many tokens, who gives way, and what is known while steps are in flight."""

from __future__ import annotations

import itertools

from trimtab.engine.config import SchedulerConfig
from trimtab.engine.kv_cache import KVCacheAllocator
from trimtab.engine.request import Request, RequestStatus, spawn
from trimtab.engine.scheduler import Scheduler
from trimtab.plan import StepOutput, StepPlan
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import check_accounts, make_kv_cache

STEP_IDS = itertools.count()


def make_scheduler(num_blocks: int = 40, windows: tuple[int | None, ...] = (None,), **limits: int) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 32, **limits})  # type: ignore[arg-type]
    kv_cache = make_kv_cache(num_blocks, 4, windows)
    return Scheduler(config, KVCacheAllocator(kv_cache, max_step_tokens=config.max_num_batched_tokens))


def add(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int = 8, **fields: object) -> Request:
    start = 100 * scheduler._arrivals
    sampling = SamplingParams(max_tokens=max_tokens)
    prompt = list(range(start, start + num_prompt))
    request = Request(name, prompt, sampling, seed=0, max_total_tokens=num_prompt + max_tokens, **fields)  # type: ignore[arg-type]
    scheduler.add(request)
    return request


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(next(STEP_IDS))
    check_accounts(scheduler)
    assert plan is not None
    return plan


def arrive(scheduler: Scheduler, plan: StepPlan, token_id: int = 7) -> list[str]:
    """The plan's output comes, `token_id` for each row that samples; the names of requests it moved."""
    output = StepOutput(plan.step_id, {row.row: token_id for row in plan.scheduled if row.samples})
    progress = scheduler.advance(plan, output)
    check_accounts(scheduler)
    return [part.request.request_id for part in progress]


def shares(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(row.row, row.start, row.num_tokens, row.samples) for row in plan.scheduled]


def test_prompt_is_prefilled_in_chunks_of_what_the_budget_leaves() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    add(scheduler, "b", 9)
    assert shares(plan_of(scheduler)) == [(0, 0, 5, True), (1, 0, 3, False)]
    assert shares(plan_of(scheduler)) == [(0, 5, 1, True), (1, 3, 6, True)]


def test_decode_goes_on_while_its_last_token_is_unseen() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert shares(second) == [(0, 3, 1, True)] and request.num_output_tokens == 0
    arrive(scheduler, first)
    arrive(scheduler, second)
    assert request.token_ids[3:] == [7, 7]


def test_length_known_in_advance_causes_no_overrun_step() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, max_tokens=2)
    plans = [plan_of(scheduler), plan_of(scheduler)]
    assert scheduler.schedule(next(STEP_IDS)) is None
    for plan in plans:
        arrive(scheduler, plan)
    assert request.finish_reason == "length" and len(request.token_ids) == 5


def test_overrun_row_is_dropped_and_its_position_never_published() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 7, eos_token_ids=frozenset({7}))
    first, second = plan_of(scheduler), plan_of(scheduler)  # position 7, the overrun, would fill block 1
    assert arrive(scheduler, first) == ["a"] and request.finish_reason == "stop"
    published = scheduler.allocator.pool.num_cached
    assert arrive(scheduler, second) == []
    assert scheduler.allocator.pool.num_cached == published == 1
    assert request.token_ids[7:] == [7]


def test_row_of_a_finished_request_is_closed_by_the_plan_that_opens_it_anew() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", 3, max_tokens=1)
    add(scheduler, "b", 3, max_tokens=1)
    first = plan_of(scheduler)
    arrive(scheduler, first)
    second = plan_of(scheduler)
    assert second.close_rows == [0] and [opened.request_id for opened in second.open_rows] == ["b"]


def test_latest_arrival_gives_way_and_comes_back_with_all_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=7, max_model_len=24)
    early = add(scheduler, "a", 4, max_tokens=16)  # 5 blocks at its end
    late = add(scheduler, "b", 4, max_tokens=12)  # 4 blocks at its end, and there are 6
    while late.status is not RequestStatus.PREEMPTED:
        arrive(scheduler, plan_of(scheduler))
    num_known = len(late.token_ids)
    assert num_known > 4 and early.num_preemptions == 0
    opened = []
    while scheduler.num_unfinished:
        plan = plan_of(scheduler)
        opened += [row.token_ids for row in plan.open_rows]
        arrive(scheduler, plan)
    assert opened == [late.token_ids[:num_known]]
    assert late.finish_reason == "length" and late.num_output_tokens == 12


def test_preempted_request_waits_for_its_steps_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=5, max_model_len=16, max_num_batched_tokens=4)
    old = add(scheduler, "a", 4, max_tokens=8)
    late = add(scheduler, "b", 4, max_tokens=8)
    plans = [plan_of(scheduler)]
    while not late.num_preemptions:
        if len(plans) == 2:
            arrive(scheduler, plans.pop(0))
        plans.append(plan_of(scheduler))
    assert late.num_in_flight == 1 and late.row is None
    scheduler.finish(old, "abort")  # all the room in the world, but its token is still on the way
    assert scheduler.schedule(next(STEP_IDS)) is None
    num_known = len(late.token_ids)
    for plan in plans:
        arrive(scheduler, plan)
    assert len(late.token_ids) == num_known + 1, "the token of the step in flight is kept"
    assert plan_of(scheduler).open_rows[0].token_ids == late.token_ids


def test_prompt_that_finds_no_room_for_all_its_tokens_waits() -> None:
    scheduler = make_scheduler(num_blocks=7)
    add(scheduler, "a", 8)
    add(scheduler, "b", 16)
    add(scheduler, "c", 1)  # first come, first served: it does not overtake
    assert len(plan_of(scheduler).open_rows) == 1
    assert plan_of(scheduler).open_rows == []


def test_blocks_that_running_requests_are_about_to_need_are_not_given_away() -> None:
    for num_blocks, num_opened in ((6, 0), (7, 1)):
        scheduler = make_scheduler(num_blocks)
        add(scheduler, "a", 4)
        arrive(scheduler, plan_of(scheduler))
        add(scheduler, "b", 12)  # needs three blocks; "a" has taken two, and one more stays free for it
        assert len(plan_of(scheduler).open_rows) == num_opened


def test_blocks_that_a_half_prefilled_prompt_still_needs_are_not_given_away() -> None:
    scheduler = make_scheduler(num_blocks=9)
    add(scheduler, "a", 21)  # six blocks, two of them in the first step
    plan_of(scheduler)
    add(scheduler, "b", 8)
    arrived = [plan_of(scheduler), plan_of(scheduler)]
    assert [plan.open_rows for plan in arrived] == [[], []]


def test_siblings_wait_for_the_first_one_s_prompt_and_share_its_blocks() -> None:
    scheduler = make_scheduler()
    first, second, third = spawn(Request("a", list(range(9)), SamplingParams(n=3), seed=2**63 - 1, max_total_tokens=12))
    for request in (first, second, third):
        scheduler.add(request)
    other = add(scheduler, "b", 1)
    plans = [plan_of(scheduler)]
    assert [opened.request_id for opened in plans[0].open_rows] == ["0_a"]
    plans.append(plan_of(scheduler))
    assert other.row is not None, "others do not wait with them"
    for plan in plans:
        arrive(scheduler, plan)
    assert [opened.request_id for opened in plan_of(scheduler).open_rows] == ["1_a", "2_a"]
    assert second.num_cached_tokens == third.num_cached_tokens == 8
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert (first.seed, second.seed, third.seed) == (2**63 - 1, -(2**63), -(2**63) + 1)


def test_failed_row_ends_its_request_only() -> None:
    scheduler = make_scheduler()
    bad, good = add(scheduler, "a", 2), add(scheduler, "b", 2)
    plan = plan_of(scheduler)
    scheduler.advance(plan, StepOutput(plan.step_id, {1: 7}, failures={0: "not finite"}))
    check_accounts(scheduler)
    assert (bad.finish_reason, bad.error) == ("error", "not finite")
    assert good.token_ids[2:] == [7] and not good.finished
