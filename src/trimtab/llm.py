"""The Python door: prompts in, outputs out, by the names vLLM users know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trimtab.assemble import Parts, assemble, read_generation_config
from trimtab.config import config_from_options
from trimtab.engine.engine import MixedWeightsError
from trimtab.engine.executor.multiprocess import MAX_STEP_S
from trimtab.experts.data.capture import ExpertUsage
from trimtab.models.resolve import resolve_weights, weights_nbytes
from trimtab.observability.interrupts import hold_interrupts
from trimtab.observability.progress import progress_bar, stderr_is_terminal
from trimtab.outputs import CompletionOutput, RequestOutput
from trimtab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trimtab.experts.control.controller import Controller

# Of a disk, while several ranks read from it.
SLOWEST_READ_BYTES_PER_S = 20e6

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate.

        llm = LLM(model="demo")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Options are the fields of `EngineConfig`. A prompt is text, a list of token ids, or a mapping with "prompt" or
    "prompt_token_ids" (and "cache_salt"). Raises `ValueError` for what a person can mend.
    """

    def __init__(self, model: str = "demo", *, progress: bool | None = None, **options: Any) -> None:
        self.config = config_from_options({"model": model, **options})
        with progress_bar("loading", shown=progress) as report:
            self._parts: Parts = assemble(self.config, report)
        self.engine = self._parts.engine
        self._request_ids = itertools.count()
        self._outputs: dict[str, RequestOutput] = {}  # what steps gave of running requests, until their caller takes it

    # -- generating ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. A request that cannot run comes back with its `error`; the rest go on.

        `use_tqdm` (vLLM's name) shows a progress bar where stderr is a terminal.
        """
        batch = _as_batch(prompts)
        params = self._params_per_prompt(sampling_params, len(batch))
        outputs: dict[str, RequestOutput] = {}
        order: list[str] = []
        with self._aborting_on_failure(order):
            for prompt, sampling in zip(batch, params, strict=True):
                request_id = str(next(self._request_ids))
                order.append(request_id)
                if (failed := self._add(request_id, prompt, sampling)) is not None:
                    outputs[request_id] = failed
            with progress_bar("generating", shown=use_tqdm and stderr_is_terminal()) as report:
                self._run(order, outputs, report)
        return [outputs[request_id] for request_id in order]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to several. Raises `ValueError` with the template's message (B120)."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The growing output of one request, each time it has moved. Leaving the loop early aborts the request."""
        request_id = str(next(self._request_ids))
        failed = self._add(request_id, prompt, self._params_per_prompt(sampling_params, 1)[0], streaming=True)
        if failed is not None:
            yield failed
            return
        try:
            finished = False
            while not finished:
                if (output := self._outputs.pop(request_id, None)) is None:
                    self._step()
                else:
                    finished = output.finished
                    yield output
        finally:
            self._abort(request_id)

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        return self.stream(self.chat_prompt(messages), sampling_params)

    def chat_prompt(self, messages: Messages) -> dict[str, Any]:
        """A conversation as the checkpoint's chat template writes it: text and token ids."""
        tokenizer = self.get_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"{self._parts.spec.path.name} has no chat template; use generate with a plain prompt")
        if not messages:
            raise ValueError("messages ([]) must hold at least one message")
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever their author chose
            raise ValueError(f"the chat template refused the messages: {error}") from error
        # The template writes the special tokens itself.
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    # -- knowing -------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._parts.tokenizer is None:
            raise ValueError(f"{self._parts.spec.path.name} brings no tokenizer; give prompts as prompt_token_ids")
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, else vLLM's defaults."""
        recommended = read_generation_config(self._parts.spec.path)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return SamplingParams(**{name: recommended[name] for name in names if recommended.get(name) is not None})

    @property
    def vocab_size(self) -> int:
        return self._parts.spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, fitted to the KV cache."""
        return self._parts.max_model_len

    @contextmanager
    def expert_usage(self) -> Iterator[ExpertUsage]:
        """Counts tokens per [MoE layer, expert] while open. The prefix cache is emptied first: what it answers would
        pass no expert and not be counted."""
        if not self._parts.models:
            raise ValueError(
                f"expert_usage counts in this process, and distributed_executor_backend "
                f"({self.config.executor_backend!r}) runs the model in others; use 'threads'"
            )
        # The ranks of a token group see the same tokens: one of them counts.
        counted = self._parts.models[:: self.config.tensor_parallel_size]
        layers = [layer for model in counted for layer in model.moe_layers]
        usage = ExpertUsage(len(counted[0].moe_layers), max(layer.num_experts for layer in layers))
        self.engine.reset_prefix_cache()
        usage.attach(layers)
        try:
            yield usage
        finally:
            usage.detach(layers)

    def save_routed_experts(self, path: str | Path, outputs: Sequence[RequestOutput]) -> Path:
        """Writes the routed experts of finished outputs for trainers, whole or not at all (see `trimtab.replay`).

        Log-probabilities of the sampled tokens are written where `SamplingParams.logprobs` asked for them (0 will do).
        """
        from trimtab.replay.routes import RoutedModel, routes_of
        from trimtab.replay.routes_file import save_routes

        model = RoutedModel.of(self._parts.spec)
        return save_routes(path, (routes for output in outputs for routes in routes_of(output, model)))

    def stats(self) -> dict[str, Any]:
        """What the engine did and what it holds, as plain data: over all data-parallel ranks, and of each."""
        return {
            "model": self._parts.spec.architecture,
            "max_model_len": self.max_model_len,
            "memory_bytes": dict(self._parts.memory_bytes),
            "workers": [dict(facts) for facts in self._parts.rank_facts],
            **self.engine.stats(),
            "start_up_s": dict(self._parts.start_up_s),
        }

    def metrics_text(self) -> str:
        """The same numbers, and those of balancing, in Prometheus' text format (docs/eplb.md has the table)."""
        from trimtab.observability.metrics import exposition

        def snapshot() -> dict[str, Any]:
            eplb = {"eplb": self._controller().stats()} if self.config.enable_eplb else {}
            return {**self.stats(), "weights_version": self.engine.weights_version, **eplb}

        return exposition(snapshot)

    # -- balancing experts ---------------------------------------------------------------------------------------------

    def eplb_stats(self) -> dict[str, Any]:
        """What balancing did and sees: state, rearrangements by outcome, moves, bytes, balancedness (1 is even),
        the last decision's numbers, and the latest events."""
        return {**self._controller().stats(), "events": self._parts.events.recent()}

    def rearrange_experts(self) -> dict[str, Any]:
        """Decides now, whatever the gain, and serves on until experts are where they were decided to be; -> eplb_stats.

        Without load since the last decision nothing moves. Raises RuntimeError where a rank does not come to rest after
        a rearrangement that was aborted, and MixedWeightsError while new weights are half written.
        """
        controller = self._controller()
        self.engine.check_health()
        controller.request_rearrangement()
        while controller.wants_step:
            self._step()
            if reason := controller.overdue_reason:
                raise RuntimeError(
                    f"experts cannot be rearranged: a rank does not come to rest after an abort ({reason}); requests "
                    "go on, and the log names the rank; build a new engine to balance again"
                )
        return self.eplb_stats()

    def save_placement(self, path: str) -> None:
        """Writes the placement in force to a file that `initial_placement` reads."""
        from trimtab.experts.placement_file import write_placement

        write_placement(self._controller().placement, path)

    def update_weights(self, path: str, *, timeout_s: float | None = None) -> int:
        """New weights from a checkpoint of the same model, while requests run -> the weights' version, counted from 0.

        `path` is a folder of this machine. All files are checked on all ranks before anything changes: ValueError says
        what does not fit, and the old weights go on serving. Running requests go on with the new weights, on the keys
        and values they have; cached prefixes are forgotten. A failure after the first byte raises MixedWeightsError: no
        request is taken until weights were loaded whole.

        A rank that takes longer than `timeout_s` to check or to write them ends the engine; None: ten minutes, and more
        for files that are not read in that time at 20 MB/s.
        """
        folder, num_ranks = resolve_weights(path), self.config.num_ranks
        if timeout_s is None:  # each rank reads the dense part, and all ranks share a disk
            timeout_s = max(MAX_STEP_S, num_ranks * weights_nbytes(folder) / SLOWEST_READ_BYTES_PER_S)
        self.engine.request_refit(str(folder), num_ranks, timeout_s)
        while (result := self.engine.refit_result) is None:
            self._step()
        if result.is_harmed:
            raise MixedWeightsError(f"new weights from {path} failed halfway: {result.problem}; load whole ones")
        if result.problem:
            raise ValueError(f"weights ({path!r}) cannot be loaded: {result.problem}; the old ones serve on")
        return self.engine.weights_version

    def _controller(self) -> Controller:
        if not self.config.enable_eplb:
            raise ValueError("experts stay where they are: enable_eplb is off; switch it on")
        return cast("Controller", self.engine.balancer)

    def shutdown(self) -> None:
        """Ends what the engine started, requests that run included; safe to call twice. Experts that are on their way
        come to rest first."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _params_per_prompt(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if len(sampling_params) != count:
            raise ValueError(
                f"sampling_params ({len(sampling_params)}) must be as many as the prompts ({count}), or one for all"
            )
        return list(sampling_params)

    def _add(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, streaming: bool = False
    ) -> RequestOutput | None:
        """Queues a request; one that cannot run gives its failed output instead."""
        text, token_ids, cache_salt = None, None, None
        try:
            text, token_ids, cache_salt = _read_prompt(prompt)
            self.engine.add_request(
                request_id,
                token_ids if token_ids is not None else text or "",
                sampling,
                prompt_text=text,
                cache_salt=cache_salt,
                streaming=streaming,
            )
        except ValueError as error:
            completions = [CompletionOutput(index, "", [], finish_reason="error") for index in range(sampling.n)]
            return RequestOutput(request_id, text, list(token_ids or []), completions, finished=True, error=str(error))
        return None

    def _step(self) -> None:
        """One whole step, for all callers' requests: Ctrl-C waits for its end, after which the engine can go on."""
        with hold_interrupts():
            self._outputs.update((output.request_id, output) for output in self.engine.step())

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._outputs.pop(request_id, None)

    def _run(
        self, order: list[str], outputs: dict[str, RequestOutput], report: Callable[[str, int, int], None]
    ) -> None:
        waiting = set(order).difference(outputs)
        while waiting:
            self._step()
            for request_id in waiting.intersection(self._outputs):
                if (output := self._outputs.pop(request_id)).finished:
                    outputs[request_id] = output
                    waiting.remove(request_id)
                    report("requests", len(outputs), len(order))

    @contextmanager
    def _aborting_on_failure(self, request_ids: list[str]) -> Iterator[None]:
        """Ctrl-C or a fault: nothing of this call stays queued behind the caller's next one."""
        try:
            yield
        except BaseException:
            for request_id in request_ids:
                self._abort(request_id)
            raise


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    batch: list[Any] = list(prompts)
    is_one_prompt = bool(batch) and all(isinstance(token, int) for token in batch)
    return [batch] if is_one_prompt else batch


def _read_prompt(prompt: Any) -> tuple[str | None, list[int] | None, str | None]:
    """(text, token ids, cache salt); text is None where only ids are given, ids are None where only text is.

    Raises ValueError for what is no prompt.
    """
    text, token_ids, cache_salt = prompt, None, None
    if isinstance(prompt, Mapping):
        text, token_ids, cache_salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    elif not isinstance(prompt, str):
        text, token_ids = None, prompt
    if text is None and token_ids is None:
        raise ValueError(f"prompt ({prompt!r}) must be text, token ids, or have 'prompt' or 'prompt_token_ids'")
    for name, value in (("prompt", text), ("cache_salt", cache_salt)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} ({value!r}) must be text; give token ids as prompt_token_ids")
    if text is not None and not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt ({text[:40]!r}) is not valid Unicode ({error.reason}); decode it anew") from None
    if token_ids is not None and (isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Iterable)):
        raise ValueError(f"prompt_token_ids ({token_ids!r}) must be a list of token ids; give text as prompt")
    return text, None if token_ids is None else list(token_ids), cache_salt
