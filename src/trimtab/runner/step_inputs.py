"""A step plan becomes tensors: a gather over persistent rows, vectorised over tokens.

Every tensor is made anew for its step; nothing is shared with a step still in flight.
"""

# T tokens of the step  R scheduled rows  S rows that sample  G logits rows (S sampled, then prompt positions)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trimtab.plan import KVCacheConfig, StepPlan
from trimtab.runner.attention.base import AttentionMetadata
from trimtab.runner.request_table import RequestTable


@dataclass(slots=True)
class PromptPositions:
    """Prompt positions whose logits are wanted: of which row, and the prompt token that follows each."""

    rows: np.ndarray  # int64 [G - S]
    next_token_ids: torch.Tensor  # int64 [G - S]


@dataclass(slots=True)
class StepInputs:
    rows: np.ndarray  # int64 [R], request rows
    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: dict[int, AttentionMetadata]  # per KV cache group
    logits_rows: torch.Tensor  # int64 [G], indices into T
    sampled_rows: np.ndarray  # int64 [S], request rows
    sampled_positions: np.ndarray  # int64 [S], where the new token goes in its row
    prompt: PromptPositions | None

    @property
    def slot_mappings(self) -> dict[int, torch.Tensor]:
        """Per KV cache group, int64 [T]: where each token's K/V goes."""
        return {group: metadata.slot_mapping for group, metadata in self.attention.items()}


def gather_inputs(plan: StepPlan, table: RequestTable, kv_cache: KVCacheConfig) -> StepInputs:
    device = table.token_ids.device
    rows = np.array([row.row for row in plan.scheduled], dtype=np.int64)
    starts = np.array([row.start for row in plan.scheduled], dtype=np.int64)
    lengths = np.array([row.num_tokens for row in plan.scheduled], dtype=np.int64)
    samples = np.array([row.samples for row in plan.scheduled], dtype=bool)

    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    token_rows = np.repeat(rows, lengths)
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)

    token_rows_device = torch.from_numpy(token_rows).to(device, non_blocking=True)
    positions_device = torch.from_numpy(positions).to(device, non_blocking=True)
    logits_rows = query_start[1:][samples] - 1
    prompt, prompt_rows = _prompt_positions(plan, table, query_start)

    return StepInputs(
        rows=rows,
        token_ids=table.token_ids[token_rows_device, positions_device].long(),
        positions=positions_device,
        attention=_attention_metadata(
            rows, starts + lengths, query_start, token_rows_device, positions_device, table, kv_cache
        ),
        logits_rows=torch.from_numpy(np.concatenate([logits_rows, prompt_rows])).to(device, non_blocking=True),
        sampled_rows=rows[samples],
        sampled_positions=(starts + lengths)[samples],
        prompt=prompt,
    )


def _attention_metadata(
    rows: np.ndarray,
    seq_lens: np.ndarray,
    query_start: np.ndarray,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    table: RequestTable,
    kv_cache: KVCacheConfig,
) -> dict[int, AttentionMetadata]:
    block_idx = positions // kv_cache.block_size
    offset = positions % kv_cache.block_size
    device = positions.device
    rows_device = torch.from_numpy(rows).to(device, non_blocking=True)
    query_start_device = torch.from_numpy(query_start.astype(np.int32)).to(device, non_blocking=True)
    seq_lens_device = torch.from_numpy(seq_lens.astype(np.int32)).to(device, non_blocking=True)
    max_blocks = -(-int(seq_lens.max()) // kv_cache.block_size)
    return {
        group: AttentionMetadata(
            query_start=query_start_device,
            seq_lens=seq_lens_device,
            block_table=block_table[rows_device, :max_blocks],
            slot_mapping=block_table[token_rows, block_idx].long() * kv_cache.block_size + offset,
            query_start_host=query_start,
            seq_lens_host=seq_lens,
        )
        for group, block_table in enumerate(table.block_tables)
    }


def _prompt_positions(
    plan: StepPlan, table: RequestTable, query_start: np.ndarray
) -> tuple[PromptPositions | None, np.ndarray]:
    """Positions of this step whose next token is a prompt token, for rows that want prompt log-probabilities."""
    rows, logits_rows, next_tokens = [], [], []
    for index, scheduled in enumerate(plan.scheduled):
        opened = table[scheduled.row]
        if opened.sampling.prompt_logprobs is None:
            continue
        end = min(scheduled.start + scheduled.num_tokens, opened.num_prompt_tokens - 1)
        count = max(end - scheduled.start, 0)
        rows.append(np.full(count, scheduled.row, dtype=np.int64))
        logits_rows.append(query_start[index] + np.arange(count))
        next_tokens.append(table.token_ids[scheduled.row, scheduled.start + 1 : scheduled.start + 1 + count].long())
    if not rows:
        return None, np.zeros(0, dtype=np.int64)
    return PromptPositions(np.concatenate(rows), torch.cat(next_tokens)), np.concatenate(logits_rows)
