"""Spellings on the command line that are rewritten before parsing."""

from trimtab.cli.argv import normalise_argv


def test_a_boolean_value_is_joined_to_its_flag():
    assert normalise_argv(["--enable-prefix-caching", "false"]) == ["--enable-prefix-caching=false"]
    assert normalise_argv(["--eplb-config.use_async", "True"]) == ["--eplb-config.use_async=True"]


def test_other_values_stay_where_they_are():
    argv = ["generate", "--max_num_seqs", "8", "--logit-bias", '{"5": 1}', "prompts.txt"]
    assert normalise_argv(argv) == argv


def test_a_boolean_without_a_flag_before_it_is_left_alone():
    assert normalise_argv(["generate", "true"]) == ["generate", "true"]
    assert normalise_argv(["--json=false", "true"]) == ["--json=false", "true"]


def test_a_bare_dash_goes_behind_the_options_as_a_positional():
    assert normalise_argv(["generate", "-", "--json"]) == ["generate", "--json", "--", "-"]


def test_what_follows_a_double_dash_is_not_rewritten():
    assert normalise_argv(["--n", "2", "--", "--flag", "false"]) == ["--n", "2", "--", "--flag", "false"]
