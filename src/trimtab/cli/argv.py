"""Command-line spellings that vLLM users type and cyclopts does not take, rewritten to ones it does."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OPTION = re.compile(r"--[A-Za-z][\w.-]*")
_BOOLEANS = {"true", "false"}


def normalise_argv(argv: Sequence[str]) -> list[str]:
    """Returns `argv` with `--flag false` as `--flag=false` and a bare `-` (stdin) behind `--`.

    Joining needs no list of boolean flags: for an option that takes a value, both spellings mean the same.
    What follows a `--` stays as it is.
    """
    tokens = list(argv)
    split = tokens.index("--") if "--" in tokens else len(tokens)
    options, positional = tokens[:split], tokens[split + 1 :]
    rewritten: list[str] = []
    for token in options:
        if token == "-":
            positional.insert(0, token)
        elif token.lower() in _BOOLEANS and rewritten and _OPTION.fullmatch(rewritten[-1]):
            rewritten[-1] += f"={token}"
        else:
            rewritten.append(token)
    return [*rewritten, "--", *positional] if positional else rewritten
