"""The reference and the code say the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dlaunch.environ import PASSWORD_VARIABLE
from dlaunch.errors import ExitCode
from dlaunch.launcher.main import command_line
from dlaunch.launcher.options import BY_SPELLING, OPTIONS, Option, normalize
from dlaunch.launcher.rdzv_conf import KEYS, WITHOUT_EFFECT
from dlaunch.launcher.specify import specify

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
HOW_TO = REFERENCE.parent / "how-to"
PAGES = sorted(REFERENCE.glob("*.md"))
NOT_OURS = {"--help", "--version", "--local-rank"}  # common to all commands; handed to the script
EXAMPLES = {"--log"}  # what torchrun would take for an abbreviation


def read(name: str) -> str:
    return (REFERENCE / name).read_text()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.dest)
def test_an_option_is_not_in_the_reference_as_it_is(option: Option) -> None:
    rows = [
        row for row in read("cli.md").splitlines() if row.startswith("|") and f"`{option.name}" in row.split(" | ")[0]
    ]
    assert len(rows) == 1, rows
    flag, default, variables, meaning = re.split(r"(?<!\\)\|", rows[0])[1:5]
    for spelling in option.spellings:
        assert f"`{spelling}" in flag
    assert option.metavar.replace("|", "\\|") in flag
    assert default.strip() == (f"`{option.default}`" if option.default else "off" if option.is_flag else "")
    assert variables.strip() == ", ".join(f"`{variable}`" for variable in option.variables)
    assert meaning.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_an_option_that_does_not_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", page.read_text()))
    assert {flag for flag in named if normalize(flag) not in BY_SPELLING} <= NOT_OURS | EXAMPLES


# Read by dlaunch.parallel, and no flag of the command.
OF_THE_LIBRARY = {"DLAUNCH_DDP_TRANSPORT", "DLAUNCH_FSDP_TRANSPORT"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_a_variable_that_does_not_exist(page: Path) -> None:
    named = set(re.findall(r"\b(?:PET|DLAUNCH)_[A-Z_]+\b", page.read_text()))
    known = {variable for option in OPTIONS for variable in option.variables}
    assert named <= known | OF_THE_LIBRARY | {PASSWORD_VARIABLE}


def test_a_key_of_rdzv_conf_is_not_in_the_reference() -> None:
    section = read("cli.md").partition("### The keys of")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    told = [key for row in rows for key in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert sorted(told) == sorted(KEYS)
    without_effect = [key for row in rows if "no effect" in row.lower() for key in re.findall(r"`(\w+)`", row[:40])]
    assert set(WITHOUT_EFFECT) <= set(without_effect)


def test_the_password_is_not_in_the_reference() -> None:
    assert f"| `{PASSWORD_VARIABLE}` |" in read("environment.md")


def test_a_command_is_not_in_the_reference() -> None:
    for command in command_line().commands:
        assert f"dlaunch [{command}]" in read("cli.md")


def test_an_exit_code_is_not_in_the_reference() -> None:
    told = dict(re.findall(r"^\| (\d+) \| (\w+) \|", read("exit-codes.md"), re.MULTILINE))
    assert told == {str(code.value): code.name for code in ExitCode}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_nowhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).is_file(), target


def commands(page: Path) -> list[str]:
    """What a page tells to type after `dlaunch`, a line each."""
    text = page.read_text().replace("\\\n", " ")
    typed = re.findall(r"^(?:srun [^\n]*?)?dlaunch +(-[^\n]*\.py[^\n]*)$", text, re.MULTILINE)
    listed = re.findall(r"^command: \[dlaunch, (.*)\]$", text, re.MULTILINE)
    return typed + [words.replace(",", "") for words in listed]


@pytest.mark.parametrize("page", sorted(HOW_TO.glob("*.md")), ids=lambda page: page.name)
def test_a_command_of_a_page_is_refused(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(re.sub(r"\$\w+", "4", command))
        given = dict(command_line().commands["run"].make_context("dlaunch", words).params)
        script = given.pop("command")
        spec = specify(given, script, {PASSWORD_VARIABLE: ""}, interpreter="python", new_run_id="new")
        assert (spec.rendezvous is not None) == ("--nnodes" in command), command


def test_the_page_on_many_nodes_shows_no_commands() -> None:
    assert len(commands(HOW_TO / "many-nodes.md")) > 5


def test_a_variable_that_a_worker_sees_is_not_in_the_reference() -> None:
    from dlaunch.environ import Meeting, Place, worker_environment

    seen = worker_environment(
        Place(rank=0, local_rank=0, world_size=2, local_world_size=2),
        Meeting("127.0.0.1", 1, served_by_agent=True),
        run_id="id",
        restart_count=0,
        max_restarts=0,
        error_file="",
        signals="",
        inherited={"CUDA_VISIBLE_DEVICES": "0,1"},
        virtual_local_rank=True,
    )
    assert {name for name in seen if f"`{name}`" not in read("environment.md")} == set()


def test_a_variable_of_the_library_is_not_in_the_reference() -> None:
    reference = (REFERENCE / "environment.md").read_text()
    assert {name for name in OF_THE_LIBRARY if f"`{name}`" not in reference} == set()
