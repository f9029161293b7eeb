"""Block tables, prefix hits over groups, sliding windows, and what fits."""

from __future__ import annotations

import random

import pytest

from trimtab.engine.block_pool import NULL_BLOCK
from trimtab.engine.kv_cache import KVCacheAllocator, longest_request, peak_blocks
from trimtab.engine.request import Request
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scheduling import make_kv_cache


def make_allocator(windows: tuple[int | None, ...] = (None,), num_blocks: int = 40) -> KVCacheAllocator:
    return KVCacheAllocator(make_kv_cache(num_blocks, 4, windows), max_step_tokens=8)


def make_request(tokens: list[int], **fields: object) -> Request:
    return Request("r", tokens, SamplingParams(), seed=0, max_total_tokens=100, **fields)  # type: ignore[arg-type]


def compute(allocator: KVCacheAllocator, request: Request, num_tokens: int) -> None:
    """The next `num_tokens` positions, planned, computed and accepted."""
    assert allocator.extend(request, num_tokens) is not None
    request.num_planned += num_tokens
    request.num_computed = request.num_planned
    allocator.publish(request)


def start(allocator: KVCacheAllocator, request: Request) -> int:
    hit = allocator.find_prefix(request)
    allocator.attach(request, hit)
    return hit.num_tokens


def prefill(allocator: KVCacheAllocator, tokens: list[int], **fields: object) -> Request:
    request = make_request(tokens, **fields)
    start(allocator, request)
    while request.num_planned < len(tokens):
        compute(allocator, request, min(8, len(tokens) - request.num_planned))
    return request


def test_prompt_of_whole_blocks_recomputes_its_last_block_on_a_full_hit() -> None:
    """B103: four blocks exactly; the chain serves a longer third prompt as well."""
    allocator = make_allocator()
    prompt = list(range(16))
    allocator.release(prefill(allocator, prompt))
    second = make_request(prompt)
    assert start(allocator, second) == 12
    compute(allocator, second, 4)
    allocator.release(second)
    assert start(allocator, make_request([*prompt, 99, 98])) == 16


def test_blocks_are_shared_while_their_first_holder_still_runs() -> None:
    allocator = make_allocator()
    first = prefill(allocator, list(range(9)))
    second = make_request([*range(8), 50])
    assert start(allocator, second) == 8
    assert second.block_tables[0] == first.block_tables[0][:2]
    assert [allocator.pool.ref_counts[block] for block in second.block_tables[0]] == [2, 2]


def test_salts_keep_prefixes_apart() -> None:
    """B104: cache keys differ by salt when one is given."""
    allocator = make_allocator()
    prefill(allocator, list(range(9)), cache_salt="a")
    assert start(allocator, make_request(list(range(9)))) == 0
    assert start(allocator, make_request(list(range(9)), cache_salt="b")) == 0
    assert start(allocator, make_request(list(range(9)), cache_salt="a")) == 8


def test_new_weights_find_nothing_of_the_old_ones_even_what_is_published_later() -> None:
    allocator = make_allocator()
    old = make_request(list(range(12)))
    start(allocator, old)
    compute(allocator, old, 8)
    allocator.reset_prefix_cache(weights_version="2")
    compute(allocator, old, 4)  # half old weights, half new: published under the old name
    allocator.release(old)
    assert start(allocator, make_request([*range(12), 1])) == 0
    back = make_request([*range(12), 1])
    back.contents = old.contents  # a preempted request comes back with the names of its first residence
    assert start(allocator, back) == 0


def test_request_that_looked_nothing_up_publishes_under_the_weights_it_started_with() -> None:
    allocator = make_allocator()
    old = make_request(list(range(12)))
    old.sampling = SamplingParams(prompt_logprobs=0)
    start(allocator, old)
    allocator.extend(old, 8)
    old.num_planned = 8  # in flight with the old weights
    allocator.reset_prefix_cache(weights_version="2")
    old.num_computed = 8
    allocator.publish(old)
    assert start(allocator, make_request(list(range(12)))) == 0


def test_window_gives_back_the_blocks_it_left_behind() -> None:
    allocator = make_allocator((None, 5))
    request = prefill(allocator, list(range(16)))
    compute_decode = allocator.extend(request, 1)  # position 16 reads 12..16: blocks 3 and 4
    assert compute_decode is not None
    full, sliding = request.block_tables
    assert NULL_BLOCK not in full and len(full) == 5
    assert sliding[:3] == [NULL_BLOCK] * 3 and NULL_BLOCK not in sliding[3:]
    assert allocator.pool.num_free == 39 - 5 - 2


def test_hit_in_a_sliding_group_needs_only_the_last_window() -> None:
    allocator = make_allocator((None, 5))
    prompt = list(range(16))
    allocator.release(prefill(allocator, prompt))
    for block in list(allocator.pool._cached.values()):  # the window's old blocks are overwritten by others
        group, content = allocator.pool.contents[block]  # type: ignore[misc]
        if group == 1 and content.token_ids[0] < 8:
            allocator.pool._forget(block)
    request = make_request([*prompt, 99])
    assert start(allocator, request) == 16
    assert request.block_tables[1][:3] == [NULL_BLOCK] * 3 and request.block_tables[1][3] != NULL_BLOCK


def test_hit_shrinks_to_where_every_group_has_what_it_needs() -> None:
    allocator = make_allocator((None, 5))
    prompt = list(range(16))
    allocator.release(prefill(allocator, prompt))
    for block in list(allocator.pool._cached.values()):
        group, content = allocator.pool.contents[block]  # type: ignore[misc]
        if group == 1 and content.token_ids[0] == 12:
            allocator.pool._forget(block)
    request = make_request([*prompt, 99])
    assert start(allocator, request) == 12
    assert request.block_tables[1][:2] == [NULL_BLOCK] * 2 and len(request.block_tables[1]) == 3


def test_end_of_a_released_sequence_is_overwritten_first() -> None:
    """Its beginning is what others are likely to share."""
    allocator = make_allocator(num_blocks=5)
    allocator.release(prefill(allocator, list(range(16))))
    allocator.pool.allocate(2)
    assert start(allocator, make_request(list(range(17)))) == 8


def test_statistics_count_first_admissions_only() -> None:
    """B106: what a request finds of its own work on its way back is no hit."""
    allocator = make_allocator()
    request = prefill(allocator, list(range(12)))
    allocator.release(request)
    request.num_planned = request.num_computed = 0
    assert start(allocator, request) == 8
    assert request.num_cached_tokens == 0
    assert (allocator.stats.num_queried_tokens, allocator.stats.num_hit_tokens) == (12, 0)
    start(allocator, make_request([*range(12), 3]))
    assert allocator.stats.hit_rate == 12 / 25


def test_request_that_wants_prompt_logprobs_takes_no_hits() -> None:
    """B107"""
    allocator = make_allocator()
    prefill(allocator, list(range(12)))
    request = make_request(list(range(12)))
    request.sampling = SamplingParams(prompt_logprobs=0)
    assert start(allocator, request) == 0


def test_extend_takes_nothing_where_not_all_groups_can_be_served() -> None:
    allocator = make_allocator((None, None), num_blocks=4)
    request = make_request(list(range(8)))
    start(allocator, request)
    assert allocator.extend(request, 8) is None
    assert allocator.pool.num_free == 3 and request.block_tables == [[], []]


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5), (None, 1), (3, 9)])
def test_no_request_ever_holds_more_than_its_peak(windows: tuple[int | None, ...]) -> None:
    for seed in range(200):
        print(f"seed {seed}")
        rng = random.Random(seed)
        allocator = make_allocator(windows, num_blocks=100)
        length = rng.randint(1, 40)
        request = make_request(list(range(length)))
        start(allocator, request)
        peak = 0
        while request.num_planned < length:
            compute(allocator, request, min(rng.randint(1, 8), length - request.num_planned))
            peak = max(peak, 99 - allocator.pool.num_free)
        assert peak <= allocator.peak_blocks(length)


def test_longest_request_is_what_the_pool_can_hold() -> None:
    kv_cache = make_kv_cache(num_blocks=11, block_size=4)
    assert longest_request(kv_cache, 8, limit=1000) == 41  # 40 computed positions and a last token that is not
    assert longest_request(kv_cache, 8, limit=30) == 30
    assert longest_request(make_kv_cache(11, 4, (4,)), 8, limit=1000) == 1000  # a window needs no more with length
    assert longest_request(make_kv_cache(2, 4, (None, None)), 8, limit=1000) == 0
    assert peak_blocks(kv_cache, 40, 8) == 10
