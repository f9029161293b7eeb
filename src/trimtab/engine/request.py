"""One sequence the scheduler runs: its tokens, how far they are computed, and where it is in its life.

A user's request with `n > 1` becomes n of these (`spawn`), one per completion.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trimtab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimtab.engine.block_pool import BlockContent
    from trimtab.engine.routed_experts import FrozenRows


class RequestStatus(enum.Enum):
    """waiting -> running -> finished, with running -> preempted -> running as often as memory demands.

    Every status may turn to finished: a preempted request's last step in flight can bring its last token.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Written by the scheduler only; the block tables by the KV cache allocator only."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    bad_word_token_ids: list[list[int]] = field(default_factory=list)
    cache_salt: str | None = None
    max_total_tokens: int = 0  # prompt plus output, both limits (max_tokens, max_model_len) applied
    leader: Request | None = None  # the sibling whose prompt blocks this one waits for and shares

    dp_rank: int = 0  # the data-parallel rank it lives on
    arrival: int = 0  # place in that rank's queue, unique; set by the scheduler
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    token_ids: list[int] = field(default_factory=list)  # prompt, then accepted output
    # Since the request took its row: positions planned so far, and those whose step arrived.
    num_planned: int = 0
    num_computed: int = 0
    num_unseen_tokens: int = 0  # sampled by steps in flight: they have a position, the engine has not seen their value
    num_in_flight: int = 0  # steps
    row: int | None = None
    num_preemptions: int = 0
    guarded: bool = False  # admitted where its whole life fits: never preempted again in this residence
    num_cached_tokens: int | None = None  # prefix hits of the first admission; None before it
    first_scheduled_s: float | None = None

    block_tables: list[list[int]] = field(default_factory=list)  # per KV cache group
    num_left_behind: list[int] = field(default_factory=list)  # per group: leading blocks a sliding window gave up
    contents: list[BlockContent] = field(default_factory=list)  # root, then one per full block of known tokens
    num_published: int = 0  # full blocks offered to the prefix cache
    routed_rows: FrozenRows | None = None  # of a request that returns them; written by the rank's row store only

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens with a position, those still unseen included."""
        return len(self.token_ids) + self.num_unseen_tokens

    @property
    def num_ready(self) -> int:
        """Tokens a next step may compute: 0 once the last token the limits allow is sampled or in flight."""
        return 0 if self.num_tokens >= self.max_total_tokens else self.num_tokens - self.num_planned

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def stop_token_ids(self) -> list[int]:
        """The one stop set: every id that ends this request, whichever source named it (B121)."""
        return sorted(self.eos_token_ids.union(self.sampling.stop_token_ids))

    def accept(self, token_id: int) -> None:
        """Appends an output token and finishes the request if that token ends it."""
        assert not self.finished, f"request {self.request_id} is finished: it accepts no more tokens"
        self.token_ids.append(token_id)
        if self.num_output_tokens > self.sampling.min_tokens and token_id in self.eos_token_ids:
            self.finish("stop")
        elif self.num_output_tokens > self.sampling.min_tokens and token_id in self.sampling.stop_token_ids:
            self.finish("stop", stop_reason=token_id)
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish("length")

    def finish(self, reason: str, *, stop_reason: int | str | None = None, error: str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error


def spawn(request: Request) -> list[Request]:
    """The sequences of one user request: itself for n = 1, else n siblings with seeds seed, seed + 1, ...

    The siblings follow the first one so that its prompt is computed once and shared through the prefix cache.
    """
    if request.sampling.n == 1:
        return [request]
    siblings: list[Request] = []
    for index in range(request.sampling.n):
        sibling = replace(request, request_id=f"{index}_{request.request_id}", seed=_wrap_int64(request.seed + index))
        sibling.block_tables, sibling.num_left_behind, sibling.contents = [], [], []
        sibling.leader = siblings[0] if siblings else None
        siblings.append(sibling)
    return siblings


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
