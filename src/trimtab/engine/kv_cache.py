"""Who holds which KV blocks: block tables per request and KV cache group, prefix hits, sliding windows. No tensors.

Blocks given back while steps are in flight may be handed out by the very next plan: steps execute in the order of their
plans, so whatever a step in flight still reads or writes there is done before a later step touches the block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from trimtab.engine.block_pool import NULL_BLOCK, BlockContent, BlockPool, ContentNamer, KeyFunction
from trimtab.engine.request import Request
from trimtab.plan import KVCacheConfig


@dataclass(slots=True)
class PrefixHit:
    """The longest cached prefix of a request: whole blocks, and per group the block table that stands for them."""

    num_tokens: int = 0
    block_tables: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and tokens found at requests' first admissions. What a preempted request finds of its own work
    on its way back counts as neither (B106)."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


def peak_blocks(kv_cache: KVCacheConfig, num_positions: int, max_step_tokens: int) -> int:
    """The most blocks a request of that many computed positions holds at a time, over all groups."""
    windows = [group.window for group in kv_cache.groups]
    return sum(_peak_blocks(kv_cache.block_size, window, num_positions, max_step_tokens) for window in windows)


def longest_request(kv_cache: KVCacheConfig, max_step_tokens: int, limit: int) -> int:
    """The greatest length (prompt plus output, at most `limit`) of a request that fits in the KV cache alone; 0: none.

    The last token is never computed, so it takes no room.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        fits = peak_blocks(kv_cache, middle - 1, max_step_tokens) <= kv_cache.num_blocks - 1
        low, high = (middle, high) if fits else (low, middle - 1)
    return low if low >= 2 else 0


def _peak_blocks(block_size: int, window: int | None, num_positions: int, max_step_tokens: int) -> int:
    blocks = -(-num_positions // block_size)
    if window is None:
        return blocks
    # A step's keys reach from the first query's window to the last query; that span may start anywhere in a block.
    span = window - 1 + min(max_step_tokens, num_positions)
    return min(blocks, (span + block_size - 2) // block_size + 1)


class KVCacheAllocator:
    """Gives blocks to requests and takes them back.

    1. `find_prefix`, `attach`: a request taking a row starts with the cached blocks of its prefix.
    2. `extend`: before each step; blocks the sliding windows left behind are given back, new ones appended.
    3. `publish`: after a step's tokens are accepted; full blocks become findable for others.
    4. `release`: when the request gives its row back, for good or for a while.
    """

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        *,
        max_step_tokens: int,
        enable_prefix_caching: bool = True,
        weights_version: str = "",
        key_function: KeyFunction | None = None,
    ) -> None:
        self.block_size = kv_cache.block_size
        self.windows = [group.window for group in kv_cache.groups]
        self.max_step_tokens = max_step_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(kv_cache.num_blocks)
        self.stats = PrefixCacheStats()
        self._namer = ContentNamer(weights_version, key_function)
        self._no_blocks: tuple[list[int], ...] = tuple([] for _ in self.windows)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def peak_blocks(self, num_positions: int) -> int:
        return sum(_peak_blocks(self.block_size, w, num_positions, self.max_step_tokens) for w in self.windows)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The cached prefix, short of the last token: a step without a token to compute has nothing to sample (B103).

        Requests that want prompt logprobs compute every position themselves (B107).
        """
        hit = PrefixHit(block_tables=[[] for _ in self.windows])
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return hit
        contents = self._name_blocks(request, (len(request.token_ids) - 1) // self.block_size)
        for group, window in enumerate(self.windows):
            if window is None:
                contents = list(takewhile(lambda content: self.pool.find(group, content) is not None, contents))  # noqa: B023
        tables: list[list[int]] = []
        num_blocks = len(contents)
        cached = [[self.pool.find(group, content) for content in contents] for group in range(self.num_groups)]
        while num_blocks and not all(self._covers(cached[g], num_blocks, w) for g, w in enumerate(self.windows)):
            num_blocks -= 1
        for group, window in enumerate(self.windows):
            first = self._first_needed(num_blocks * self.block_size, window)
            blocks = [block for block in cached[group][first:num_blocks] if block is not None]
            tables.append([NULL_BLOCK] * first + blocks)
        return PrefixHit(num_blocks * self.block_size, tables)

    def num_blocks_to_admit(self, hit: PrefixHit, num_positions: int) -> int:
        """Free blocks that a request of that many positions will take in all, those of its prefix hit included."""
        held = [block for table in hit.block_tables for block in table if block != NULL_BLOCK]
        taken_from_free = sum(self.pool.is_free(block) for block in held)
        return max(self.peak_blocks(num_positions) - len(held), 0) + taken_from_free

    def num_blocks_outstanding(self, request: Request, num_positions: int) -> int:
        """Blocks a running request has yet to take on its way to that many positions."""
        held = sum(len(table) for table in request.block_tables) - sum(request.num_left_behind)
        return max(self.peak_blocks(num_positions) - held, 0)

    def attach(self, request: Request, hit: PrefixHit) -> None:
        self._name_blocks(request, 0)  # binds the weights version this residence computes with
        request.block_tables = [list(table) for table in hit.block_tables]
        request.num_left_behind = [table.count(NULL_BLOCK) for table in request.block_tables]
        for table in request.block_tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.hold(block)
        request.num_planned = request.num_computed = hit.num_tokens
        request.num_published = hit.num_tokens // self.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            if self.enable_prefix_caching:
                self.stats.num_queried_tokens += len(request.token_ids)
                self.stats.num_hit_tokens += hit.num_tokens

    def extend(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Room for the next `num_tokens` positions: the new block ids per group, or None if the pool is too empty."""
        num_blocks = -(-(request.num_planned + num_tokens) // self.block_size)
        if num_blocks <= len(request.block_tables[0]):
            return self._no_blocks  # all tables are equally long
        for group, window in enumerate(self.windows):
            self._leave_behind(request, group, self._first_needed(request.num_planned, window))
        missing = num_blocks - len(request.block_tables[0])
        if missing * self.num_groups > self.pool.num_free:
            return None
        new_blocks = tuple(self.pool.allocate(missing) for _ in self.windows)
        for table, blocks in zip(request.block_tables, new_blocks, strict=True):
            table.extend(blocks)
        return new_blocks

    def publish(self, request: Request) -> None:
        """Offers the full blocks whose content is computed and accepted to the prefix cache."""
        num_full = request.num_computed // self.block_size
        if not self.enable_prefix_caching or num_full <= request.num_published:
            return
        contents = self._name_blocks(request, num_full)
        for index in range(request.num_published, num_full):
            for group, table in enumerate(request.block_tables):
                if table[index] != NULL_BLOCK:
                    self.pool.publish(table[index], group, contents[index])
        request.num_published = num_full

    def release(self, request: Request) -> None:
        """Takes all blocks back. A sequence's end goes first: its beginning is what others are likely to share."""
        for table in request.block_tables:
            self.pool.release(table[::-1])
        request.block_tables, request.num_left_behind = [], []
        request.num_published = 0

    def reset_prefix_cache(self, weights_version: str | None = None) -> None:
        """Forgets all cached content; with `weights_version`, content computed from now on is named after it.

        Requests that hold a row keep the name they started under, so that what they publish is found by no one who
        starts under the new one.
        """
        self.pool.reset_prefix_cache()
        if weights_version is not None:
            self._namer.weights_version = weights_version

    def _name_blocks(self, request: Request, num_blocks: int) -> list[BlockContent]:
        """The first `num_blocks` block contents of the request's known tokens."""
        chain = request.contents
        fresh_start = request.num_computed == 0 and request.num_planned == 0
        if not chain or (fresh_start and chain[0].scope[0] != self._namer.weights_version):
            chain[:] = [self._namer.root(request.cache_salt)]
        for index in range(len(chain) - 1, num_blocks):
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            chain.append(self._namer.child(chain[-1], tokens))
        return chain[1 : num_blocks + 1]

    def _first_needed(self, position: int, window: int | None) -> int:
        """The first block that a query at `position`, or a later one, reads."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def _covers(self, blocks: list[int | None], num_blocks: int, window: int | None) -> bool:
        return None not in blocks[self._first_needed(num_blocks * self.block_size, window) : num_blocks]

    def _leave_behind(self, request: Request, group: int, first_needed: int) -> None:
        table, left = request.block_tables[group], request.num_left_behind[group]
        if first_needed > left:
            self.pool.release(table[left:first_needed])
            table[left:first_needed] = [NULL_BLOCK] * (first_needed - left)
            request.num_left_behind[group] = first_needed
