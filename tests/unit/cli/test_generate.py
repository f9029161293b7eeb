"""What `trimtab generate` prints, with a scripted model behind it."""

import json

import pytest

import trimtab.cli.generate as generate_module
from trimtab.cli.generate import generate
from trimtab.cli.options import SamplingOptions
from trimtab.testing.scripted_llm import ScriptedLLM


def answer(prompt: str) -> str:
    if "bad" in prompt:
        raise ValueError("prompt is bad; give a good one")
    return f"answer to {prompt}"


@pytest.fixture
def llm(monkeypatch):
    scripted = ScriptedLLM(answer)
    monkeypatch.setattr(generate_module, "open_llm", lambda model, engine: scripted)
    return scripted


def test_one_prompt_prints_its_text_and_nothing_else(llm, capsys):
    assert generate(prompt=["one"]) == 0
    assert capsys.readouterr().out == "answer to one\n"


def test_several_prompts_are_headed_by_their_label(llm, capsys):
    generate(prompt=["one", "two"])
    assert capsys.readouterr().out == "[0] one\nanswer to one\n\n[1] two\nanswer to two\n\n"


def test_one_bad_prompt_fails_alone_and_the_exit_code_says_so(llm, capsys):
    assert generate(prompt=["one", "bad", "two"]) == 1
    printed = capsys.readouterr()
    assert "answer to one" in printed.out
    assert "answer to two" in printed.out
    assert printed.err == "error: prompt 1 (bad): prompt is bad; give a good one\n"


def test_json_gives_one_line_per_prompt_in_order_with_errors_in_place(llm, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\nnot json\n{"prompt": "bad"}\n')
    assert generate(file, json_lines=True) == 1
    first, unreadable, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["index"], first["prompt"], first["error"]) == (0, "one", None)
    assert first["outputs"][0]["text"] == "answer to one"
    assert first["outputs"][0]["finish_reason"] == "stop"
    assert (unreadable["index"], unreadable["outputs"]) == (1, [])
    assert "line 2: not JSON" in unreadable["error"]
    assert bad["error"] == "prompt is bad; give a good one"


def test_chat_puts_prompts_through_the_template_with_the_system_message(llm, capsys):
    generate(prompt=["hello"], chat=True, system="be kind")
    assert capsys.readouterr().out == "answer to system: be kind user: hello\n"


def test_messages_that_the_template_refuses_fail_alone(llm, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "pope", "content": "x"}]}\n{"prompt": "one"}\n')
    assert generate(file) == 1
    printed = capsys.readouterr()
    assert "chat template refused the messages: role pope" in printed.err
    assert "answer to one" in printed.out


def test_the_checkpoints_sampling_is_used_unless_typed(llm):
    generate(prompt=["one"])
    assert (llm.params.temperature, llm.params.max_tokens) == (0.6, 256)
    generate(prompt=["one"], sampling=SamplingOptions(temperature=0.0, max_tokens=1))
    assert (llm.params.temperature, llm.params.max_tokens) == (0.0, 1)


def test_bad_settings_are_refused_before_the_model_is_looked_for(monkeypatch):
    def fail(*_):
        raise AssertionError("the model must not be touched")

    monkeypatch.setattr(generate_module, "open_llm", fail)
    with pytest.raises(ValueError, match="temperature"):
        generate(prompt=["one"], sampling=SamplingOptions(temperature=-1.0))
    with pytest.raises(ValueError, match="--system needs --chat"):
        generate(prompt=["one"], system="x")
