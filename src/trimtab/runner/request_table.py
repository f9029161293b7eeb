"""Persistent rows: what the worker knows of every running request, apart from any step's batch.

A request keeps its row from the plan that opens it to the plan that closes it. A step's batch is a gather over rows, so
nothing moves when requests come and go. The sampler writes each new token to its row, on the device, where the next
step's gather finds it: the next step needs no token from the host.
"""

# N rows  L model length  B blocks per row

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimtab.plan import KVCacheConfig, OpenRow, ScheduledRow


class RequestTable:
    """Token ids and block tables by row.

    `token_ids` int32 [N, L + 1]: prompt and output; one place more than the model's length, for the token that a last
    step samples and nobody forwards. `block_tables[group]` int32 [N, B]. Memory is touched only as rows fill it.
    Called on: runner thread.
    """

    def __init__(self, num_rows: int, max_model_len: int, kv_cache: KVCacheConfig, device: torch.device) -> None:
        self.max_model_len = max_model_len
        blocks_per_row = -(-max_model_len // kv_cache.block_size)
        self.token_ids = torch.empty(num_rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_tables = [
            torch.zeros(num_rows, blocks_per_row, dtype=torch.int32, device=device) for _ in kv_cache.groups
        ]
        self._open: dict[int, OpenRow] = {}
        self._num_blocks: dict[int, list[int]] = {}

    def open(self, opened: OpenRow) -> None:
        assert opened.row not in self._open, f"row {opened.row} is opened twice without a close"
        assert len(opened.token_ids) <= self.max_model_len, f"request {opened.request_id!r} is longer than the model"
        self._open[opened.row] = opened
        self._num_blocks[opened.row] = [0] * len(self.block_tables)
        tokens = torch.tensor(opened.token_ids, dtype=torch.int32)
        self.token_ids[opened.row, : len(tokens)].copy_(tokens, non_blocking=True)

    def close(self, row: int) -> None:
        del self._open[row], self._num_blocks[row]

    def computes_prompt(self, scheduled: Sequence[ScheduledRow]) -> bool:
        """Whether any of these rows computes tokens of its prompt: such a batch is prefill, else decode."""
        return any(part.start < self._open[part.row].num_prompt_tokens for part in scheduled)

    def append_blocks(self, scheduled: ScheduledRow) -> None:
        """Appends each group's new block ids to the row's block table."""
        counts = self._num_blocks[scheduled.row]
        for group, block_ids in enumerate(scheduled.new_block_ids):
            if block_ids:
                start, end = counts[group], counts[group] + len(block_ids)
                blocks = torch.tensor(block_ids, dtype=torch.int32)
                self.block_tables[group][scheduled.row, start:end].copy_(blocks, non_blocking=True)
                counts[group] = end

    def write_tokens(self, rows: np.ndarray, positions: np.ndarray, token_ids: torch.Tensor) -> None:
        """Writes `token_ids` [S] to `positions` [S] of `rows` [S]. A failed row gets a token nobody reads."""
        device = self.token_ids.device
        rows_device = torch.from_numpy(rows).to(device, non_blocking=True)
        positions_device = torch.from_numpy(positions).to(device, non_blocking=True)
        self.token_ids[rows_device, positions_device] = token_ids.to(torch.int32)

    def __getitem__(self, row: int) -> OpenRow:
        return self._open[row]
