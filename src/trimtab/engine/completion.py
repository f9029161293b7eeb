"""Builds what the user sees of a request from what its sequences gave: text, log-probabilities, one merged output."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trimtab.engine.detokenizer import Decoder, IncrementalDetokenizer
from trimtab.engine.request import Request
from trimtab.engine.scheduler import Progress
from trimtab.engine.stop import StopStringFinder
from trimtab.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trimtab.plan import TokenLogprobs


class Completion:
    """One sequence's text and log-probabilities so far. `decoder` None: no text is made.

    `streaming`: outputs bring the routed experts known so far, and not the last one alone.
    """

    def __init__(self, request: Request, decoder: Decoder | None, streaming: bool = False) -> None:
        sampling = request.sampling
        self.request = request
        self.streaming = streaming
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if sampling.logprobs is None else []
        self.cumulative_logprob: float | None = None if sampling.logprobs is None else 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first token
        self._decoder = decoder
        self._detokenizer: IncrementalDetokenizer | None = None
        if decoder is not None:
            self._detokenizer = IncrementalDetokenizer(
                decoder, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
            )
        self._stop = StopStringFinder(sampling.stop)
        self._searched_from = 0  # stop strings count only in text made after min_tokens

    def take(self, progress: Progress) -> str | None:
        """Adds one step's progress. Returns the stop string that now ends the text, if one does; text and stop are cut
        to size, and the caller finishes the request."""
        self._take_prompt_logprobs(progress)
        if progress.token_id is None:
            if progress.request.finished:
                self.close()
            return None
        if self.logprobs is not None and progress.logprobs is not None:
            self.logprobs.append(self._logprob_dict(progress.logprobs))
            assert self.cumulative_logprob is not None, "both are kept or neither"
            self.cumulative_logprob += float(progress.logprobs.logprobs[0])
        if self._detokenizer is None:
            return None
        request = progress.request
        # A token that ended the request is not part of the text, unless the user wants to see what stopped it.
        silent = request.finish_reason == "stop" and not request.sampling.include_stop_str_in_output
        delta = "" if silent else self._detokenizer.push(progress.token_id)
        found = self._add_text(delta)
        if found is None and request.finished:
            found = self.close()
        return found

    def close(self) -> str | None:
        """The end of the sequence: an incomplete character comes out as it is. Returns as `take` does."""
        return self._add_text(self._detokenizer.flush()) if self._detokenizer is not None else None

    def output(self, index: int) -> CompletionOutput:
        request = self.request
        text = self.text
        if not request.finished and (held := self._stop.num_held_back(text[self._searched_from :])):
            text = text[:-held]
        output = CompletionOutput(
            index=index,
            text=text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        if request.routed_rows is not None and (self.streaming or request.finished):
            output.routed_experts, output.routed_experts_meta = request.routed_rows.output(writable=request.finished)
        return output

    def _add_text(self, delta: str) -> str | None:
        self.text += delta
        sampling = self.request.sampling
        if self.request.num_output_tokens <= sampling.min_tokens:
            self._searched_from = len(self.text)
            return None
        if not sampling.stop or not delta:
            return None
        match = self._stop.find(self.text, len(delta), start=self._searched_from)
        if match is None:
            return None
        start, end, string = match
        self.text = self.text[: end if sampling.include_stop_str_in_output else start]
        return string

    def _take_prompt_logprobs(self, progress: Progress) -> None:
        if self.prompt_logprobs is None:
            return
        for position, entry in enumerate(progress.prompt_logprobs or [], progress.prompt_start + 1):
            if position == len(self.prompt_logprobs):  # what a preempted prompt computes again is known already
                self.prompt_logprobs.append(self._logprob_dict(entry))

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the candidates in order of rank."""
        found: dict[int, Logprob] = {}
        pairs = zip(entry.token_ids.tolist(), entry.logprobs.tolist(), strict=True)
        for place, (token_id, logprob) in enumerate(pairs):
            text = None if self._decoder is None else self._decoder.decode([token_id], skip_special_tokens=False)
            found.setdefault(token_id, Logprob(logprob, entry.rank if place == 0 else place, text))
        return found


@dataclass(slots=True)
class UserRequest:
    """What the user asked for: one prompt and its n completions, seen as one output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        return all(completion.request.finished for completion in self.completions)

    def note_token(self) -> None:
        self.metrics.last_token_s = time.monotonic()
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = self.metrics.last_token_s

    def output(self) -> RequestOutput:
        requests = [completion.request for completion in self.completions]
        first = self.completions[0]
        outputs = [completion.output(index) for index, completion in enumerate(self.completions)]
        metrics = RequestMetrics(  # a copy: outputs given out stay as they are
            self.metrics.arrival_s,
            requests[0].first_scheduled_s,
            self.metrics.first_token_s,
            self.metrics.last_token_s,
            sum(request.num_preemptions for request in requests),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=all(completion.finished for completion in outputs),
            prompt_logprobs=None if first.prompt_logprobs is None else list(first.prompt_logprobs),
            num_cached_tokens=requests[0].num_cached_tokens or 0,
            metrics=metrics,
            error=next((request.error for request in requests if request.error is not None), None),
        )
