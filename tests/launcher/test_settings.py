"""Which of the command line, the variables and the default counts."""

from __future__ import annotations

import pytest

from dlaunch.errors import UsageError
from dlaunch.launcher.options import OPTIONS, Option
from dlaunch.launcher.settings import gather, gather_flags

VALUED = [option for option in OPTIONS if not option.is_flag]
FLAGS = [option for option in OPTIONS if option.is_flag]


@pytest.mark.parametrize("option", VALUED, ids=lambda option: option.dest)
def test_the_order_of_command_line_variables_and_default_is_wrong(option: Option) -> None:
    environ = {variable: f"from {variable}" for variable in option.variables}
    setting = gather({option.dest: "typed"}, environ)[option.dest]
    assert (setting.value, setting.origin) == ("typed", option.name)
    for variable in option.variables:
        setting = gather({}, environ)[option.dest]
        assert (setting.value, setting.origin) == (f"from {variable}", variable)
        del environ[variable]
    setting = gather({}, environ)[option.dest]
    assert (setting.value, setting.is_default) == (option.default, True)


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.dest)
def test_a_flag_does_not_follow_its_variables(option: Option) -> None:
    default = option.default == option.name
    assert gather_flags({}, {})[option.dest] is default
    for variable in option.variables:
        assert gather_flags({}, {variable: "1"})[option.dest] is True
        assert gather_flags({}, {variable: "0"})[option.dest] is False
        assert gather_flags({option.dest: True}, {variable: "0"})[option.dest] is True
        assert gather_flags({option.dest: False}, {variable: "1"})[option.dest] is False


@pytest.mark.parametrize(
    ("word", "truth"),
    [
        *[(word, True) for word in ("1", "true", "True", "yes", "ON", " 1 ", "2")],
        *[(word, False) for word in ("0", "false", "no", "off", "")],
    ],
)
def test_a_word_for_a_truth_is_misread(word: str, truth: bool) -> None:
    assert gather_flags({}, {"PET_STANDALONE": word})["standalone"] is truth


def test_a_word_that_is_no_truth_is_taken() -> None:
    with pytest.raises(UsageError, match="PET_STANDALONE is 'maybe'"):
        gather_flags({}, {"PET_STANDALONE": "maybe"})


def test_an_empty_variable_hides_a_weaker_one() -> None:
    settings = gather({}, {"DLAUNCH_NNODES": "", "PET_NNODES": "2"})
    assert settings["nnodes"].value == "2"


@pytest.mark.parametrize("value", ["--tee", "--log_dir", "--nnodes=2", "--grace"])
def test_a_flag_is_taken_for_the_value_of_the_one_before(value: str) -> None:
    with pytest.raises(UsageError, match="--role needs a value, but '--"):
        gather({"role": value}, {})


def test_a_value_with_dashes_that_is_no_flag_is_refused() -> None:
    assert gather({"role": "--x"}, {})["role"].value == "--x"


def test_two_options_share_a_name_or_a_variable() -> None:
    spellings = [spelling for option in OPTIONS for spelling in option.spellings]
    variables = [variable for option in OPTIONS for variable in option.variables]
    assert len(spellings) == len(set(spellings))
    assert len(variables) == len(set(variables))
