"""What of a command line is dlaunch's, and what is the script's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dlaunch.launcher.main import command_line, main
from dlaunch.launcher.mistakes import summary_file
from dlaunch.launcher.options import OPTIONS, Option


def parsed(*words: str) -> tuple[dict[str, object], list[str]]:
    """The options that were given, by dest, and the script with its arguments."""
    run = command_line().commands["run"]
    given = dict(run.make_context("dlaunch", list(words)).params)
    command = given.pop("command")
    return {dest: value for dest, value in given.items() if value is not None}, list(command)


@pytest.mark.parametrize(
    "rest",
    [
        ["--log", "x", "-t", "3", "--help", "--", "a"],
        ["--nproc-per-node", "9", "--nproc_per_node=8"],
        ["--", "--", "-m"],
        ["-h"],
        ["--version"],
        ["--no-such-flag", ""],
        ["--shutdown_timeout", "a_b", "--a_b_c=d_e"],
        ["run"],
        ["${local_rank}", "$$", "*", "\udcff", "\u00e9"],
    ],
)
def test_an_argument_of_the_script_is_taken_or_changed(rest: list[str]) -> None:
    assert parsed("--tee", "3", "train.py", *rest) == ({"tee": "3"}, ["train.py", *rest])
    assert parsed("train.py", *rest) == ({}, ["train.py", *rest])


def test_two_dashes_before_the_script_reach_it() -> None:
    assert parsed("--standalone", "--", "train.py", "--", "a") == ({"standalone": True}, ["train.py", "--", "a"])


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.dest)
def test_a_spelling_of_an_option_is_not_understood(option: Option) -> None:
    for spelling in option.spellings:
        for written in {spelling, spelling[:2] + spelling[2:].replace("-", "_")}:
            if option.is_flag:
                assert parsed(written, "x") == ({option.dest: spelling != option.negative}, ["x"])
            else:
                assert parsed(written, "v_1-2", "x") == ({option.dest: "v_1-2"}, ["x"])
                attached = f"{written}=v_1" if written.startswith("--") else f"{written}v_1"
                assert parsed(attached, "x") == ({option.dest: "v_1"}, ["x"])


def test_an_earlier_value_beats_a_later_one() -> None:
    assert parsed("--tee", "1", "-t", "2", "--grace", "1", "--shutdown-timeout", "2", "x")[0] == {
        "tee": "2",
        "shutdown_timeout": "2",
    }


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["run", "--help"], ["--nnodes", "2", "--help"]])
def test_the_help_does_not_list_every_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for option in OPTIONS:
        for spelling in option.spellings:
            assert spelling in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_help_shows_spellings_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "--nproc_per_node" not in capsys.readouterr().out


def test_the_version_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    from dlaunch import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dlaunch {__version__}\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--bogus", "train.py", "--summary-json", "theirs"], None),
        (["train.py", "--summary-json", "theirs"], None),
        (["--", "--summary-json", "theirs"], None),
        (["--summary-json", "ours", "--bogus"], "ours"),
        (["run", "--tee=3", "-m", "-r3", "-t", "1", "--summary_json=ours", "--bogus"], "ours"),
        (["--role", "--summary-json", "train.py"], None),
        (["--summary-json"], None),
    ],
)
def test_the_summary_of_a_bad_command_line_goes_elsewhere(words: list[str], found: str | None) -> None:
    path = summary_file(words, {})
    assert (path and str(path)) == found


def test_the_summary_of_a_bad_command_line_ignores_the_environment() -> None:
    assert str(summary_file(["--bogus"], {"DLAUNCH_SUMMARY_JSON": "ours"})) == "ours"
    assert str(summary_file(["--summary-json=typed", "--bogus"], {"DLAUNCH_SUMMARY_JSON": "ours"})) == "typed"


def test_a_start_imports_what_only_some_runs_need() -> None:
    program = (
        "import sys; before = set(sys.modules); import dlaunch.launcher.main, dlaunch.launcher.run;"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    heavy = {
        "rich",
        "torch",
        "psutil",
        "json",
        "email",
        "asyncio",
        "importlib.metadata",
        "difflib",
        "tempfile",
        "shutil",
    }
    heavy |= {"dlaunch.agent.run", "dlaunch.launcher.report", "dlaunch.launcher.summary", "dlaunch.launcher.mistakes"}
    heavy |= {"dlaunch.rendezvous_spec", "dlaunch.launcher.nodes", "dlaunch.launcher.endpoints"}
    assert heavy.isdisjoint(loaded.stdout.split())
