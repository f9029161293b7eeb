"""Checks a request against everything that is known before it is scheduled: a bad one fails alone, by name."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from trimtab.engine.config import SchedulerConfig
from trimtab.engine.kv_cache import longest_request
from trimtab.plan import KVCacheConfig
from trimtab.sampling_params import SamplingParams


class RequestLimits:
    """What a request may ask of this model and this KV cache.

    Raises ValueError where the KV cache cannot hold one request of `max_model_len` tokens.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        kv_cache: KVCacheConfig,
        vocab_size: int,
        *,
        stores_routed_experts: bool = False,
    ) -> None:
        self.stores_routed_experts = stores_routed_experts
        self.max_model_len = scheduler.max_model_len
        self.vocab_size = vocab_size
        longest = longest_request(kv_cache, scheduler.max_num_batched_tokens, self.max_model_len)
        if longest < self.max_model_len:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) must be at most {longest}, the longest request that fits in the "
                f"KV cache ({kv_cache.num_blocks - 1} blocks of {kv_cache.block_size} tokens); lower it or give more "
                "KV memory"
            )

    def check(self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The prompt as a list of ints. Raises ValueError naming value, bound and remedy."""
        try:
            prompt = [operator.index(token_id) for token_id in prompt_token_ids]
        except TypeError:
            raise ValueError(f"request {request_id!r}: the prompt must be text or a list of token ids") from None
        if not prompt:
            raise ValueError(f"request {request_id!r}: the prompt is empty; give at least one token")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"request {request_id!r}: the prompt has {len(prompt)} tokens and must have at most "
                f"{self.max_model_len - 1} (max_model_len {self.max_model_len}, less one token of output); shorten it"
            )
        self._check_vocabulary("prompt token id", prompt)
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        self._check_vocabulary("logit_bias token id", sampling.logit_bias)
        self._check_vocabulary("allowed_token_ids", sampling.allowed_token_ids or ())
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(sampling, name)) is not None and count > self.vocab_size:
                raise ValueError(f"{name} ({count}) must be at most {self.vocab_size}, the vocabulary's size; lower it")
        self._check_routed_experts(len(prompt), sampling)
        return prompt

    def max_total_tokens(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        """The length at which a request ends, prompt included."""
        if sampling.max_tokens is None:
            return self.max_model_len
        return min(num_prompt_tokens + sampling.max_tokens, self.max_model_len)

    def _check_routed_experts(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        start = sampling.routed_experts_prompt_start
        if not self.stores_routed_experts and (sampling.return_routed_experts or start):
            name = "return_routed_experts" if sampling.return_routed_experts else "routed_experts_prompt_start"
            raise ValueError(
                f"{name} ({getattr(sampling, name)}) needs an engine with enable_return_routed_experts; this one "
                "captures none: start it with that option or leave this out"
            )
        if start > num_prompt_tokens:
            raise ValueError(
                f"routed_experts_prompt_start ({start}) must be in [0, {num_prompt_tokens}], the prompt's length; "
                "lower it"
            )

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{name} ({token_id}) must be in [0, {self.vocab_size - 1}], the model's vocabulary; "
                    "check that the tokenizer belongs to this model"
                )
