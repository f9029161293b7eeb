"""Command-line options made from the records they fill: `SamplingParams` and `EngineConfig`, name for name."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from trimtab.config import EngineConfig, config_from_options
from trimtab.sampling_params import SamplingParams

# Settings that a checkpoint's generation_config.json may recommend (`LLM.get_default_sampling_params`).
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# vLLM's 16 is for programs; a person at a terminal wants an answer.
DEFAULT_MAX_TOKENS = 256

SAMPLING_HELP = {
    "n": "completions per prompt",
    "temperature": "0 is greedy, 1 samples as trained",
    "top_p": "keep the likeliest tokens that reach this probability together",
    "top_k": "keep this many of the likeliest tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the likeliest one's probability",
    "seed": "makes this prompt's samples repeatable",
    "max_tokens": "most tokens to generate",
    "min_tokens": "tokens before an end is allowed",
    "stop": "text that ends the answer; repeat for more",
    "stop_token_ids": "token id that ends the answer; repeat for more",
    "ignore_eos": "go on past the end-of-text token",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "presence_penalty": "lower tokens that occurred, in [-2, 2]",
    "frequency_penalty": "lower tokens by how often they occurred, in [-2, 2]",
    "repetition_penalty": "divide the scores of tokens seen; 1 is none",
    "logit_bias": "added to tokens' scores: '{\"42\": -5}' or --logit-bias.42 -5",
    "allowed_token_ids": "only these token ids; repeat for more",
    "bad_words": "text never to write; repeat for more",
    "logprobs": "log-probabilities of this many tokens per position (with --json)",
    "prompt_logprobs": "the same for the prompt's tokens (with --json)",
    "detokenize": "make text from the tokens",
    "skip_special_tokens": "leave special tokens out of the text",
    "routed_experts_prompt_start": "routed experts begin at this position of the prompt",
}

SAMPLING_GROUP = Group("Sampling", sort_key=10)
ENGINE_GROUP = Group("Engine", sort_key=20)


def _on_the_command_line(hint: Any) -> Any:
    """`hint` with dict keys as text: every key arrives as text, the record converts and checks it."""
    if get_origin(hint) is dict:
        return dict.__class_getitem__((str, get_args(hint)[1]))
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_on_the_command_line(part) for part in get_args(hint))]  # noqa: UP007
    return hint


def _default_text(name: str, default: Any) -> str:
    if name == "max_tokens":
        default = DEFAULT_MAX_TOKENS
    if default is None or default is False or default == [] or default == {}:
        return ""
    return f" (default: the checkpoint's, else {default})" if name in RECOMMENDED else f" (default: {default})"


def _options_class(record: type, helps: dict[str, str], group: Group, leave_out: tuple[str, ...] = ()) -> Any:
    """A dataclass with `record`'s fields, all None until typed, so that `given` can tell what the user set."""
    hints = get_type_hints(record)
    columns: list[tuple[str, Any, Any]] = []
    for option in fields(record):
        if option.name in leave_out:
            continue
        default = option.default if option.default is not MISSING else None
        hint: Any = _on_the_command_line(hints[option.name])
        # A switch that is off needs no second spelling to say so; --flag false works for all.
        negative = "" if default is False else None
        text = helps[option.name] + _default_text(option.name, default)
        parameter = Parameter(help=text, group=group, negative_bool=negative)
        columns.append((option.name, Annotated[hint | None, parameter], field(default=None)))
    made = make_dataclass(f"{record.__name__}Options", columns, kw_only=True)
    made.__module__ = __name__  # cyclopts takes classes of standard library modules for plain values
    return made


if TYPE_CHECKING:

    class SamplingOptions: ...

    class EngineOptions: ...
else:
    SamplingOptions = _options_class(
        SamplingParams,
        SAMPLING_HELP,
        SAMPLING_GROUP,
        leave_out=("return_routed_experts",),  # a command that writes them has an option of this name for the file
    )
    EngineOptions = _options_class(
        EngineConfig,
        {option.name: option.metadata["help"] for option in fields(EngineConfig)},
        ENGINE_GROUP,
        leave_out=("model", "seed"),  # --model stands first in every command; --seed is the sampling one
    )


def given(options: SamplingOptions | EngineOptions | None) -> dict[str, Any]:
    """The options that the user typed, by name."""
    if options is None:
        return {}
    typed = {name: value for name, value in vars(options).items() if value is not None}
    if "eplb_config" in typed:
        typed["eplb_config"] = {key.replace("-", "_"): _value(text) for key, text in typed["eplb_config"].items()}
    return typed


def _value(text: Any) -> Any:
    """A setting of any type arrives as text: numbers, true, false and null as JSON writes them, all else is text."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def engine_config(model: str, options: EngineOptions | None) -> EngineConfig:
    """Raises `ValueError` for a setting outside its range, before anything is read."""
    return config_from_options({"model": model, **given(options)})


def sampling_params(options: SamplingOptions | None, defaults: SamplingParams | None = None) -> SamplingParams:
    """`SamplingParams` from what was typed, then from `defaults`, what the checkpoint recommends."""
    typed = given(options)
    chosen = {"max_tokens": max(DEFAULT_MAX_TOKENS, typed.get("min_tokens", 0)), **typed}
    return replace(defaults or SamplingParams(), **chosen)
