"""Reference counts, the order blocks are handed out in, and what the prefix cache finds."""

from __future__ import annotations

import pytest

from trimtab.engine.block_pool import NULL_BLOCK, BlockContent, BlockPool, ContentNamer


def chain(namer: ContentNamer, *blocks: list[int], salt: str | None = None) -> list[BlockContent]:
    contents = [namer.root(salt)]
    for tokens in blocks:
        contents.append(namer.child(contents[-1], tokens))
    return contents[1:]


def publish(pool: BlockPool, contents: list[BlockContent]) -> list[int]:
    blocks = pool.allocate(len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.publish(block, 0, content)
    pool.check()
    return blocks


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3] and pool.num_free == 0
    pool.release([NULL_BLOCK, 1])
    assert pool.num_free == 1


def test_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_blocks \(1\) must be at least 2"):
        BlockPool(1)


def test_released_content_is_found_until_its_block_is_handed_out_again() -> None:
    pool, namer = BlockPool(3), ContentNamer()
    contents = chain(namer, [1, 2], [3, 4])
    blocks = publish(pool, contents)
    pool.release(blocks[::-1])
    assert [pool.find(0, content) for content in contents] == blocks
    pool.allocate(1)  # the end of the sequence went first
    assert [pool.find(0, content) for content in contents] == [blocks[0], None]
    pool.check()


def test_blocks_without_content_are_handed_out_before_cached_ones() -> None:
    pool, namer = BlockPool(3), ContentNamer()
    (cached,) = publish(pool, chain(namer, [1]))
    (plain,) = pool.allocate(1)
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_held_block_is_not_free_and_counts_its_holders() -> None:
    pool, namer = BlockPool(3), ContentNamer()
    (block,) = publish(pool, chain(namer, [1]))
    pool.hold(block)
    pool.release([block])
    assert pool.ref_counts[block] == 1 and not pool.is_free(block)
    pool.release([block])
    pool.hold(block)
    assert pool.ref_counts[block] == 1 and not pool.is_free(block)
    pool.check()


def test_generation_rises_when_a_block_gets_new_content_and_not_on_a_hit() -> None:
    pool, namer = BlockPool(2), ContentNamer()
    (block,) = publish(pool, chain(namer, [1]))
    pool.release([block])
    pool.hold(block)
    assert pool.generation[block] == 1
    pool.release([block])
    pool.allocate(1)
    assert pool.generation[block] == 2


def test_ids_that_agree_in_their_low_bits_do_not_collide() -> None:
    """B104: 65 and 321 differ only above bit 8."""
    namer = ContentNamer()
    (low,), (high,) = chain(namer, [65, 1]), chain(namer, [321, 1])
    assert low.key != high.key
    wide = [chain(namer, [token])[0].key for token in (1, 1 + 2**16, 1 + 2**31, 1 + 2**32)]
    assert len(set(wide)) == 4


def test_keys_differ_by_weights_version_by_salt_and_by_parent() -> None:
    namer = ContentNamer("v1", lambda message: message)
    newer = ContentNamer("v2", lambda message: message)
    keys = {
        chain(namer, [1])[0].key,
        chain(newer, [1])[0].key,
        chain(namer, [1], salt="a")[0].key,
        chain(namer, [1], salt="b")[0].key,
        chain(namer, [2], [1])[1].key,
    }
    assert len(keys) == 5


def test_two_processes_do_not_share_their_hash_key() -> None:
    assert chain(ContentNamer(), [1])[0].key != chain(ContentNamer(), [1])[0].key


def test_constant_hash_function_costs_hits_and_never_gives_foreign_content() -> None:
    """B104: tokens, parents and scope are compared, not only keys."""
    namer = ContentNamer("", lambda message: b"constant")
    held = chain(namer, [1, 2], [3, 4])
    pool = BlockPool(8)
    blocks = pool.allocate(2)
    pool.publish(blocks[1], 0, held[1])  # its parent is not cached: only the second block can be found
    assert pool.find(0, chain(namer, [1, 2], [3, 4])[1]) == blocks[1]
    assert pool.find(0, chain(namer, [1, 2])[0]) is None
    assert pool.find(0, chain(namer, [3, 4])[0]) is None, "same tokens after nothing"
    assert pool.find(0, chain(namer, [5, 6], [3, 4])[1]) is None, "same tokens after another block"
    assert pool.find(0, chain(namer, [1, 2], [3, 4], salt="s")[1]) is None, "same tokens under another salt"
    pool.publish(blocks[0], 0, held[0])  # its key is taken
    assert pool.find(0, held[0]) is None and pool.contents[blocks[0]] is None
    pool.check()


def test_groups_do_not_find_each_other_s_blocks() -> None:
    pool, namer = BlockPool(4), ContentNamer()
    (content,) = chain(namer, [1])
    first, second = pool.allocate(2)
    pool.publish(first, 0, content)
    assert pool.find(1, content) is None
    pool.publish(second, 1, content)
    assert (pool.find(0, content), pool.find(1, content)) == (first, second)


def test_reset_forgets_content_and_leaves_blocks_with_their_holders() -> None:
    pool, namer = BlockPool(4), ContentNamer()
    contents = chain(namer, [1], [2])
    blocks = publish(pool, contents)
    pool.release(blocks[:1])
    pool.reset_prefix_cache()
    assert pool.num_cached == 0 and pool.find(0, contents[1]) is None
    assert pool.ref_counts[blocks[1]] == 1
    pool.check()


def test_release_by_a_stranger_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="does not hold it"):
        BlockPool(3).release([1])
