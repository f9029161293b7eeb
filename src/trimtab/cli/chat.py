"""`trimtab chat`: a conversation in the terminal, or one answer per line of stdin."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trimtab.cli.generate import open_llm
from trimtab.cli.options import EngineOptions, SamplingOptions, sampling_params

if TYPE_CHECKING:
    from trimtab.llm import LLM
    from trimtab.outputs import RequestOutput
    from trimtab.sampling_params import SamplingParams

HELP = """/reset          forget the conversation
/system TEXT    set the system message and start over; without TEXT, drop it
/help           this list
/quit           leave (so does Ctrl-D)
Ctrl-C stops the answer, not the program."""


@dataclass(slots=True)
class Conversation:
    """Whose turn said what; the system message stands in front and survives a reset."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        front = [{"role": "system", "content": self.system}] if self.system else []
        return [*front, *self.turns]

    def say(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def reset(self) -> None:
        self.turns.clear()


class StopFlag:
    """Ctrl-C during an answer sets `raised`; the loop looks at it between tokens, so no engine step is cut short.

    A second Ctrl-C ends the program.
    """

    raised = False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            raise KeyboardInterrupt
        self.raised = True

    @contextmanager
    def watching(self) -> Iterator[StopFlag]:
        self.raised = False
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


def answer(llm: LLM, conversation: Conversation, params: SamplingParams) -> bool:
    """Streams the model's turn to stdout and keeps it, as far as it came. False when the request failed."""
    said, error = "", None
    with StopFlag().watching() as stop:
        stream: Iterator[RequestOutput] = iter(())
        try:
            stream = llm.stream_chat(conversation.messages(), params)
            for output in stream:
                error = output.error
                if output.outputs:
                    text = output.outputs[0].text  # the whole of it so far
                    print(text[len(said) :], end="", flush=True)
                    said = text
                if stop.raised:
                    break
        except ValueError as fault:
            error = str(fault)
        finally:
            if isinstance(stream, Generator):
                stream.close()  # ends the request in the engine
    print(" (stopped)" if stop.raised else "", flush=True)
    if error:
        print(f"error: {error}", file=sys.stderr)
        conversation.turns.pop()  # the user's turn that got no answer would spoil the next one
        return False
    conversation.say("assistant", said)
    return True


def obey(command: str, conversation: Conversation) -> bool:
    """Runs a /command. True when the conversation is over."""
    name, _, rest = command.partition(" ")
    if name in ("/quit", "/exit"):
        return True
    if name == "/reset":
        conversation.reset()
        print("(forgotten)")
    elif name == "/system":
        conversation.reset()
        conversation.system = rest.strip() or None
        print(f"(system message: {conversation.system or 'none'})")
    else:
        if name != "/help":
            print(f"{name} is not a command")
        print(HELP)
    return False


def read_turns(interactive: bool) -> Iterator[str]:
    """What the user types, or the lines of stdin. Ctrl-C at the prompt clears the line; Ctrl-D ends."""
    if not interactive:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a byte that is no text must not end the conversation
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  (gives input() its line editing and history)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)")


def converse(llm: LLM, conversation: Conversation, params: SamplingParams, *, interactive: bool) -> int:
    """The conversation until it ends. Returns 1 when a turn of piped input failed."""
    failed = False
    for line in read_turns(interactive):
        if not line.strip():
            continue
        if line.startswith("/"):
            if obey(line.strip(), conversation):
                break
            continue
        conversation.say("user", line)
        failed = not answer(llm, conversation, params) or failed
    return 1 if failed and not interactive else 0


def chat(
    *,
    model: str = "demo",
    system: str | None = None,
    sampling: Annotated[SamplingOptions | None, Parameter(name="*")] = None,
    engine: Annotated[EngineOptions | None, Parameter(name="*")] = None,
) -> int:
    """Talk with a model; the answer streams. With piped stdin, each line is one turn.

    In the conversation: /reset forgets it, /system TEXT sets the system message, /quit leaves; Ctrl-C stops an answer.

    Sampling settings that are not typed come from the checkpoint's generation_config.json, then from the defaults.

    Parameters
    ----------
    model
        A folder with a Hugging Face MoE checkpoint, or demo.
    system
        The system message, in front of the conversation.
    """
    if (n := sampling_params(sampling).n) != 1:
        raise ValueError(f"n ({n}) must be 1 in a chat; trimtab generate --chat gives several answers")
    llm = open_llm(model, engine)
    params = sampling_params(sampling, llm.get_default_sampling_params())
    interactive = sys.stdin.isatty()
    if interactive:
        print("/help lists the commands.")
    return converse(llm, Conversation(system), params, interactive=interactive)
