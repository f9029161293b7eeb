"""The reference runner (`--model-runner v1`): synchronous, rebuilds everything each step, plain enough to trust.

Oracle for Model Runner V2 and a tool for debugging: request by request and token by token it states what a step's
inputs are, and it attends with the reference backend. Rows, sampler and network are the same objects.
"""

from __future__ import annotations

import numpy as np
import torch

from trimtab.plan import StepPlan
from trimtab.runner.attention import AttentionMetadata
from trimtab.runner.model_runner import ModelRunner
from trimtab.runner.step_inputs import PromptPositions, StepInputs


class ReferenceRunner(ModelRunner):
    """Steps of one request after another, each token spelled out. Same calls as `ModelRunner`; asynchronous depth 1."""

    attention_backend = "reference"

    def _gather(self, plan: StepPlan) -> StepInputs:
        token_ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        seq_lens: list[int] = []
        sampled: list[tuple[int, int, int]] = []  # index into the step's tokens, row, position of the new token
        prompt: list[tuple[int, int, int]] = []  # index into the step's tokens, row, next prompt token
        for scheduled in plan.scheduled:
            opened = self.table[scheduled.row]
            known = self.table.token_ids[scheduled.row].tolist()
            end = scheduled.start + scheduled.num_tokens
            for position in range(scheduled.start, end):
                if opened.sampling.prompt_logprobs is not None and position + 1 < opened.num_prompt_tokens:
                    prompt.append((len(token_ids), scheduled.row, known[position + 1]))
                token_ids.append(known[position])
                positions.append(position)
            if scheduled.samples:
                sampled.append((len(token_ids) - 1, scheduled.row, end))
            query_start.append(len(token_ids))
            seq_lens.append(end)
        wants_prompt = any(self.table[row.row].sampling.prompt_logprobs is not None for row in plan.scheduled)
        return StepInputs(
            rows=np.array([scheduled.row for scheduled in plan.scheduled], dtype=np.int64),
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            attention=self._attention_metadata(plan, query_start, seq_lens),
            logits_rows=torch.tensor([entry[0] for entry in sampled + prompt], dtype=torch.int64),
            sampled_rows=np.array([row for _, row, _ in sampled], dtype=np.int64),
            sampled_positions=np.array([position for _, _, position in sampled], dtype=np.int64),
            prompt=PromptPositions(
                rows=np.array([row for _, row, _ in prompt], dtype=np.int64),
                next_token_ids=torch.tensor([token for _, _, token in prompt], dtype=torch.int64),
            )
            if wants_prompt
            else None,
        )

    def _attention_metadata(
        self, plan: StepPlan, query_start: list[int], seq_lens: list[int]
    ) -> dict[int, AttentionMetadata]:
        block_size = self.kv_cache_config.block_size
        metadata = {}
        for group in range(len(self.kv_cache_config.groups)):
            tables = [self.table.block_tables[group][scheduled.row].tolist() for scheduled in plan.scheduled]
            slots = [
                table[position // block_size] * block_size + position % block_size
                for scheduled, table in zip(plan.scheduled, tables, strict=True)
                for position in range(scheduled.start, scheduled.start + scheduled.num_tokens)
            ]
            metadata[group] = AttentionMetadata.from_host(
                np.array(query_start), np.array(seq_lens), np.array(tables), np.array(slots)
            )
        return metadata
