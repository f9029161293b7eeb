"""What a request gives back: record names and fields as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Logprob(NamedTuple):
    """Log-probability of one token at one position, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RoutedExpertsMeta:
    """What the rows and columns of a completion's `routed_experts` are."""

    layer_ids: tuple[int, ...]  # of the decoder layers, one per MoE layer of the array
    num_experts: int  # ids are in [0, num_experts)
    start: int = 0  # position of row 0 in prompt + output
    weights_versions: tuple[tuple[int, int], ...] = ((0, 0),)  # (first row, version that computed it and the next ones)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    `finish_reason`: "stop" (EOS, stop token or stop string), "length", "abort", "error", or None while it runs;
    `stop_reason`: the stop string or token id that ended it (None for EOS).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # integers [prompt + output tokens - 1 - start, num_moe_layers, top_k]: the last token was never computed
    routed_experts: np.ndarray | None = None
    routed_experts_meta: RoutedExpertsMeta | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times on the monotonic clock, seconds."""

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """All that is known of one request: whole when `finished`, a prefix before.

    `error` names why a request failed (its completions then say finish_reason "error"); other requests go on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
