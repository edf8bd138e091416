"""What a worker's interpreter tells of its own end, over its channel and in torch's error file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlaunch.frames import Frame

from .driver import Driver

MODES = ["warm", "exec"]
BOTH = pytest.mark.parametrize("mode", MODES)


class Scene:
    """A starter whose script is written anew for every program."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.script = folder / "script.py"
        self.error_file = folder / "error.json"
        self.driver = Driver(mode, [sys.executable, "-u", str(self.script)], cwd=folder)

    def ends(self, program: str, **environment: str) -> tuple[int, list[Frame], str]:
        """The exit code, what it said, and its stderr."""
        self.script.write_text(program)
        self.error_file.unlink(missing_ok=True)
        worker = self.driver.spawn(environment={"TORCHELASTIC_ERROR_FILE": str(self.error_file), **environment})
        code = self.driver.exit_code(worker)
        self.driver.sweep()
        return code, worker.said(), worker.err.all().decode(errors="replace")


@pytest.fixture(scope="module", params=MODES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    found = Scene(request.param, tmp_path_factory.mktemp("scene"))
    with found.driver:
        yield found


def exception_of(said: list[Frame]) -> dict[str, Any]:
    exception, finalizing = said
    assert (exception["kind"], finalizing["kind"]) == ("exception", "finalizing")
    assert 0 < exception["at"] <= finalizing["at"]
    return exception


def test_an_exception_is_told_as_the_interpreter_printed_it(scene: Scene) -> None:
    code, said, stderr = scene.ends("def f(x):\n    return 1 / x\n\nf(0)\n")
    told = exception_of(said)
    assert code == 1
    assert (told["type"], told["message"]) == ("ZeroDivisionError", "division by zero")
    script = str(scene.script)
    assert told["frames"] == [[script, 4, "<module>", "f(0)"], [script, 2, "f", "return 1 / x"]]
    assert told["traceback"] == stderr


@pytest.mark.parametrize(
    "program",
    [
        "try:\n    1/0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
        "try:\n    1/0\nexcept ZeroDivisionError:\n    raise ValueError('x')",
        "import json\njson.loads('{')",
        "x = = 1",
        "class Mine(Exception):\n    pass\nraise Mine('a', 'b')",
        "def f(): f()\nf()",
    ],
)
def test_the_traceback_is_the_one_on_stderr(scene: Scene, program: str) -> None:
    _code, said, stderr = scene.ends(program)
    assert exception_of(said)["traceback"] == stderr


def test_an_exception_of_a_library_is_named_with_its_module(scene: Scene) -> None:
    assert exception_of(scene.ends("import json\njson.loads('{')")[1])["type"] == "json.decoder.JSONDecodeError"


def test_a_syntax_error_is_placed_where_it_is(scene: Scene) -> None:
    told = exception_of(scene.ends("x = 1\ny = = 2\n")[1])
    assert told["type"] == "SyntaxError"
    assert told["frames"] == [[str(scene.script), 2, "<module>", "y = = 2"]]
    assert scene.error_file.exists()


def test_the_frames_of_python_m_are_not_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("1/0\n")
    with Driver("warm", [sys.executable, "-u", "-m", "program"], cwd=tmp_path) as driver:
        told = exception_of(driver.spawn().said())
        assert told["frames"] == [[str(tmp_path / "program.py"), 1, "<module>", "1/0"]]
        assert "runpy" in told["traceback"]


def test_an_unprintable_exception_is_told_without_its_text(scene: Scene) -> None:
    program = "class Mine(Exception):\n    def __str__(self): raise ValueError\nraise Mine"
    code, said, stderr = scene.ends(program)
    told = exception_of(said)
    assert code == 1
    assert (told["type"], told["message"]) == ("Mine", "<exception str() failed>")
    assert told["traceback"] == stderr


def test_an_exception_that_exits_when_printed_does_no_harm(scene: Scene) -> None:
    program = "class Mine(Exception):\n    def __str__(self): raise SystemExit(9)\nraise Mine"
    code, said, stderr = scene.ends(program)
    assert "capture.py" not in stderr
    assert code in {1, 9}
    assert [frame["kind"] for frame in said] in ([], ["finalizing"])


def test_a_huge_message_is_cut_and_its_two_ends_kept(scene: Scene) -> None:
    program = "raise ValueError('begin' + '\\U0001f600' * 3_000_000 + 'end')"
    told = exception_of(scene.ends(program)[1])
    assert len(json.dumps(told)) < 1 << 20
    for text in (told["message"], told["traceback"].strip()):
        assert len(text) <= 64 * 1024 + 100
        assert "begin" in text[:300]
        assert text.endswith("end")


def test_a_deep_recursion_keeps_both_ends_of_its_stack(scene: Scene) -> None:
    program = "import sys\nsys.setrecursionlimit(500)\ndef f(n):\n    g(n)\ndef g(n): f(n + 1)\nf(0)\n"
    told = exception_of(scene.ends(program)[1])
    assert told["type"] == "RecursionError"
    assert len(told["frames"]) <= 40
    assert told["frames"][0][2] == "<module>"


def test_surrogates_and_zeros_in_a_message_survive(scene: Scene) -> None:
    told = exception_of(scene.ends("raise ValueError('\\udc80 \\x00 \"')")[1])
    assert told["message"] == '\udc80 \x00 "'


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('a text')", 1),
        ("try:\n    1/0\nexcept ZeroDivisionError:\n    raise SystemExit(4)", 4),
    ],
)
def test_a_normal_end_is_told_and_no_exception(scene: Scene, program: str, code: int) -> None:
    ended, said, _stderr = scene.ends(program)
    assert ended == code
    assert [frame["kind"] for frame in said] == ["finalizing"]
    assert said[0]["late_variables"] == []


@pytest.mark.parametrize("program", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_an_abrupt_end_says_nothing(scene: Scene, program: str) -> None:
    assert scene.ends(program)[1] == []


def test_a_keyboard_interrupt_still_ends_the_process_by_sigint(scene: Scene) -> None:
    code, said, _stderr = scene.ends("raise KeyboardInterrupt")
    assert code == -2
    assert said[-1]["kind"] == "finalizing"


def test_only_an_exception_that_ends_the_script_is_called_uncaught(scene: Scene) -> None:
    assert exception_of(scene.ends("def f(): 1/0\nf()")[1])["uncaught"] is True
    console = "import code; code.InteractiveInterpreter(globals()).runcode(compile('1/0', '<console>', 'exec'))"
    code, said, _stderr = scene.ends(console)
    assert code == 0
    assert exception_of(said)["uncaught"] is False
    assert not scene.error_file.exists()


@pytest.mark.parametrize(
    "hook",
    [
        "sys.excepthook = lambda *a: None",
        "sys.excepthook = None",
        "del sys.excepthook",
        "sys.excepthook = lambda *a: 1/0",
    ],
)
def test_an_exception_is_told_whatever_the_excepthook_is(scene: Scene, hook: str) -> None:
    assert exception_of(scene.ends(f"import sys\n{hook}\nraise ValueError('told')")[1])["message"] == "told"


def test_children_by_fork_do_not_speak_for_the_worker(scene: Scene) -> None:
    program = (
        "import os\nif os.fork() == 0: raise ValueError('child')\nos.wait()\n"
        "if os.fork() == 0: raise SystemExit\nos.wait()\n"
    )
    code, said, stderr = scene.ends(program)
    assert code == 0
    assert [frame["kind"] for frame in said] == ["finalizing"]
    assert "ValueError: child" in stderr


def test_our_callback_runs_after_the_scripts_own(scene: Scene) -> None:
    program = "import atexit, sys\ndef late(): sys.last_value = KeyError('late')\natexit.register(late)"
    assert exception_of(scene.ends(program)[1])["type"] == "KeyError"


def test_a_script_that_closes_all_descriptors_is_left_alone(scene: Scene) -> None:
    program = (
        "import os, socket\nos.closerange(3, 65536)\n"
        "mine = [socket.socketpair() for _ in range(400)]\n"
        "for one, other in mine: one.setblocking(False); other.setblocking(False)\n"
        "1/0\n"
    )
    code, said, stderr = scene.ends(program)
    assert (code, said) == (1, [])
    assert "ZeroDivisionError" in stderr
    assert "capture.py" not in stderr


def test_the_error_file_is_torchs_own_format(scene: Scene) -> None:
    _code, _said, stderr = scene.ends("raise ValueError('x')")
    document = json.loads(scene.error_file.read_text())
    assert document["message"]["message"] == "ValueError: x"
    assert document["message"]["extraInfo"]["py_callstack"] == stderr
    assert int(document["message"]["extraInfo"]["timestamp"]) > 1_700_000_000


def test_an_error_file_that_the_script_wrote_is_kept(scene: Scene) -> None:
    scene.ends("import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('mine')\n1/0")
    assert scene.error_file.read_text() == "mine"


def test_no_error_file_is_written_without_an_exception(scene: Scene) -> None:
    scene.ends("raise SystemExit(1)")
    assert not scene.error_file.exists()


@pytest.mark.parametrize("path", ["", "/no/such/folder/error.json"])
def test_an_error_file_that_cannot_be_written_is_no_obstacle(scene: Scene, path: str) -> None:
    told = exception_of(scene.ends("raise ValueError('x')", TORCHELASTIC_ERROR_FILE=path)[1])
    assert told["message"] == "x"


def test_late_variables_are_named_under_the_warm_start_only(tmp_path: Path) -> None:
    program = (
        "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nos.environ['KMP_BLOCKTIME'] = '0'\nos.environ['OTHER'] = '1'"
    )
    for mode, expected in (("warm", ["KMP_BLOCKTIME", "OMP_NUM_THREADS"]), ("exec", [])):
        (tmp_path / mode).mkdir()
        scene = Scene(mode, tmp_path / mode)
        with scene.driver:
            _code, said, _stderr = scene.ends(program, OMP_NUM_THREADS="1")
            assert said[0]["late_variables"] == expected


def test_a_program_that_is_not_python_gets_no_channel_to_talk_on(tmp_path: Path) -> None:
    with Driver("exec", cwd=tmp_path) as driver:
        worker = driver.spawn(command=["sh", "-c", "ls -l /proc/self/fd | grep -c socket"], python=False)
        assert worker.out.all() == b"0\n"
        assert worker.said() == []
