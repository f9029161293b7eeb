"""Where `trimtab generate` gets its prompts: arguments, a file, or stdin; one bad line spoils no other."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trimtab.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_KEYS = frozenset(option.name for option in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt to run: text, chat messages or token ids; or `error`, why it cannot be run."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """A few words to tell it from the others."""
        if self.text is not None:
            label = self.text
        elif self.messages is not None:
            label = str(self.messages[-1]["content"])
        else:
            label = f"{len(self.token_ids)} token ids" if self.token_ids is not None else "unreadable"
        label = " ".join(label.split())
        return label if len(label) <= 60 else label[:59] + "…"


def _checked_messages(messages: Any, where: str) -> PromptLine:
    complete = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
            for message in messages
        )
    )
    if not complete:
        remedy = 'write [{"role": "user", "content": "..."}]'
        return PromptLine(error=f"{where}: messages must be a list of objects with role and content; {remedy}")
    return PromptLine(messages=messages)


def _from_record(record: dict[str, Any], where: str) -> PromptLine:
    found = [key for key in PROMPT_KEYS if key in record]
    if len(found) != 1:
        return PromptLine(
            error=f"{where}: expected one of {', '.join(PROMPT_KEYS)}, found {', '.join(found) or 'none'}"
        )
    if lost := sorted(_SAMPLING_KEYS & record.keys()):
        flag = "--" + lost[0].replace("_", "-")
        return PromptLine(error=f"{where}: {', '.join(lost)} would be lost; give sampling settings as flags ({flag})")
    value = record[found[0]]
    if found[0] == "messages":
        return _checked_messages(value, where)
    if found[0] == "prompt":
        if isinstance(value, str):
            return PromptLine(text=value)
        return PromptLine(error=f"{where}: prompt ({value!r}) must be a string")
    if isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        return PromptLine(token_ids=value)
    return PromptLine(error=f"{where}: prompt_token_ids ({value!r}) must be a list of integers")


def parse_lines(lines: Iterable[str], source: str, *, records_only: bool) -> Iterator[PromptLine]:
    """One prompt per line, blank lines skipped.

    A line that is a JSON object with one of `PROMPT_KEYS` is read as a record, its further keys ignored.
    Other lines are text, unless `records_only` (a .jsonl file), where they are errors.
    """
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        where = f"{source} line {number}"
        if not _is_text(line):
            yield PromptLine(error=f"{where}: not UTF-8 text; convert the input to UTF-8")
            continue
        record, fault = None, "not a JSON object"
        if records_only or line.lstrip().startswith("{"):
            try:
                record = json.loads(line)
            except ValueError as error:
                fault = f"not JSON ({error})"
        if isinstance(record, dict) and (records_only or any(key in record for key in PROMPT_KEYS)):
            yield _from_record(record, where)
        elif records_only:
            yield PromptLine(error=f'{where}: {fault}; write {{"prompt": "..."}}')
        else:
            yield PromptLine(text=line)


def _is_text(line: str) -> bool:
    """False where a byte that is not UTF-8 was read: it stands as a lone surrogate, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in line)


def read_prompts(arguments: list[str] | None, file: Path | None) -> list[PromptLine]:
    """Prompts of the arguments, then of `file` ("-" is stdin; so is neither, when stdin is not a terminal)."""
    prompts = [
        PromptLine(text=text) if _is_text(text) else PromptLine(error=f"argument {index}: not UTF-8 text")
        for index, text in enumerate(arguments or [])
    ]
    if file is None and not prompts and not sys.stdin.isatty():
        file = Path("-")
    if file is not None and str(file) == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # one bad line spoils no other
        prompts += parse_lines(sys.stdin, "stdin", records_only=False)
    elif file is not None:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"prompt file {file} cannot be read ({error}); give a UTF-8 text or .jsonl file"
            ) from error
        prompts += parse_lines(lines, str(file), records_only=file.suffix == ".jsonl")
    if not prompts:
        raise ValueError('no prompt; give --prompt "...", a FILE with one prompt per line, or lines on stdin')
    return prompts


def as_chat(prompt: PromptLine, system: str | None) -> PromptLine:
    """`prompt` as messages: its text becomes the user's turn, `system` goes in front."""
    if prompt.text is None and prompt.messages is None:
        return prompt
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return PromptLine(messages=[{"role": "system", "content": system}, *messages] if system else messages)
