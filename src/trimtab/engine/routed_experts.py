"""Where routed experts wait for their requests: rows live and die with the KV blocks whose tokens they tell of.

Imported only where `enable_return_routed_experts` is on. A slot is block * block_size + offset, in the KV cache group
that worker and engine agree on (`get_routed_experts_attn_gid`).
"""

# T tokens of a step  L MoE layers  K top-k

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trimtab.engine.block_pool import BlockPool
from trimtab.engine.request import Request
from trimtab.experts.routed_experts import RoutedExpertsLayout, get_routed_experts_attn_gid
from trimtab.outputs import RoutedExpertsMeta
from trimtab.plan import KVCacheConfig, RoutedRows, ScheduledRow

if TYPE_CHECKING:
    from trimtab.engine.scheduler import Part


class FrozenRows:
    """The rows of one sequence that nothing changes any more, from position `start` on, without a gap.

    What was computed first counts: a position that is computed again, after a preemption, may route otherwise than it
    did when its token was sampled.
    """

    __slots__ = ("_length", "_rows", "_versions", "gap", "layout", "start")

    def __init__(self, layout: RoutedExpertsLayout, start: int = 0) -> None:
        self.layout = layout
        self.start = start
        self.gap: str | None = None  # why no more rows can follow, where positions after these were computed
        self._length = 0
        self._rows = np.empty((0, layout.num_layers, layout.top_k), layout.dtype)
        self._versions: list[tuple[int, int]] = []  # (first row, weights version)

    @property
    def end(self) -> int:
        """The position whose row comes next."""
        return self.start + self._length

    def append(self, rows: np.ndarray, versions: np.ndarray) -> None:
        """rows [n, L, K] from position `end` on, which become its own, and the weights version [n] of each."""
        if not len(rows):
            return
        needed = self._length + len(rows)
        if not self._length:
            self._rows = rows
        elif needed > len(self._rows):
            # A copy that grew: arrays handed out before keep what they show.
            grown = np.empty((max(needed, 2 * len(self._rows)), *self._rows.shape[1:]), self.layout.dtype)
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown
        if self._length:
            self._rows[self._length : needed] = rows
        for index in np.flatnonzero(np.diff(versions, prepend=versions[0] - 1)).tolist():
            version = int(versions[index])
            if not self._versions or self._versions[-1][1] != version:
                self._versions.append((self._length + index, version))
        self._length = needed

    def output(self, *, writable: bool) -> tuple[np.ndarray, RoutedExpertsMeta]:
        """All rows so far [n, L, K], and what they are. A view: not writable while more rows are to follow."""
        meta = RoutedExpertsMeta(self.layout.layer_ids, self.layout.num_experts, self.start, tuple(self._versions))
        rows = self._rows[: self._length]
        rows.setflags(write=writable)
        return rows, meta


@dataclass(slots=True)
class _Launched:
    """Where a step in flight writes."""

    scheduled: list[ScheduledRow]  # and not their requests, which may end meanwhile
    blocks: np.ndarray  # int64 [T]
    distinct: list[int]  # blocks, and the generation of each at launch
    generations: list[int]
    counts: list[int]  # tokens in each
    weights_version: int


class RoutedExpertsStore:
    """One data-parallel rank's rows, by KV slot. Memory is taken at start and never grows.

    1. `launch` with each plan; 2. `store` with each output, in launch order, before anything of that step is read;
    3. `freeze` copies to a request what is computed and accepted of it: before it gives up its blocks, and any time
       earlier; `freeze_arrived` what still arrives for a request that has none any more.

    A slot's row counts only under the generation of the block that it was computed under. So a row that arrives late
    cannot land in a block that is someone else's by then, and reading a slot that was not written is seen.
    """

    def __init__(self, layout: RoutedExpertsLayout, kv_cache: KVCacheConfig, pool: BlockPool) -> None:
        self.layout = layout
        self.gid = get_routed_experts_attn_gid(kv_cache)
        self.weights_version = 0  # of the steps launched from now on
        self._block_size = kv_cache.block_size
        self._pool = pool
        num_slots = kv_cache.num_blocks * kv_cache.block_size
        # Pages are taken as they are written to.
        self._rows = np.empty((num_slots, layout.num_layers, layout.top_k), layout.dtype)
        self._written = np.zeros(num_slots, np.int64)  # generation of the block when the row was computed; 0: never
        self._versions = np.zeros(num_slots, np.int32)
        self._in_flight: dict[int, _Launched] = {}
        self._arrived: tuple[_Launched, np.ndarray | None] | None = None  # the step stored last, and its rows

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes + self._written.nbytes + self._versions.nbytes

    def launch(self, step_id: int, parts: Sequence[Part]) -> None:
        """Remembers which blocks the step writes, and under which generation."""
        size, generation = self._block_size, self._pool.generation
        distinct: list[int] = []
        counts: list[int] = []
        for part in parts:
            table, scheduled = part.request.block_tables[self.gid], part.scheduled
            position, end = scheduled.start, scheduled.start + scheduled.num_tokens
            while position < end:
                count = min(size - position % size, end - position)
                distinct.append(table[position // size])
                counts.append(count)
                position += count
        self._in_flight[step_id] = _Launched(
            [part.scheduled for part in parts],
            np.repeat(np.array(distinct, np.int64), counts),
            distinct,
            [generation[block] for block in distinct],
            counts,
            self.weights_version,
        )

    def store(self, step_id: int, routed: RoutedRows | None) -> None:
        """The step's rows go to their slots; those of blocks handed out anew since are dropped."""
        launched = self._in_flight.pop(step_id)
        self._arrived = (launched, None if routed is None else routed.experts)
        if routed is None:
            return
        slots = routed.slot_mapping
        assert len(routed.experts) == len(slots) == len(launched.blocks), (
            f"step {step_id} has {len(launched.blocks)} tokens and brings {len(routed.experts)} rows"
        )
        assert np.array_equal(slots // self._block_size, launched.blocks), (
            f"step {step_id}: the worker wrote to other blocks than the plan gave it"
        )
        experts, generations = routed.experts, np.repeat(launched.generations, launched.counts)
        if not all(self._current(launched)):
            kept = np.repeat(self._current(launched), launched.counts)
            slots, experts, generations = slots[kept], experts[kept], generations[kept]
        self._rows[slots] = experts
        self._written[slots] = generations
        self._versions[slots] = launched.weights_version

    def freeze(self, request: Request) -> None:
        """Copies to the request the rows of its computed positions that it does not have. It still holds its blocks."""
        frozen = request.routed_rows
        if frozen is None or frozen.gap or request.num_computed <= frozen.end:
            return
        size, first, end = self._block_size, frozen.end, request.num_computed
        blocks = np.array(request.block_tables[self.gid][first // size : -(-end // size)], np.int64)
        part = slice(first % size, first % size + end - first)
        generations = np.repeat([self._pool.generation[block] for block in blocks.tolist()], size)[part]
        valid = self._by_block(self._written, blocks)[part] == generations
        count = len(valid) if valid.all() else int(np.argmin(valid))
        rows, versions = self._by_block(self._rows, blocks)[part], self._by_block(self._versions, blocks)[part]
        frozen.append(rows[:count], versions[:count])
        if count < len(valid):
            frozen.gap = _gap(frozen.end)

    def freeze_arrived(self, part: Part) -> None:
        """Copies a part of the step stored last to its request, which was preempted while that step was in flight."""
        frozen, scheduled = part.request.routed_rows, part.scheduled
        first, end = scheduled.start, scheduled.start + scheduled.num_tokens
        if frozen is None or frozen.gap or end <= frozen.end:
            return
        assert self._arrived is not None, "a step's rows are stored before its parts are accepted"
        launched, experts = self._arrived
        # Before `start` nothing is kept; else what was computed before this part is frozen already.
        skipped = frozen.end - first
        if experts is None or skipped < 0:
            frozen.gap = _gap(frozen.end)
            return
        offset = 0
        for other in launched.scheduled:
            if other is scheduled:
                break
            offset += other.num_tokens
        rows = experts[offset + skipped : offset + scheduled.num_tokens].copy()
        frozen.append(rows, np.full(len(rows), launched.weights_version, np.int32))

    def _current(self, launched: _Launched) -> list[bool]:
        """For each of the step's blocks, whether it still is what it was at launch."""
        generation = self._pool.generation
        return [generation[block] == then for block, then in zip(launched.distinct, launched.generations, strict=True)]

    def _by_block(self, values: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """[blocks * block_size, ...]: whole blocks are copied, which is several times as fast as slots."""
        shaped = values.reshape(-1, self._block_size, *values.shape[1:])
        return shaped[blocks].reshape(-1, *values.shape[1:])


def _gap(position: int) -> str:
    return f"routed experts: what position {position} chose was not captured"
