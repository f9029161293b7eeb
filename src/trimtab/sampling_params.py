"""What a request asks of the sampler: names, ranges and defaults as vLLM has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Below this temperature logits / temperature overflows fp32 before the softmax; the limit of sampling there is greedy.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 1000
MAX_N = 1024


def _number(name: str, value: Any, low: float, high: float, remedy: str, *, low_open: bool = False) -> float:
    """Returns `value` as a float inside the range, or raises. Written so that NaN fails (B115)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} ({value!r}) must be a number; {remedy}")
    inside = (low < value if low_open else low <= value) and value <= high
    if not (inside and math.isfinite(value)):
        bracket = "(" if low_open else "["
        raise ValueError(f"{name} ({value}) must be in {bracket}{low}, {high}]; {remedy}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} ({value!r}) must be an integer; {remedy}")
    if not low <= value <= high:
        raise ValueError(f"{name} ({value}) must be in [{low}, {high}]; {remedy}")
    return value


def _listed(name: str, value: Any, remedy: str) -> list[Any]:
    """`value` as a list of its own; None is empty. A string is refused: it would fall apart into characters."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} ({value!r}) must be a list; {remedy}")
    return list(value)


def _biased_token(token: Any) -> int:
    """JSON and the command line have only text for keys."""
    if isinstance(token, str) and token.strip().isdecimal():
        token = int(token)
    return _integer("logit_bias", token, 0, 2**31 - 1, "keys are token ids")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    Field names, meanings and defaults are vLLM's. `temperature=0` is greedy, and so is any temperature below 1e-5.
    Raises `ValueError` naming the field, its value, the range and a remedy.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: no limit
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the model's length
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    return_routed_experts: bool | None = None  # None: where the engine stores them (enable_return_routed_experts)
    routed_experts_prompt_start: int = 0  # rows begin at this position of the prompt

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N, "ask for at least one completion")
        self.temperature = _number("temperature", self.temperature, 0.0, 100.0, "0 is greedy, 1 samples as trained")
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, "1 keeps every token", low_open=True)
        self.top_k = max(_integer("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 keeps every token"), 0)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0, "0 keeps every token")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1, "leave it out for a fresh one")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "None generates up to the model's length")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "0 sets no minimum")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens}); lower it")
        self.stop = [self.stop] if isinstance(self.stop, str) else _listed("stop", self.stop, "give strings")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop ({self.stop!r}) must hold non-empty strings; drop the others")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids instead")
        self.stop_token_ids = [
            _integer("stop_token_ids", token, 0, 2**31 - 1, "give token ids")
            for token in _listed("stop_token_ids", self.stop_token_ids, "give token ids")
        ]
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, _number(name, getattr(self, name), -2.0, 2.0, "0 sets no penalty"))
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 sets no penalty", low_open=True
        )
        if not isinstance(self.logit_bias or {}, Mapping):
            raise ValueError(f"logit_bias ({self.logit_bias!r}) must map token ids to numbers, as in {{42: -5}}")
        self.logit_bias = {
            _biased_token(token): _number(f"logit_bias[{token}]", bias, -100.0, 100.0, "0 sets no bias")
            for token, bias in (self.logit_bias or {}).items()
        }
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _listed("allowed_token_ids", self.allowed_token_ids, "give token ids")
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids ([]) must name at least one token; None allows every token")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0, 2**31 - 1, "give token ids")
        self.bad_words = _listed("bad_words", self.bad_words, "give words")
        if any(not isinstance(word, str) or not word.strip() for word in self.bad_words):
            raise ValueError(f"bad_words ({self.bad_words!r}) must hold words with visible characters; drop the others")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, MAX_LOGPROBS, "None leaves them out")
        if not isinstance(self.return_routed_experts, bool | None):
            raise ValueError(
                f"return_routed_experts ({self.return_routed_experts!r}) must be true or false; leave it out to get "
                "them where the engine stores them"
            )
        start = self.routed_experts_prompt_start
        _integer("routed_experts_prompt_start", start, 0, 2**31 - 1, "0 returns the whole prompt's rows")
        if start and self.return_routed_experts is False:
            raise ValueError(
                f"routed_experts_prompt_start ({start}) needs return_routed_experts; switch it on or set 0"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE
