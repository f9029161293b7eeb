"""The engine's settings: how many requests share a step, and how KV memory is accounted for."""

from __future__ import annotations

from dataclasses import dataclass


def _at_least(name: str, value: int, low: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {low}; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step. Prompts are always prefilled in chunks of what the token budget leaves.

    `max_model_len` is the final limit on prompt plus output, already fitted to the KV cache: admission knows no other.
    """

    max_num_seqs: int = 64  # requests that hold a row, and so share a step, at a time
    max_num_batched_tokens: int = 2048  # tokens of one step
    max_model_len: int = 4096
    async_depth: int = 2  # steps in flight: 1 waits for each step's tokens before the next is planned
    max_preemptions: int = 3  # after so many, a request is admitted only where it can run to its end undisturbed

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1, "one request at a time is the least")
        _at_least("max_model_len", self.max_model_len, 2, "a prompt token and an output token are the least")
        _at_least("max_preemptions", self.max_preemptions, 0, "0 readmits a preempted request only where it is safe")
        if self.async_depth not in (1, 2):
            raise ValueError(f"async_depth ({self.async_depth!r}) must be 1 or 2; 2 overlaps the host with the device")
        _at_least(
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            self.max_num_seqs,
            f"each of max_num_seqs ({self.max_num_seqs}) rows needs a token per step: raise it or lower max_num_seqs",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How the KV cache is cut and shared. The composition root decides its size (`trimtab.plan.KVCacheConfig`)."""

    block_size: int = 16  # tokens per block
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1, "16 suits most models")
