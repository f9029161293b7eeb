"""Paged KV accounting: which blocks are free, who holds the others, what the prefix cache knows. No tensors.

Content is named by a chain: a full block's key is a keyed SHA-256 over its parent's key and its token ids, the root's
key one over weights version and cache salt. A key only finds a candidate; a hit also compares the chain's tokens, so
that a colliding key costs a miss and never a wrong answer (B104).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable

NULL_BLOCK = 0  # stands for positions a sliding window has left behind: never handed out, never read

KeyFunction = Callable[[bytes], bytes]


def keyed_sha256() -> KeyFunction:
    """A hash nobody outside this process can steer: its key is drawn at start."""
    secret = secrets.token_bytes(32)
    return lambda message: hmac.digest(secret, message, hashlib.sha256().name)


class BlockContent:
    """What one full block holds: its own tokens after everything its parent stands for."""

    __slots__ = ("key", "parent", "scope", "token_ids")

    def __init__(self, key: bytes, parent: BlockContent | None, token_ids: tuple[int, ...], scope: tuple) -> None:
        self.key = key
        self.parent = parent
        self.token_ids = token_ids
        self.scope = scope  # (weights version, cache salt): same along a chain

    def same_as(self, other: BlockContent) -> bool:
        """Whether both chains hold the same tokens in the same scope."""
        mine, theirs = self, other
        while mine is not theirs:
            if mine.token_ids != theirs.token_ids or mine.scope != theirs.scope:
                return False
            if mine.parent is None or theirs.parent is None:
                return mine.parent is theirs.parent
            mine, theirs = mine.parent, theirs.parent
        return True


class ContentNamer:
    """Builds content chains for one weights version at a time."""

    def __init__(self, weights_version: str = "", key_function: KeyFunction | None = None) -> None:
        self.weights_version = weights_version
        self._key_function = key_function or keyed_sha256()

    def root(self, cache_salt: str | None) -> BlockContent:
        scope = (self.weights_version, cache_salt)
        return BlockContent(self._key_function(repr(scope).encode()), None, (), scope)

    def child(self, parent: BlockContent, token_ids: list[int]) -> BlockContent:
        # 64 bits per id: ids that agree in their low bits stay apart.
        key = self._key_function(parent.key + array("q", token_ids).tobytes())
        return BlockContent(key, parent, tuple(token_ids), parent.scope)


class BlockPool:
    """All blocks of one KV cache. A block is free (reference count 0) or held by one request or more.

    A free block keeps its content until it is handed out again, least recently freed first; blocks without content go
    before all others. `generation[block]` rises each time the block is handed out for new content.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks ({num_blocks}) must be at least 2 (block 0 is reserved); give more KV memory")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.generation = [0] * num_blocks
        self.contents: list[tuple[int, BlockContent] | None] = [None] * num_blocks  # (KV cache group, content)
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._cached: dict[tuple[int, bytes], int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for new content, each with one reference. Whatever they held is forgotten."""
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free} free ones"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self.ref_counts[block] = 1
            self.generation[block] += 1
        return blocks

    def hold(self, block: int) -> None:
        """One more reference to a block whose content is wanted as it is."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference fewer each; null blocks are skipped. Released first means handed out first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self.ref_counts[block] > 0, f"block {block} is released by someone who does not hold it"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if self.contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, group: int, content: BlockContent) -> int | None:
        """The block that holds this content for this group, tokens compared."""
        block = self._cached.get((group, content.key))
        if block is None:
            return None
        entry = self.contents[block]
        assert entry is not None, f"block {block} is listed as cached and has no content"
        held = entry[1]
        if not held.same_as(content):
            return None
        # Both chains are equal: sharing the ancestors keeps the next comparison short.
        held.parent = content.parent
        return block

    def publish(self, block: int, group: int, content: BlockContent) -> None:
        """Makes a held block's content findable, unless its key is taken already."""
        assert self.ref_counts[block] > 0, f"block {block} is free: its content may be overwritten any time"
        if self.contents[block] is None and (group, content.key) not in self._cached:
            self._cached[group, content.key] = block
            self.contents[block] = (group, content)

    def reset_prefix_cache(self) -> None:
        """Forgets all content; blocks in use stay with their holders."""
        for block in list(self._cached.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        if (entry := self.contents[block]) is not None:
            group, content = entry
            del self._cached[group, content.key]
            self.contents[block] = None

    def check(self) -> None:
        """Raises AssertionError where the accounts contradict themselves. For tests."""
        free = set(self._free)
        assert NULL_BLOCK not in free and self.ref_counts[NULL_BLOCK] == 0, "the null block was handed out"
        for block in range(1, self.num_blocks):
            assert (self.ref_counts[block] == 0) == (block in free), f"block {block}: reference count and free list"
        for key, block in self._cached.items():
            entry = self.contents[block]
            assert entry is not None and (entry[0], entry[1].key) == key, f"block {block}: cached under a foreign key"
        assert len(self._cached) == sum(entry is not None for entry in self.contents), "content without a key"
