"""Options are the records' own fields, and what is not typed is told apart from what is."""

from dataclasses import fields
from typing import Annotated

import pytest
from cyclopts import App, Parameter

from trimtab.cli.argv import normalise_argv
from trimtab.cli.options import (
    DEFAULT_MAX_TOKENS,
    SAMPLING_HELP,
    EngineOptions,
    SamplingOptions,
    engine_config,
    given,
    sampling_params,
)
from trimtab.config import EngineConfig
from trimtab.sampling_params import SamplingParams


def parse(*argv: str) -> tuple[SamplingOptions | None, EngineOptions | None]:
    app = App(exit_on_error=False, print_error=False, result_action="return_value")

    @app.default
    def command(
        *,
        sampling: Annotated[SamplingOptions | None, Parameter(name="*")] = None,
        engine: Annotated[EngineOptions | None, Parameter(name="*")] = None,
    ):
        return sampling, engine

    return app(normalise_argv(argv))


def test_every_sampling_parameter_but_one_is_an_option_with_help():
    """`return_routed_experts` is, where a command has it, an option with the name of a file."""
    assert set(SAMPLING_HELP) == {option.name for option in fields(SamplingParams)} - {"return_routed_experts"}
    assert {option.name for option in fields(SamplingOptions)} == set(SAMPLING_HELP)


def test_every_engine_option_but_model_and_seed_is_a_flag():
    expected = {option.name for option in fields(EngineConfig)} - {"model", "seed"}
    assert {option.name for option in fields(EngineOptions)} == expected


def test_nothing_typed_is_nothing_given():
    assert [given(part) for part in parse()] == [{}, {}]


@pytest.mark.parametrize("argv", [["--max-num-seqs", "8"], ["--max_num_seqs", "8"], ["--max-num-seqs=8"]])
def test_kebab_snake_and_equals_spell_the_same_option(argv):
    assert given(parse(*argv)[1]) == {"max_num_seqs": 8}


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-enable-prefix-caching"],
        ["--enable-prefix-caching", "false"],
        ["--enable_prefix_caching", "False"],
        ["--enable-prefix-caching=false"],
    ],
)
def test_a_switch_can_be_turned_off_in_every_spelling(argv):
    assert given(parse(*argv)[1]) == {"enable_prefix_caching": False}


@pytest.mark.parametrize("argv", [["--logit-bias", '{"5": -1.5}'], ["--logit-bias.5", "-1.5"]])
def test_a_dict_is_json_or_dotted_and_its_keys_become_token_ids(argv):
    sampling, _ = parse(*argv)
    assert sampling_params(sampling).logit_bias == {5: -1.5}


def test_lists_repeat_and_negative_numbers_are_values():
    sampling, _ = parse("--stop", "a", "--stop", "b", "--top-k", "-1", "--presence-penalty", "-0.5")
    assert given(sampling) == {"stop": ["a", "b"], "top_k": -1, "presence_penalty": -0.5}


def test_bytes_are_a_number_or_text_with_a_unit():
    _, engine = parse("--kv-cache-memory-bytes", "2MiB")
    assert engine_config("m", engine).kv_cache_memory_bytes == 2 << 20
    _, engine = parse("--kv-cache-memory-bytes", "4096")
    assert engine_config("m", engine).kv_cache_memory_bytes == 4096


def test_typed_settings_win_over_the_checkpoints_and_those_over_vllms():
    sampling, _ = parse("--temperature", "0", "--max-tokens", "9")
    params = sampling_params(sampling, SamplingParams(temperature=0.7, top_p=0.8))
    assert (params.temperature, params.top_p, params.max_tokens, params.min_p) == (0.0, 0.8, 9, 0.0)


def test_min_tokens_above_the_default_max_tokens_raises_it():
    assert sampling_params(None).max_tokens == DEFAULT_MAX_TOKENS
    sampling, _ = parse("--min-tokens", "300")
    assert sampling_params(sampling).max_tokens == 300


@pytest.mark.parametrize(
    "argv",
    [
        ["--eplb-config", '{"window_size": 50, "min_gain": 0.5, "policy": "incremental", "log_balancedness": true}'],
        [
            "--eplb-config.window_size", "50", "--eplb-config.min-gain", "0.5",
            "--eplb-config.policy", "incremental", "--eplb-config.log_balancedness", "true",
        ],
    ],
)  # fmt: skip
def test_settings_of_balancing_are_json_or_dotted_and_keep_their_types(argv):
    _, engine = parse("--enable-eplb", "--enable-expert-parallel", *argv)
    eplb = engine_config("m", engine).eplb
    assert (eplb.window_size, eplb.min_gain, eplb.policy, eplb.log_balancedness) == (50, 0.5, "incremental", True)
