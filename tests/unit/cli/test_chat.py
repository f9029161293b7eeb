"""A conversation with a scripted model."""

import io
import os
import signal

import pytest

from trimtab.cli.chat import Conversation, answer, converse, obey, read_turns
from trimtab.sampling_params import SamplingParams
from trimtab.testing.scripted_llm import ScriptedLLM

PARAMS = SamplingParams(max_tokens=50)


def echo(prompt: str) -> str:
    if prompt == "bad":
        raise ValueError("prompt is bad; give a good one")
    return f"you said {prompt}"


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def talk(monkeypatch, text: str, llm: ScriptedLLM, conversation: Conversation) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return converse(llm, conversation, PARAMS, interactive=False)


def test_each_line_is_a_turn_and_the_history_goes_along(monkeypatch, capsys):
    llm = ScriptedLLM(echo)
    assert talk(monkeypatch, "one\n\ntwo\n", llm, Conversation("be brief")) == 0
    assert capsys.readouterr().out == "you said one\nyou said two\n"
    assert llm.conversations[1] == turns(
        ("system", "be brief"), ("user", "one"), ("assistant", "you said one"), ("user", "two")
    )


def test_a_turn_that_fails_leaves_no_trace_in_the_history(monkeypatch, capsys):
    llm, conversation = ScriptedLLM(echo), Conversation()
    assert talk(monkeypatch, "bad\none\n", llm, conversation) == 1
    assert conversation.turns == turns(("user", "one"), ("assistant", "you said one"))
    assert "error: prompt is bad" in capsys.readouterr().err


def test_reset_forgets_turns_but_not_the_system_message(capsys):
    conversation = Conversation("be brief", turns(("user", "one")))
    assert not obey("/reset", conversation)
    assert conversation.messages() == turns(("system", "be brief"))


def test_system_sets_or_drops_the_message_and_starts_over(capsys):
    conversation = Conversation(None, turns(("user", "one")))
    obey("/system talk like a sailor", conversation)
    assert conversation.messages() == turns(("system", "talk like a sailor"))
    obey("/system", conversation)
    assert conversation.messages() == []


def test_quit_ends_and_an_unknown_command_explains(monkeypatch, capsys):
    llm = ScriptedLLM(echo)
    assert talk(monkeypatch, "/dance\n/quit\nnever said\n", llm, Conversation()) == 0
    assert not llm.conversations
    assert "/dance is not a command" in capsys.readouterr().out


def test_ctrl_c_stops_the_answer_keeps_what_was_said_and_frees_the_request(capsys):
    class Interrupted(ScriptedLLM):
        def stream_chat(self, messages, params):
            for number, output in enumerate(super().stream_chat(messages, params)):
                if number == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                yield output

    llm, conversation = Interrupted(lambda prompt: "a b c d e"), Conversation()
    conversation.say("user", "go")
    before = signal.getsignal(signal.SIGINT)
    assert answer(llm, conversation, PARAMS)
    assert capsys.readouterr().out == "a b (stopped)\n"
    assert conversation.turns[-1] == {"role": "assistant", "content": "a b"}
    assert llm.num_open_streams == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_program(capsys):
    class Stuck(ScriptedLLM):
        def stream_chat(self, messages, params):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            yield from super().stream_chat(messages, params)

    conversation = Conversation()
    conversation.say("user", "go")
    with pytest.raises(KeyboardInterrupt):
        answer(Stuck(echo), conversation, PARAMS)


def test_ctrl_c_at_the_prompt_clears_the_line_and_ctrl_d_ends(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt(), "hello", EOFError()])

    def fake_input(prompt):
        event = next(typed)
        if isinstance(event, BaseException):
            raise event
        return event

    monkeypatch.setattr("builtins.input", fake_input)
    assert list(read_turns(interactive=True)) == ["hello"]
    assert "Ctrl-D leaves" in capsys.readouterr().out


def test_a_byte_that_is_no_text_does_not_end_a_piped_conversation(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), encoding="utf-8"))
    assert list(read_turns(interactive=False)) == ["a\ufffd", "b"]
