"""Programs behave below a starter as under ``python -u``: the same exit code, the same bytes on stdout and stderr."""

from __future__ import annotations

import py_compile
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .driver import Driver
from .programs import DIALOGUES, ENDINGS, EXCEPTIONS, LOOKING, ORDER, PROCESSES
from .twins import BASIC, PYTHONS, Surroundings, run_in

MODES = ["warm", "exec"]
BOTH = pytest.mark.parametrize("mode", MODES)
PROGRAMS = {**ENDINGS, **EXCEPTIONS, **ORDER, **PROCESSES, **LOOKING}
# Modules that torch happens to import, and that the project below has its own of; and some others.
PRELOADED = ("profile", "cmd", "resource", "pickletools", "socket", "threading", "json", "multiprocessing.util")
SURROUNDINGS = [{"PYTHONDEVMODE": "1"}, {"PYTHONWARNINGS": "error"}, {"PYTHONFAULTHANDLER": "1"}]


def make_project(folder: Path) -> None:
    """A project with modules that have our names or those of standard modules, and others for its programs."""
    (folder / "broken.py").write_text("x = = 1\n")
    (folder / "raises.py").write_text("def f(): raise ValueError('imported')\nf()\n")
    (folder / "raises_not.py").write_text("x = 1\n")
    (folder / "keeps.py").write_text("class A:\n    def __del__(self): print('del', __name__)\na = A()\n")
    for name in ("agent", "dlaunch", "profile", "cmd", "resource", "pickletools"):
        (folder / f"{name}.py").write_text(f"WHO = 'the script\\'s own {name}'\n")
    for package, module in (("launcher", "x"), ("parallel", "y"), ("worker", "z")):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("")
        (folder / package / f"{module}.py").write_text(f"WHO = 'the script\\'s own {package}'\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


class Twins:
    """Surroundings with a starter in them; the script is written anew for every program."""

    def __init__(self, mode: str, surroundings: Surroundings) -> None:
        self._script = surroundings.cwd / "script.py"
        self._arguments = ["script.py", "an", "--argument"]
        self._surroundings = surroundings
        self._driver = surroundings.starter(mode, self._arguments)

    def run(self, program: str) -> None:
        self._script.write_text(program)
        plain = self._surroundings.plainly(self._arguments)
        (self._surroundings.cwd / "fresh.py").unlink(missing_ok=True)  # one program makes it
        assert run_in(self._driver) == plain

    def close(self) -> None:
        self._driver.__exit__(None, None, None)


def _name(changes: dict[str, str]) -> str:
    return " ".join(f"{name}={Path(value).name}" for name, value in changes.items())


@pytest.fixture(scope="module")
def twins_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Twins]]:
    cwd = tmp_path_factory.mktemp("project")
    make_project(cwd)
    changes = dict(request.param)
    python = changes.pop("python", sys.executable)
    surroundings = Surroundings(cwd, {**BASIC, **changes}, python, PRELOADED)
    twins = {mode: Twins(mode, surroundings) for mode in MODES}
    yield twins
    for twin in twins.values():
        twin.close()


@pytest.mark.parametrize("twins_of", [{"python": python} for python in PYTHONS], indirect=True, ids=_name)
@BOTH
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_behaves_alike(twins_of: dict[str, Twins], name: str, mode: str) -> None:
    twins_of[mode].run(PROGRAMS[name])


@pytest.mark.parametrize("twins_of", SURROUNDINGS, indirect=True, ids=_name)
@BOTH
@pytest.mark.parametrize("name", [*ORDER, "a chain", "in a thread", "fork", "what a spawned process sees", "SIGINT"])
def test_a_program_behaves_alike_under(twins_of: dict[str, Twins], name: str, mode: str) -> None:
    twins_of[mode].run(PROGRAMS[name])


@BOTH
@pytest.mark.parametrize("name", DIALOGUES)
def test_a_program_that_reads_stdin_behaves_alike(folder: Path, name: str, mode: str) -> None:
    program, stdin = DIALOGUES[name]
    (folder / "script.py").write_text(program)
    here = Surroundings(folder)
    assert here.below_starter(mode, ["script.py"], stdin) == here.plainly(["script.py"], stdin)


SHOW = (
    "import sys\n"
    "print(__name__, __file__, __package__, getattr(__spec__, 'name', None))\n"
    "print(sys.argv, sys.orig_argv, sys.path[:2])\n"
    "def f(): raise ValueError('shown')\n"
    "f()\n"
)


def _package(folder: Path) -> None:
    package = folder / "pkg" / "sub"
    package.mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("print('package', __name__)\n")
    (package / "__main__.py").write_text(SHOW)
    (package / "mod.py").write_text("from . import __name__ as parent\nprint(parent)\n" + SHOW)


def _zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import inside\n" + SHOW)
        archive.writestr("inside.py", "print('inside')\n")
        archive.writestr("cmd.py", "print('the zip\\'s own cmd')\n")


def _links(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "real.py").write_text("import neighbour\n" + SHOW)
    (folder / "elsewhere" / "neighbour.py").write_text("print('neighbour of the real file')\n")
    (folder / "first").symlink_to("elsewhere/real.py")
    (folder / "second.py").symlink_to("first")
    (folder / "loop.py").symlink_to("loop.py")  # what even root cannot read


def _folder_script(folder: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text("import inside\n" + SHOW)
    (folder / "app" / "inside.py").write_text("print('inside')\n")
    (folder / "empty").mkdir()


def _sources(folder: Path) -> None:
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nraise ValueError('\xe4')\n".encode("latin-1"))
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbfraise ValueError('bom')\n")
    (folder / "badly encoded.py").write_bytes(b"x = '\xff'\n")
    (folder / "null.py").write_bytes(b"x = 1\0\n")
    (folder / "crlf.py").write_bytes(b"def f():\r\n    1/0\r\nf()\r\n")
    (folder / "empty.py").write_text("")
    (folder / "no_extension").write_text(SHOW)
    (folder / "shown.py").write_text(SHOW)
    py_compile.compile(str(folder / "shown.py"), str(folder / "shown.pyc"))


KINDS = [
    ["-m", "pkg.sub.mod", "a"],
    ["-m", "pkg.sub", "-m", "b"],
    ["-m", "pkg"],
    ["-m", "pkg.missing"],
    ["-m", "missing"],
    ["-m", "raises"],
    ["-m", "broken"],
    ["-m", "json.tool", "--help"],
    ["app.zip", "a"],
    ["app", "a"],
    ["./app/"],
    ["empty"],
    ["second.py"],
    ["first", "a"],
    ["loop.py"],
    ["missing.py"],
    ["shown.pyc", "x"],
    ["no_extension"],
    ["./shown.py"],
    ["elsewhere/../shown.py"],
    ["latin.py"],
    ["bom.py"],
    ["badly encoded.py"],
    ["null.py"],
    ["crlf.py"],
    ["empty.py"],
    ["broken.py"],
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    make_project(folder)
    for build in (_package, _zip, _links, _folder_script, _sources):
        build(folder)
    return folder


@pytest.fixture(scope="module")
def programs(kinds: Path) -> Iterator[Driver]:
    with Surroundings(kinds).starter("exec", []) as driver:
        yield driver


@pytest.mark.parametrize("arguments", KINDS, ids=" ".join)
def test_every_kind_of_script_runs_alike(kinds: Path, programs: Driver, arguments: Sequence[str]) -> None:
    here = Surroundings(kinds, preload=["cmd"])
    plain = here.plainly(arguments)
    assert here.below_starter("warm", arguments) == plain
    assert run_in(programs, [here.python, "-u", *arguments]) == plain


def test_a_file_that_is_edited_between_two_attempts_is_read_anew(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text("print('first')")
    with Driver("warm", [sys.executable, "-u", str(script)]) as driver:
        assert driver.spawn().out.all() == b"first\n"
        script.write_text("import brand_new")
        (folder / "brand_new.py").write_text("print('second')")
        assert driver.spawn().out.all() == b"second\n"
