"""Prompts from arguments, files and stdin; one bad line spoils no other."""

import io
from pathlib import Path

import pytest

from trimtab.cli.prompts import PromptLine, as_chat, parse_lines, read_prompts


def lines(*text: str, records_only: bool = False) -> list[PromptLine]:
    return list(parse_lines(text, "f", records_only=records_only))


def test_each_line_of_text_is_a_prompt_and_blank_lines_are_skipped():
    assert [prompt.text for prompt in lines("one\n", "\n", "  \n", "two\r\n")] == ["one", "two"]


def test_records_may_stand_among_lines_of_text():
    found = lines('{"prompt": "a"}', '{"prompt_token_ids": [1, 2], "id": 7}', "{x} is a set", '{"b": 1}')
    assert [prompt.text for prompt in found] == ["a", None, "{x} is a set", '{"b": 1}']
    assert found[1].token_ids == [1, 2]


def test_messages_are_kept_as_they_are():
    messages = [{"role": "user", "content": "hi"}]
    assert lines('{"messages": [{"role": "user", "content": "hi"}]}')[0].messages == messages


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("plain", "f line 1: not JSON"),
        ("[1]", "f line 1: not a JSON object"),
        ('{"text": "a"}', "expected one of prompt, messages, prompt_token_ids, found none"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "found prompt, prompt_token_ids"),
        ('{"prompt": 5}', r"prompt \(5\) must be a string"),
        ('{"prompt_token_ids": [1, "2"]}', "must be a list of integers"),
        ('{"prompt_token_ids": [true]}', "must be a list of integers"),
        ('{"messages": []}', "must be a list of objects with role and content"),
        ('{"prompt": "a", "max_tokens": 5}', r"max_tokens would be lost; .*--max-tokens"),
    ],
)
def test_a_bad_record_is_an_error_of_its_own_line(line, error):
    bad, good = lines(line, '{"prompt": "good"}', records_only=True)
    assert good.text == "good"
    with pytest.raises(ValueError, match=error):
        raise ValueError(bad.error)


def test_arguments_come_before_the_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("from file\n")
    assert [prompt.text for prompt in read_prompts(["from argument"], file)] == ["from argument", "from file"]


def test_a_dash_is_stdin_and_so_is_nothing_at_all(monkeypatch):
    for file in (Path("-"), None):
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
        assert [prompt.text for prompt in read_prompts(None, file)] == ["one", "two"]


def test_no_prompt_at_all_says_how_to_give_one(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ValueError, match=r"no prompt; give --prompt"):
        read_prompts(None, None)


def test_a_file_that_is_missing_or_not_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"prompt file nowhere.txt cannot be read"):
        read_prompts(None, Path("nowhere.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes.txt cannot be read .*give a UTF-8 text"):
        read_prompts(None, tmp_path / "bytes.txt")


def test_as_chat_makes_the_text_the_users_turn():
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
    assert as_chat(PromptLine(text="hi"), None).messages == [user]
    assert as_chat(PromptLine(text="hi"), "be brief").messages == [system, user]
    assert as_chat(PromptLine(token_ids=[1]), "be brief").token_ids == [1]


def test_labels_are_short_and_of_one_line():
    assert PromptLine(text="a\nb").label == "a b"
    assert len(PromptLine(text="x" * 100).label) == 60
    assert PromptLine(token_ids=[1, 2]).label == "2 token ids"


def test_a_line_of_stdin_that_is_not_utf8_fails_alone(monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\xfe two\nthr\xc3\xa9\n"), encoding="ascii")
    )
    one, bad, three = read_prompts(None, Path("-"))
    assert (one.text, three.text) == ("one", "thré")
    assert bad.error == "stdin line 2: not UTF-8 text; convert the input to UTF-8"


def test_an_argument_that_is_not_utf8_fails_alone():
    """Python hands such bytes of the command line over as lone surrogates."""
    bad, good = read_prompts(["\udcff", "good"], None)
    assert bad.error == "argument 0: not UTF-8 text"
    assert good.text == "good"
