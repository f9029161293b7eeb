"""The engine: requests in, steps planned and launched, outputs out."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.engine.admission import RequestLimits
from trimtab.engine.balancing import Balancer, NoBalancer, Refitting
from trimtab.engine.completion import Completion, UserRequest
from trimtab.engine.config import CacheConfig, SchedulerConfig
from trimtab.engine.data_parallel import DataParallelScheduler
from trimtab.engine.detokenizer import Decoder, Tokenizer
from trimtab.engine.kv_cache import KVCacheAllocator
from trimtab.engine.request import Request, spawn
from trimtab.engine.scheduler import Progress, RowStore, Scheduler
from trimtab.engine.stats import rank_stats, total_stats
from trimtab.engine.stop import bad_word_token_ids
from trimtab.experts.routed_experts import RoutedExpertsLayout
from trimtab.outputs import RequestMetrics, RequestOutput
from trimtab.plan import Executor, KVCacheConfig, PendingStep, StepPlan
from trimtab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trimtab.engine.routed_experts import FrozenRows
    from trimtab.experts.control.refit import RefitResult

logger = logging.getLogger(__name__)

# Between plans of commands alone, which nobody's tokens wait for: the mover and the policy need the cores more.
COMMAND_STEP_PAUSE_S = 0.001

# Until all ranks have read a checkpoint's headers, or an open rearrangement has come to rest.
REFIT_TIMEOUT_S = 300.0

# An engine that is shut down waits so long for its movers to come to rest; then its ranks end in the midst of it.
DRAIN_TIMEOUT_S = 3.0


class EngineDeadError(RuntimeError):
    """The engine met a fault that no request is to blame for, and takes no more work. `__cause__` is that fault."""


class MixedWeightsError(RuntimeError):
    """New weights could not be written whole: no request is taken until a refit succeeds."""


class Engine:
    """Runs requests to their ends, many per step.

    1. `add_request` checks and queues; a request that cannot run raises ValueError and harms no other.
    2. `step` while `has_unfinished`: each call takes one step's tokens and returns the requests they moved. While only
       `has_work`, a step brings the experts on their way further.
    3. `abort` ends a request early and gives its last output. 4. `shutdown` ends the ranks, their movers at rest.

    The limits of `scheduler` and the blocks of `kv_cache` are those of each data-parallel rank. With `routed_experts`,
    the form in which workers capture them, outputs say which experts each token used.
    """

    def __init__(
        self,
        executor: Executor,
        kv_cache: KVCacheConfig,
        scheduler: SchedulerConfig,
        *,
        vocab_size: int,
        data_parallel_size: int = 1,
        cache: CacheConfig | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        weights_version: str = "",
        balancer: Balancer | None = None,
        routed_experts: RoutedExpertsLayout | None = None,
    ) -> None:
        cache = cache or CacheConfig(block_size=kv_cache.block_size)
        self.executor = executor
        self.tokenizer = tokenizer
        # The Rust tokenizer behind a transformers one decodes a step's few tokens three times as fast.
        self._decoder: Decoder | None = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.limits = RequestLimits(scheduler, kv_cache, vocab_size, stores_routed_experts=routed_experts is not None)
        self.async_depth = scheduler.async_depth
        allocators = [
            KVCacheAllocator(
                kv_cache,
                max_step_tokens=scheduler.max_num_batched_tokens,
                enable_prefix_caching=cache.enable_prefix_caching,
                weights_version=weights_version,
            )
            for _ in range(data_parallel_size)
        ]
        self.routed_experts = routed_experts
        self.scheduler = DataParallelScheduler(
            [
                Scheduler(scheduler, allocator, _row_store(routed_experts, kv_cache, allocator))
                for allocator in allocators
            ]
        )
        self.balancer = balancer or NoBalancer()
        self.weights_version = self.balancer.weights_version  # counts refits
        self._is_shut_down = False
        self.in_flight: deque[tuple[list[StepPlan], PendingStep]] = deque()
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(seed)
        self._requests: dict[str, UserRequest] = {}
        self._completions: dict[Request, tuple[UserRequest, Completion]] = {}
        self._cause: BaseException | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would bring something on: requests, or experts on their way."""
        return bool(self._requests) or self.balancer.wants_step

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def step(self) -> list[RequestOutput]:
        """Keeps `async_depth` steps in flight, takes the oldest one's output and returns the requests it moved."""
        self._check_alive()
        try:
            self._launch()
            if not self.in_flight:
                assert not self._requests, "unfinished requests, none in flight and none that can be scheduled"
                return []
            return self._take_oldest()
        except Exception as cause:
            return self._die(cause)
        except BaseException as cause:  # Ctrl-C: nobody knows how far the worker came with the step
            self._die(cause)
            raise

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
        streaming: bool = False,
    ) -> None:
        """Queues a prompt: text (needs a tokenizer) or token ids, whose text may be given for the record.

        Raises ValueError for what cannot run; other requests are not touched. Without a tokenizer outputs have token
        ids and no text. `data_parallel_rank` None: the rank with the fewest unfinished sequences.
        `streaming`: every output, not the last one alone, brings the routed experts so far. Its rows stay as they are
        and more follow, so what came new since the last output is what lies behind that one's length.
        """
        self.check_health()
        if request_id in self._requests:
            raise ValueError(f"request_id ({request_id!r}) names a request that is still running; give another")
        num_ranks = len(self.scheduler.ranks)
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < num_ranks:
            raise ValueError(
                f"data_parallel_rank ({data_parallel_rank}) must be in [0, {num_ranks - 1}], this engine's ranks; "
                "leave it out to take the least loaded"
            )
        # A copy, checked again: the caller may have changed the fields since, and may change them while it runs.
        sampling = replace(sampling) if sampling else SamplingParams()
        text = prompt if isinstance(prompt, str) else prompt_text
        token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        prompt_token_ids = self.limits.check(request_id, token_ids, sampling)
        if sampling.bad_words and self.tokenizer is None:
            raise ValueError(f"bad_words ({sampling.bad_words!r}) need a tokenizer; this engine has none")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop ({sampling.stop!r}) needs a tokenizer; this engine has none, use stop_token_ids")
        request = Request(
            request_id,
            prompt_token_ids,
            sampling,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=frozenset() if sampling.ignore_eos else self._eos_token_ids,
            bad_word_token_ids=bad_word_token_ids(sampling.bad_words, self.tokenizer) if self.tokenizer else [],
            cache_salt=cache_salt,
            max_total_tokens=self.limits.max_total_tokens(len(prompt_token_ids), sampling),
        )
        self._queue(request, text, data_parallel_rank, streaming)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request with finish_reason "abort", frees its blocks and returns its last output.

        None for ids that are unknown or finished already: that is no error (B119).
        """
        user_request = self._requests.get(request_id)
        if user_request is None:
            return None
        for completion in user_request.completions:
            self._finish(completion, "abort")
        return self._collect(user_request)

    def reset_prefix_cache(self, weights_version: str | None = None) -> None:
        """Forgets all cached prefixes; new weights bring their `weights_version`."""
        for rank in self.scheduler.ranks:
            rank.allocator.reset_prefix_cache(weights_version)

    def request_refit(self, path: str, num_ranks: int, timeout_s: float) -> None:
        """New weights from `path` on all ranks; `step` brings them, and `refit_result` tells how it ended. A rank that
        takes longer than `timeout_s` to check or to write them ends the engine.

        Raises ValueError while others are being loaded.
        """
        self._check_alive()
        if not timeout_s > 0:
            raise ValueError(f"timeout_s ({timeout_s}) must be above 0 seconds; leave it out to have it from the files")
        if isinstance(self.balancer, NoBalancer):
            from trimtab.experts.control.refit_only import RefitOnly  # off means absent

            self.balancer = RefitOnly(num_ranks, REFIT_TIMEOUT_S, num_in_flight=len(self.in_flight))
        assert isinstance(self.balancer, Refitting)
        self.balancer.request_refit(path, self.weights_version + 1, timeout_s)

    @property
    def refit_result(self) -> RefitResult | None:
        """Of the last refit that ended; None while one is open and before the first."""
        return self.balancer.refit_result if isinstance(self.balancer, Refitting) else None

    def check_health(self) -> None:
        """Raises EngineDeadError once the engine or one of its workers has met a fault, also while nothing runs, and
        MixedWeightsError while new weights are half written."""
        self._check_alive()
        try:
            self.executor.check_health()
        except Exception as cause:
            raise EngineDeadError(f"the engine stopped: {cause!r}; build a new one") from cause
        if reason := self.balancer.unhealthy_reason:
            raise MixedWeightsError(f"new weights failed halfway ({reason}); load weights that are whole")

    def stats(self) -> dict[str, Any]:
        """What was done and what is held, as plain data: over all data-parallel ranks, and under "ranks" of each.

        Sequences are counted there; `num_unfinished` at the top counts requests.
        """
        ranks = [rank_stats(rank) for rank in self.scheduler.ranks]
        total = total_stats(ranks)
        return {**total, "num_unfinished": self.num_unfinished, "ranks": ranks}

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Requests that run inside are no traffic to the balancer: its clock stands, its window stays as it is, and
        they start no rearrangement; so it is again afterwards, however the block ends (B26)."""
        self.balancer.begin_warm_up()
        try:
            yield
        finally:
            self.balancer.end_warm_up()

    def shutdown(self) -> None:
        """Ends everything that was started, requests that run included; safe to call twice.

        A rearrangement that is open is aborted first, so that movers rest before their ranks end; one that does not
        come to rest in time, or an engine that met a fault, is ended all the same.
        """
        try:
            if not self._is_shut_down and self._cause is None:
                self._drain()
        finally:
            self._is_shut_down = True
            self.balancer.close()
            self.executor.shutdown()

    def _launch(self) -> None:
        while len(self.in_flight) < self.async_depth and (plans := self._next_plans()):
            self.in_flight.append((plans, self.executor.execute(plans)))

    def _take_oldest(self) -> list[RequestOutput]:
        plans, pending = self.in_flight.popleft()
        outputs = pending.get()
        reports = [report for output in outputs for report in output.reports]
        self.balancer.on_reports(reports, time.monotonic())
        self._note_weights()
        moved = self._emit(self.scheduler.advance(plans, outputs))
        if (reason := self.balancer.unhealthy_reason) and self._requests:
            moved += self._fail_requests(f"the weights cannot be computed with: {reason}")
        return moved

    def _drain(self) -> None:
        """Plans of commands alone, until the balancer has nothing open on any rank. Bounded: what a rank does not
        answer in time is not waited for."""
        self.balancer.drain()
        if not self.balancer.wants_step:
            return
        for request_id in list(self._requests):
            self.abort(request_id)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        try:
            while self.balancer.wants_step:
                self._launch()
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self.in_flight[0][1].wait(left_s):
                    logger.warning("experts were moving at shutdown and did not come to rest in %g s", DRAIN_TIMEOUT_S)
                    return
                self._take_oldest()
        except Exception as cause:  # a rank that fails now would have ended anyway
            self._die(cause)
            logger.warning("experts were moving at shutdown, and a rank failed: %r", cause)

    def _note_weights(self) -> None:
        """With new weights nothing that was computed with the old ones is found any more. Requests that run go on, on
        the keys and values they have; what is captured says which weights it comes from."""
        version = self.balancer.weights_version
        if version != self.weights_version:
            self.weights_version = version
            self.reset_prefix_cache(str(version))
            for rank in self.scheduler.ranks:
                rank.row_store.weights_version = version

    def _next_plans(self) -> list[StepPlan] | None:
        """The plans of the next step, one per data-parallel rank; all of them carry the balancer's commands."""
        plans = None if self.balancer.holds_requests else self.scheduler.schedule()
        if plans is None and self.balancer.wants_step:
            time.sleep(COMMAND_STEP_PAUSE_S)
            plans = self.scheduler.command_step()
        if plans is not None:
            commands = self.balancer.commands(runs_forward=plans[0].runs_forward, now=time.monotonic())
            for plan in plans:
                plan.commands = commands
        return plans

    # -- requests in ---------------------------------------------------------------------------------------------------

    def _encode(self, prompt: str) -> Sequence[int]:
        if self.tokenizer is None:
            raise ValueError(f"prompt ({prompt[:40]!r}) is text and this engine has no tokenizer; give token ids")
        return self.tokenizer.encode(prompt) if prompt else []

    def _queue(self, request: Request, text: str | None, rank: int | None, streaming: bool) -> None:
        decoder = self._decoder if request.sampling.detokenize else None
        completions = [Completion(sequence, decoder, streaming) for sequence in spawn(request)]
        for completion in completions:
            completion.request.routed_rows = _frozen_rows(self.routed_experts, request.sampling)
        metrics = RequestMetrics(arrival_s=time.monotonic())
        user_request = UserRequest(request.request_id, text, request.prompt_token_ids, completions, metrics)
        self._requests[request.request_id] = user_request
        for completion in completions:
            self._completions[completion.request] = (user_request, completion)
        self.scheduler.add([completion.request for completion in completions], rank)

    # -- outputs out ---------------------------------------------------------------------------------------------------

    def _emit(self, progress: list[Progress]) -> list[RequestOutput]:
        moved: dict[str, UserRequest] = {}
        for part in progress:
            user_request, completion = self._completions[part.request]
            if (stop_string := completion.take(part)) is not None:
                self._stop_at(completion, stop_string)
            self._freeze_rows(completion)
            if part.token_id is not None:
                user_request.note_token()
            if part.token_id is not None or part.request.finished:
                moved[user_request.request_id] = user_request
        return [self._collect(user_request) for user_request in moved.values()]

    def _stop_at(self, completion: Completion, stop_string: str) -> None:
        if completion.request.finished:  # it also met its length: the text ends at the stop string all the same
            completion.request.finish("stop", stop_reason=stop_string)
        else:
            self.scheduler.finish(completion.request, "stop", stop_reason=stop_string)

    def _freeze_rows(self, completion: Completion) -> None:
        """Rows that were not captured fail a request that returns them: nothing else may stand in for them."""
        request = completion.request
        if completion.streaming and not request.finished:
            self.scheduler.freeze_rows(request)
        if request.routed_rows is not None and request.routed_rows.gap and request.finish_reason != "error":
            if request.finished:
                request.finish("error", error=request.routed_rows.gap)
            else:
                self._finish(completion, "error", request.routed_rows.gap)

    def _finish(self, completion: Completion, reason: str, error: str | None = None) -> None:
        if not completion.request.finished:
            completion.close()
            self.scheduler.finish(completion.request, reason, error=error)

    def _collect(self, user_request: UserRequest) -> RequestOutput:
        """The request's output; a finished request is forgotten with it."""
        if user_request.finished:
            del self._requests[user_request.request_id]
            for completion in user_request.completions:
                del self._completions[completion.request]
        return user_request.output()

    # -- faults --------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(f"the engine stopped: {self._cause!r}; build a new one") from self._cause

    def _die(self, cause: BaseException) -> list[RequestOutput]:
        """Fails every unfinished request. What steps in flight would still bring is not waited for."""
        self._cause = cause
        self.in_flight.clear()
        return self._fail_requests(f"the engine stopped: {cause!r}")

    def _fail_requests(self, error: str) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for user_request in list(self._requests.values()):
            for completion in user_request.completions:
                self._finish(completion, "error", error=error)
            outputs.append(self._collect(user_request))
        return outputs


def _row_store(
    layout: RoutedExpertsLayout | None, kv_cache: KVCacheConfig, allocator: KVCacheAllocator
) -> RowStore | None:
    if layout is None:
        return None
    from trimtab.engine.routed_experts import RoutedExpertsStore  # off means absent

    return RoutedExpertsStore(layout, kv_cache, allocator.pool)


def _frozen_rows(layout: RoutedExpertsLayout | None, sampling: SamplingParams) -> FrozenRows | None:
    """Room for the rows of a sequence that returns them."""
    if layout is None or sampling.return_routed_experts is False:
        return None
    from trimtab.engine.routed_experts import FrozenRows

    return FrozenRows(layout, sampling.routed_experts_prompt_start)
