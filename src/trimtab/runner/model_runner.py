"""Model Runner V2: a step plan becomes tokens in two calls, `execute` and `sample`.

`execute` launches the forward of a gather over persistent rows; `sample` draws the tokens, writes each to its row and
returns at once. The next plan's `execute` may follow before the last output was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trimtab.experts.data.capture import NoCapturer
from trimtab.models.language_model import LanguageModel
from trimtab.plan import KVCacheConfig, StepOutput, StepPlan
from trimtab.runner.async_output import AsyncOutput, record_event
from trimtab.runner.attention import AttentionStep, PagedAttention, PagedKVCache, choose_backend
from trimtab.runner.balancing import NoRankBalancer, RankBalancer
from trimtab.runner.logprobs import LogprobsTensors, token_logprobs
from trimtab.runner.request_table import RequestTable
from trimtab.runner.sampler import Sampler, SamplerOutput
from trimtab.runner.sampling_batch import SamplingTable
from trimtab.runner.step_inputs import StepInputs, gather_inputs

if TYPE_CHECKING:
    from trimtab.experts.data.capturer import RoutedExpertsCapturer, RoutedExpertsRecord


@dataclass(slots=True)
class ExecuteModelState:
    """Between the two calls: what `execute` left for `sample`."""

    step_id: int
    inputs: StepInputs | None  # None: a plan of commands alone
    logits: torch.Tensor | None  # [G, V]: sampled rows first, then prompt positions
    routed_experts: RoutedExpertsRecord | None = None  # None: capture is off, or there was nothing to capture


class ModelRunner:
    """Owns the request table, the paged KV cache and the sampler's rows of one worker.

    1. `execute(plan)` applies the plan's row changes and launches the forward.
    2. `sample()` launches sampling and the copies to the host; its `AsyncOutput` is taken once, in launch order.

    Called on: runner thread.
    """

    attention_backend = "auto"

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KVCacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        balancer: RankBalancer | None = None,
        capturer: RoutedExpertsCapturer | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.model = model
        self.balancer = balancer or NoRankBalancer()
        self.capturer = capturer or NoCapturer()
        self.kv_cache_config = kv_cache
        self.table = RequestTable(max_num_seqs, max_model_len, kv_cache, self.device)
        self.sampling = SamplingTable(self.table.token_ids, model.spec.vocab_size)
        self.sampler = Sampler()
        backend = choose_backend(self.device, model.spec.dtype, kv_cache.block_size, self.attention_backend)
        self.kv_cache = PagedKVCache(
            kv_cache, model.spec.attention_layers, model.spec.dtype, self.device, backend.pages
        )
        self.attention = AttentionStep(backend, kv_cache.block_size, tuple(group.window for group in kv_cache.groups))
        specs = {spec.layer_id: spec for spec in model.spec.attention_layers}
        model.bind_attention(
            {
                layer_id: PagedAttention(specs[layer_id], group, self.attention, self.kv_cache)
                for group, group_spec in enumerate(kv_cache.groups)
                for layer_id in group_spec.layer_ids
            }
        )
        self._state: ExecuteModelState | None = None

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_cache.num_bytes

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        assert self._state is None, "execute came twice without a sample between"
        self.balancer.execute(plan.commands)
        self._update_rows(plan)
        if plan.scheduled or plan.runs_forward:
            self.balancer.begin_forward(is_prefill=self.table.computes_prompt(plan.scheduled))
        if not plan.scheduled:
            if plan.runs_forward:
                self.model.forward_idle()
            self._state = ExecuteModelState(plan.step_id, None, None)
            return
        inputs = self._gather(plan)
        self.attention.begin(inputs.attention)
        try:
            logits = self.model(inputs.token_ids, inputs.positions, inputs.logits_rows)
        finally:
            self.attention.clear()
        routed = self.capturer.get_routed_experts(inputs.slot_mappings, plan.num_tokens)
        self._state = ExecuteModelState(plan.step_id, inputs, logits, routed)

    @torch.inference_mode()
    def sample(self, grammar_masks: torch.Tensor | None = None) -> AsyncOutput:
        """`grammar_masks` bool [S, V]: tokens allowed to each sampled row, None where every token is."""
        state, self._state = self._state, None
        assert state is not None, "sample came without an execute before"
        if state.inputs is None or state.logits is None:
            reports = self.balancer.end_step()
            return AsyncOutput(record_event(self.device), lambda: StepOutput(state.step_id, reports=reports))
        inputs = state.inputs
        num_sampled = len(inputs.sampled_rows)
        prompt_logprobs = self._prompt_logprobs(inputs, state.logits[num_sampled:])
        batch = self.sampling.gather(inputs.sampled_rows, inputs.sampled_positions)
        sampled = self.sampler(state.logits[:num_sampled], batch, grammar_masks)
        self.table.write_tokens(inputs.sampled_rows, inputs.sampled_positions, sampled.token_ids)
        return self._start_copy(state.step_id, inputs, sampled, prompt_logprobs, state.routed_experts)

    def _gather(self, plan: StepPlan) -> StepInputs:
        return gather_inputs(plan, self.table, self.kv_cache_config)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.close_rows:
            self.table.close(row)
            self.sampling.close(row)
        for opened in plan.open_rows:
            self.table.open(opened)
            self.sampling.open(opened)
        for scheduled in plan.scheduled:
            self.table.append_blocks(scheduled)

    def _prompt_logprobs(self, inputs: StepInputs, logits: torch.Tensor) -> LogprobsTensors | None:
        if inputs.prompt is None or not len(inputs.prompt.rows):
            return None
        most = max(self.table[row].sampling.prompt_logprobs or 0 for row in np.unique(inputs.prompt.rows))
        return token_logprobs(logits, inputs.prompt.next_token_ids, most)

    def _start_copy(
        self,
        step_id: int,
        inputs: StepInputs,
        sampled: SamplerOutput,
        prompt_logprobs: LogprobsTensors | None,
        routed_experts: RoutedExpertsRecord | None,
    ) -> AsyncOutput:
        """Starts the copies to the host; what they need is held by the closure until it is taken."""
        sampled_host = sampled.to("cpu")
        prompt_host = prompt_logprobs.to("cpu") if prompt_logprobs is not None else None
        routed_host = routed_experts.to("cpu") if routed_experts is not None else None
        wanted = self._prompt_rows(inputs)
        reports = self.balancer.end_step()

        def assemble() -> StepOutput:
            output = StepOutput(step_id, reports=reports)
            sampled_host.report(inputs.sampled_rows, output)
            for row, num_logprobs, entries in wanted:
                assert prompt_host is not None or not len(entries), "prompt positions without log-probabilities"
                output.prompt_logprobs[row] = [prompt_host.entry(index, num_logprobs) for index in entries]  # type: ignore[union-attr]
            if routed_host is not None:
                routed_host.report(inputs.rows, output)
            return output

        return AsyncOutput(record_event(self.device), assemble)

    def _prompt_rows(self, inputs: StepInputs) -> list[tuple[int, int, np.ndarray]]:
        """(row, candidates, entries of the step's prompt log-probabilities) of rows that asked for them."""
        if inputs.prompt is None:
            return []
        return [
            (row, self.table[row].sampling.prompt_logprobs or 0, np.flatnonzero(inputs.prompt.rows == row))
            for row in np.unique(inputs.prompt.rows).tolist()
        ]
