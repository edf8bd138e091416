"""A worker finds the process that it would find under ``python -u script.py``, in all that a script can ask for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .driver import Driver
from .twins import BASIC, PYTHONS, Result, Surroundings

STATE = Path(__file__).parent / "scripts" / "state.py"
OURS = {"dlaunch", "sitecustomize"}
BOTH = pytest.mark.parametrize("mode", ["warm", "exec"])
OURS = {"dlaunch", "sitecustomize"}
BOTH = pytest.mark.parametrize("mode", ["warm", "exec"])


def state(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result
    seen: dict[str, Any] = json.loads(result.stdout)
    return seen


def differences(plain: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in plain.keys() | seen.keys():
        one, other = plain.get(key), seen.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found |= {f"{key}.{name}": pair for name, pair in differences(one, other).items()}
        elif one != other:
            found[key] = (one, other)
    return found


def extra(plain: dict[str, Any], seen: dict[str, Any], key: str) -> set[str]:
    """What a worker has more than a plain process; it must not have less."""
    less, more = set(plain.pop(key)), set(seen.pop(key))
    assert less <= more
    return more - less


def assert_same_state(here: Surroundings, mode: str, *arguments: str) -> None:
    plain_result, result = here.plainly(arguments), here.below_starter(mode, arguments)
    plain, seen = state(plain_result), state(result)
    if mode == "warm":  # what was preloaded is there
        assert not [name for name in extra(plain, seen, "modules") if name.partition(".")[0] in OURS]
        assert not [folder for folder in extra(plain, seen, "importer cache") if "dlaunch" in folder]
    channel = set(seen["descriptors"]) - set(plain["descriptors"])
    assert [seen["descriptors"].pop(fd) for fd in channel] == ["sFalse"]
    assert differences(plain, seen) == {}
    assert result.stderr == plain_result.stderr


@BOTH
@pytest.mark.parametrize("python", PYTHONS)
def test_a_worker_sees_the_same_process(python: str, mode: str) -> None:
    assert_same_state(Surroundings(STATE.parent, python=python), mode, str(STATE), "a", "--b")


@BOTH
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONPATH": "/nowhere:{tmp}"},
        {"PYTHONPATH": ""},
        {"PYTHONPATH": ":"},
        {"PYTHONSTARTUP": "/nowhere.py", "PYTHONNOUSERSITE": "1"},
        {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "0"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONUTF8": "1"},
        {"PYTHONUTF8": "0", "LC_ALL": "C"},
        {"PYTHONIOENCODING": "latin-1:replace"},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNODEBUGRANGES": "1"},
        {"PYTHONTRACEMALLOC": "3", "PYTHONINTMAXSTRDIGITS": "1000"},
        {"PYTHONINSPECT": "1"},
        {"LANG": "C.UTF-8", "TZ": "Asia/Tokyo", "UMLAUT": "\udcff\xe4"},
    ],
    ids="+".join,
)
def test_a_worker_sees_the_same_process_under(tmp_path: Path, variables: Mapping[str, str], mode: str) -> None:
    chosen = {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    assert_same_state(Surroundings(tmp_path, {**BASIC, **chosen}), mode, str(STATE))


@BOTH
def test_a_module_sees_the_same_process(tmp_path: Path, mode: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "program.py").write_text(STATE.read_text())
    assert_same_state(Surroundings(tmp_path), mode, "-m", "package.program", "-x")


@BOTH
@pytest.mark.parametrize(
    "content",
    [
        "import builtins, sys; builtins.MINE = 1; sys.setrecursionlimit(2000)",
        "raise ValueError('mine')",
        "import no_such_module",
        "raise ImportError('odd', name='sitecustomize')",
    ],
)
def test_the_users_own_sitecustomize_is_run(tmp_path: Path, content: str, mode: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(content)
    assert_same_state(Surroundings(tmp_path, {**BASIC, "PYTHONPATH": str(tmp_path)}), mode, str(STATE))


@BOTH
def test_usercustomize_and_pth_files_are_run(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "usercustomize.py").write_text("import builtins; builtins.MINE = 1")
    (folder / "mine.pth").write_text(f"{tmp_path}\nimport sys; sys.setrecursionlimit(2000)\n")
    real_python = os.path.realpath(sys.executable)  # a virtual environment has no user's folder
    environment = {**BASIC, "PYTHONUSERBASE": str(tmp_path)}
    here = Surroundings(tmp_path, environment, real_python)
    assert "MINE" in state(here.plainly([str(STATE)]))["builtins"]
    assert_same_state(here, mode, str(STATE))


@BOTH
def test_what_a_workers_child_process_inherits_is_the_same(tmp_path: Path, mode: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)")
    here, arguments = Surroundings(tmp_path, {**BASIC, "PYTHONPATH": "/nowhere"}), [str(script), str(STATE)]
    plain, seen = state(here.plainly(arguments)), state(here.below_starter(mode, arguments))
    assert differences(plain, seen) == {}


def test_workers_draw_different_random_numbers_and_keys(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, random, uuid\n"
        "print(random.random(), uuid.uuid4(), multiprocessing.current_process().authkey.hex())\n"
    )
    modules = ["random", "uuid", "multiprocessing"]
    with Driver("warm", [sys.executable, "-u", str(script)], preload=modules) as driver:
        drawn = [driver.spawn().out.all().split() for _ in range(3)]
        for values in zip(*drawn, strict=True):
            assert len(set(values)) == 3
