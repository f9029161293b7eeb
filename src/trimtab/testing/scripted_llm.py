"""An `LLM` without a model, for testing what stands in front of one: answers come from a script, word by word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trimtab.outputs import CompletionOutput, RequestOutput
from trimtab.sampling_params import SamplingParams


class ScriptedTokenizer:
    """Words are tokens: a token id is the word's place in a list that grows as words are met."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[token] for token in token_ids)


class ScriptedLLM:
    """Answers each prompt with `answer(prompt text)`; a prompt that `answer` raises ValueError for fails alone.

    `conversations` keeps the messages of every chat turn, `params` the last sampling parameters.
    """

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self.tokenizer = ScriptedTokenizer()
        self.conversations: list[list[dict[str, str]]] = []
        self.params: SamplingParams | None = None
        self.num_open_streams = 0

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6)

    def chat_prompt(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Turns as "role: content"; raises ValueError for roles it does not know."""
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise ValueError(f"the chat template refused the messages: role {message['role']}")
        text = " ".join(f"{message['role']}: {message['content']}" for message in messages)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text)}

    def _output(self, request_id: str, prompt: Any, num_words: int | None = None) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt["prompt_token_ids"])
        prompt_ids = self.tokenizer.encode(text)
        try:
            words = self.answer(text).split()[: self.params.max_tokens if self.params else None]
        except ValueError as error:
            failed = CompletionOutput(0, "", [], finish_reason="error")
            return RequestOutput(request_id, text, prompt_ids, [failed], finished=True, error=str(error))
        shown = words if num_words is None else words[:num_words]
        finished = len(shown) == len(words)
        completion = CompletionOutput(0, " ".join(shown), self.tokenizer.encode(" ".join(shown)))
        completion.finish_reason = "stop" if finished else None
        return RequestOutput(request_id, text, prompt_ids, [completion], finished=finished)

    def generate(self, prompts: list[Any], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        self.params = params
        return [self._output(str(index), prompt) for index, prompt in enumerate(prompts)]

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.params = params
        self.conversations.append([dict(message) for message in messages])
        self.num_open_streams += 1
        try:
            num_words = 1
            while True:
                output = self._output("chat", messages[-1]["content"], num_words)
                yield output
                if output.finished:
                    return
                num_words += 1
        finally:
            self.num_open_streams -= 1
