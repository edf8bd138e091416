"""What torchrun's own parser takes, ours takes; and the variables are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dlaunch.launcher.main import command_line
from dlaunch.launcher.options import BY_DEST

_DUMP = """
import json
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser
print("\\n" + json.dumps([
    {"dest": a.dest, "spellings": a.option_strings, "takes_value": a.nargs is None, "default": a.default,
     "has_variable": isinstance(a, (env, check_env))}
    for a in get_args_parser()._actions if a.option_strings and a.dest != "help"
]))
"""

Actions = list[dict[str, Any]]

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def torchruns() -> Actions:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", _DUMP], capture_output=True, text=True, check=True, timeout=300)
    actions: Actions = json.loads(done.stdout.splitlines()[-1])
    return actions


def test_an_option_of_torchrun_is_not_taken(torchruns: Actions) -> None:
    run = command_line().commands["run"]
    assert len(torchruns) > 25
    for theirs in torchruns:
        for spelling in theirs["spellings"]:
            words = [spelling, "1", "script"] if theirs["takes_value"] else [spelling, "script"]
            params = run.make_context("dlaunch", words).params
            assert params[theirs["dest"]] == ("1" if theirs["takes_value"] else True), spelling
            assert params["command"] == ("script",), spelling


def test_a_variable_of_torchrun_is_not_read(torchruns: Actions) -> None:
    for theirs in torchruns:
        variable = f"PET_{theirs['dest'].upper()}"
        assert (variable in BY_DEST[theirs["dest"]].variables) == theirs["has_variable"], variable


def test_a_default_of_torchrun_is_another(torchruns: Actions) -> None:
    ours = {"start_method": "warm", "rdzv_id": "", "shutdown_timeout": "30"}  # on purpose, see docs/reference/cli.md
    for theirs in torchruns:
        dest = theirs["dest"]
        default = theirs["default"]
        expected = ours.get(dest, "" if default is None or default is False or default == [] else str(default))
        assert BY_DEST[dest].default == expected, dest
