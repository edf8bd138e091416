"""Every mistake answers at once, with its sentence and its exit code, through the real `main`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlaunch.launcher.summary  # noqa: F401  -- cannot be imported any more by a test that gave up its rights
from dlaunch import __version__
from dlaunch.launcher.main import main
from dlaunch.launcher.options import OPTIONS

SEE = "See dlaunch --help."
ELF = b"\x7fELF\x02\x01\x01" + bytes(64)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with something of every kind, with no settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "DLAUNCH_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    (tmp_path / "train.py").write_text("raise SystemExit('a bad command line must not start this')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "program").write_bytes(ELF)
    (tmp_path / "image.py").write_bytes(PNG)
    (tmp_path / "data.py").write_bytes(b"x = 1\n" + bytes(8))
    (tmp_path / "train.sh").write_text("#!/bin/bash\nfor i in 1 2; do echo $i; done\n")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    return tmp_path


def bad(arguments: str, code: int, sentence: str, environ: dict[str, str] | None = None) -> Any:
    return pytest.param(
        arguments.split(), environ or {}, code, sentence, id=f"{arguments or 'nothing'} {environ or ''}"
    )


NUMBER = "Give a whole number, 0 or more."
SECONDS = "Give a number of seconds, 0 or more."
OF_OURS = "g-wx,o=" if os.geteuid() == 0 else "go="  # what a file loses that others must not read
MAP = "Give 0, 1, 2 or 3 for all workers, or LOCAL_RANK:VALUE,..., for instance 0:3,1:2."
WORKERS = "Give a number, 1 or more, or auto, cpu, gpu or xpu."

MISTAKES = [
    # the command line itself
    bad("", 2, "No script was given. Say: dlaunch [FLAGS] SCRIPT [ARGS...], or dlaunch --help."),
    bad("run", 2, "No script was given. Say: dlaunch [FLAGS] SCRIPT [ARGS...], or dlaunch --help."),
    bad("--nprocs-per-node 2 train.py", 2, "There is no flag --nprocs-per-node. Did you mean --nproc-per-node?"),
    bad("--max_restart 2 train.py", 2, "There is no flag --max_restart. Did you mean --max-restarts?"),
    bad("--redirect=3 train.py", 2, "There is no flag --redirect. Did you mean --redirects?"),
    bad("--nproc 2 train.py", 2, "There is no flag --nproc. Did you mean --nproc-per-node?"),
    bad("--log x train.py", 2, "There is no flag --log. Did you mean --log-dir?"),
    bad("-nproc_per_node=2 train.py", 2, "There is no flag -nproc_per_node. Did you mean --nproc-per-node?"),
    bad("--epochs 3 train.py", 2, f"There is no flag --epochs. Flags of the script stand after it. {SEE}"),
    bad("-x train.py", 2, f"There is no flag -x. Flags of the script stand after it. {SEE}"),
    bad("--nnodes", 2, "--nnodes needs a value. Give --nnodes N|MIN:MAX."),
    bad("-t", 2, "-t needs a value. Give -t MAP."),
    bad("--log-dir --tee 3 train.py", 2, "--log-dir needs a value, but '--tee' follows it. Give DIR."),
    bad("--standalone=1 train.py", 2, "--standalone takes no value. Say --standalone alone."),
    # values
    bad("--nnodes 3:2 train.py", 2, "--nnodes is '3:2'. Give MIN:MAX with 1 <= MIN <= MAX."),
    bad("--nnodes 0 train.py", 2, "--nnodes is '0'. Give MIN:MAX with 1 <= MIN <= MAX."),
    bad("--nnodes two train.py", 2, "--nnodes is 'two'. Give N or MIN:MAX, for instance 1 or 2:4."),
    bad("--nproc-per-node 0 train.py", 2, f"--nproc-per-node is '0'. {WORKERS}"),
    bad("--nproc-per-node -1 train.py", 2, f"--nproc-per-node is '-1'. {WORKERS}"),
    bad("--nproc_per_node=all train.py", 2, f"--nproc-per-node is 'all'. {WORKERS}"),
    bad("train.py", 2, f"PET_NPROC_PER_NODE is 'all'. {WORKERS}", {"PET_NPROC_PER_NODE": "all"}),
    bad("--max-restarts -1 train.py", 2, f"--max-restarts is '-1'. {NUMBER}"),
    bad("--max-restarts 1.5 train.py", 2, f"--max-restarts is '1.5'. {NUMBER}"),
    bad("train.py", 2, f"DLAUNCH_MAX_RESTARTS is 'many'. {NUMBER}", {"DLAUNCH_MAX_RESTARTS": "many"}),
    bad("--monitor-interval nan train.py", 2, f"--monitor-interval is 'nan'. {SECONDS}"),
    bad("--grace nan train.py", 2, f"--shutdown-timeout is 'nan'. {SECONDS}"),
    bad("--shutdown-timeout -3 train.py", 2, f"--shutdown-timeout is '-3'. {SECONDS}"),
    bad("train.py", 2, f"DLAUNCH_GRACE is 'long'. {SECONDS}", {"DLAUNCH_GRACE": "long"}),
    bad("train.py", 2, f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is 'x'. {SECONDS}", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}),
    bad("--restart-window 0 train.py", 2, "--restart-window is '0'. Give a number of seconds, more than 0."),
    bad("--backoff 5:1 train.py", 2, "--backoff is '5:1'. Give FIRST or FIRST:MAX in seconds, with 0 <= FIRST <= MAX."),
    bad("-r 4 train.py", 2, f"--redirects is '4'. {MAP}"),
    bad("--tee 0:5 train.py", 2, f"--tee is '0:5'. {MAP}"),
    bad(
        "--local-ranks-filter a train.py",
        2,
        "--local-ranks-filter is 'a'. Give local ranks with commas between them, for instance 0,1.",
    ),
    bad(
        "--duplicate-stdout-filters , train.py",
        2,
        "--duplicate-stdout-filters is ','. Give texts with single commas between them; ',,' is a literal comma.",
    ),
    bad(
        "--signals-to-handle SIGFOO train.py",
        2,
        "--signals-to-handle is 'SIGFOO'. There is no signal 'SIGFOO': give names such as SIGTERM,SIGUSR1.",
    ),
    bad(
        "--signals-to-handle SIGTERM,SIGKILL train.py",
        2,
        "--signals-to-handle is 'SIGTERM,SIGKILL'. SIGKILL cannot be handled: leave it out.",
    ),
    bad("--start-method thread train.py", 2, "--start-method is 'thread'. Give warm, exec, fork, forkserver or spawn."),
    bad(
        "--preload a-b train.py",
        2,
        "--preload is 'a-b'. Give names of modules with commas between them, for instance transformers,accelerate.",
    ),
    bad("--master-port 70000 train.py", 2, "--master-port is '70000'. Give a port from 0 to 65535."),
    bad(
        "--rdzv-endpoint node0:port train.py",
        2,
        "--rdzv-endpoint is 'node0:port'. Give HOST or HOST:PORT, for instance node0:29400 or [::1]:29400.",
    ),
    bad(
        "--rdzv-conf timeout train.py", 2, "--rdzv-conf is 'timeout'. Give KEY=VALUE,..., for instance join_timeout=60."
    ),
    bad("--rdzv-backend zk train.py", 2, "--rdzv-backend is 'zk'. Give static, c10d, etcd or etcd-v2."),
    bad("--node-rank 1 train.py", 2, "--node-rank is '1'. There is one node, so give 0; or say --nnodes."),
    bad(
        "train.py",
        2,
        "PET_STANDALONE is 'perhaps'. Give 1, true, yes or on; or 0, false, no or off.",
        {"PET_STANDALONE": "perhaps"},
    ),
    # several nodes
    bad(
        "--nnodes 2:4 train.py",
        2,
        "--nnodes is '2:4', but nothing says where the nodes meet. "
        "Give --rdzv-endpoint HOST[:PORT],...: one of the nodes or the members of an etcd, the same on all.",
    ),
    bad(
        "train.py",
        2,
        "PET_NNODES is '2', but nothing says where the nodes meet. "
        "Give --rdzv-endpoint HOST[:PORT]: one of the nodes, the same on all.",
        {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d"},
    ),
    bad(
        "--nnodes 2 --rdzv-backend etcd train.py",
        2,
        "--nnodes is '2', but nothing says where the nodes meet. "
        "Give --rdzv-endpoint HOST[:PORT],...: the members of the etcd.",
    ),
    bad(
        "--nnodes 2 --node-rank 1 train.py",
        2,
        "--nnodes is '2', but nothing says where the nodes meet. "
        "Give --master-addr, the address of the node with --node-rank 0, the same on all.",
    ),
    bad("--nnodes 2 --standalone train.py", 2, "--standalone is for one node, and --nnodes is '2'. Leave one out."),
    bad(
        "--nnodes 2 --node-rank 2 --master-addr node0 train.py",
        2,
        "--node-rank is '2'. There are 2 nodes, so give 0 to 1.",
    ),
    bad(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
        2,
        "--rdzv-endpoint is 'localhost:0'. Several nodes need a port that all know: give one above 0.",
    ),
    bad(
        "--nnodes 2 --rdzv-endpoint e1,e2 train.py",
        2,
        "Nodes that meet in an etcd need a name for their run. Give --rdzv-id, the same on all.",
    ),
    bad(
        "--nnodes 2 --rdzv-endpoint https://e1:2379 train.py",
        2,
        "--rdzv-endpoint is 'https://e1:2379'. Leave http:// out; for TLS, leave https:// out and give --rdzv-ca.",
    ),
    bad(
        "--nnodes 2 --rdzv-endpoint root:secret@e1:2379 train.py",
        2,
        "--rdzv-endpoint names a user. Give HOST:PORT alone, with --rdzv-user and --rdzv-password-file.",
    ),
    bad("--rdzv-password secret train.py", 2, "There is no flag --rdzv-password. Did you mean --rdzv-password-file?"),
    bad(
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a --rdzv-user root train.py",
        2,
        "--rdzv-user is 'root', but there is no password. Give --rdzv-password-file, or set DLAUNCH_RDZV_PASSWORD.",
    ),
    bad(
        "--rdzv-conf join_timeot=60 train.py",
        2,
        "--rdzv-conf has no key 'join_timeot'. Did you mean join_timeout?",
    ),
    bad(
        "--rdzv-conf join_timeout=long train.py",
        2,
        "--rdzv-conf join_timeout is 'long'. Give a number of seconds, more than 0.",
    ),
    bad(
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a --rdzv-ca nowhere.pem train.py",
        78,
        "--rdzv-ca 'nowhere.pem' cannot be used: no such file or directory. Give a PEM file.",
    ),
    bad(
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a --rdzv-ca train.py train.py",
        78,
        "--rdzv-ca 'train.py' cannot be used: it is not PEM. Give a PEM file.",
    ),
    bad(
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a --rdzv-user root --rdzv-password-file train.sh train.py",
        78,
        "The password file 'train.sh' cannot be used: others can read or change it. Say: chmod {open} train.sh.",
    ),
    # contradictions
    bad("-m --no-python train", 2, "-m/--module cannot stand with --no-python. Leave one of them out."),
    bad("--no-python --no-use-env ls", 2, "--no-use-env cannot stand with --no-python. Leave one of them out."),
    bad(
        "--no-python --start-method warm ls",
        2,
        "--start-method is 'warm'. It needs Python: leave it out with --no-python.",
    ),
    # what is to come
    bad(
        "--numa-binding node train.py",
        78,
        "--numa-binding is 'node', but this version does not bind workers to CPUs yet. "
        "Leave it out, or use numactl in the script.",
    ),
    bad(
        "--event-log-handler console train.py",
        78,
        "--event-log-handler is 'console', but this version does not load plug-ins of torchrun yet. "
        "Leave it out, or give null.",
    ),
    bad(
        "--hosts a,b train.py",
        78,
        "--hosts is 'a,b', but this version does not start other hosts yet. Leave it out and start dlaunch there.",
    ),
    bad("--detach train.py", 78, "This version does not run in the background yet. Leave --detach out, or use tmux."),
    # the script
    bad("trian.py", 66, "There is no script 'trian.py'. Did you mean train.py?"),
    bad("zebra", 66, "There is no script 'zebra'. Give the path of a Python file; relative paths start in {here}."),
    bad(
        "nowhere/train.py",
        66,
        "There is no script 'nowhere/train.py'. Give the path of a Python file; relative paths start in {here}.",
    ),
    bad("package", 66, "'package' is a folder without __main__.py. Give a script in it."),
    bad("program", 66, "'program' is not Python: it is a native program. Say --no-python to run it as it is."),
    bad("image.py", 66, "'image.py' is not Python: it is an image. Give a Python file."),
    bad("data.py", 66, "'data.py' is not Python: it is a binary file. Give a Python file."),
    bad("train.sh", 66, "'train.sh' is not Python: it is a shell script. Say --no-python to run it as it is."),
    bad("-", 2, "A script from standard input cannot be given to several workers. Save it in a file."),
    bad("-m trian", 66, "There is no module 'trian'. Did you mean train?"),
    bad("-m zebra.crossing", 66, f"There is no module 'zebra.crossing'. Is it installed for {sys.executable}?"),
    bad("-m train.py", 2, "-m is for modules, and 'train.py' is a file. Leave -m out."),
    bad("--no-python zebra", 66, "The program 'zebra' is not in PATH. Give its path."),
    bad("--no-python tool", 66, "The program 'tool' is not in PATH. Did you mean ./tool?"),
    bad("--no-python ./toll", 66, "There is no program './toll'. Did you mean tool?"),
    bad("--no-python ./train.py", 66, "'./train.py' is not executable. Say: chmod +x ./train.py."),
    bad("--no-python package", 66, "'package' is a folder, not a program. Give the path of a program."),
    # where things are written
    bad(
        "--log-dir train.py/logs train.py",
        78,
        "The log directory 'train.py/logs' cannot be used: not a directory. "
        "Give another --log-dir, or /dev/null for none.",
    ),
    bad(
        "--log-dir train.py train.py",
        78,
        "The log directory 'train.py' cannot be used: file exists. Give another --log-dir, or /dev/null for none.",
    ),
    bad(
        "--summary-json nowhere/out.json train.py",
        78,
        "The summary cannot be written to 'nowhere/out.json': there is no directory 'nowhere'. "
        "Give another --summary-json.",
    ),
    bad(
        "--summary-json package train.py",
        78,
        "The summary cannot be written to 'package': it is a directory. Give another --summary-json.",
    ),
    bad(
        "train.py",
        78,
        "PYTHON_EXEC is 'no-such-python', which cannot be executed. Give the path of a Python.",
        {"PYTHON_EXEC": "no-such-python"},
    ),
]


@pytest.mark.parametrize(("arguments", "environ", "code", "sentence"), MISTAKES)
def test_a_mistake_is_not_told_in_its_sentence(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    environ: dict[str, str],
    code: int,
    sentence: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == code
    out, err = capfd.readouterr()
    assert err == f"dlaunch: {sentence.replace('{here}', str(here)).replace('{open}', OF_OURS)}\n"
    assert out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a train.py",  # no user
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a --rdzv-user root nowhere.py",
        "--nnodes 2 --rdzv-endpoint e1:2379 --rdzv-id a --rdzv-user root --rdzv-ca nowhere train.py",
    ],
)
def test_a_password_is_shown_with_a_mistake(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: str
) -> None:
    monkeypatch.setenv("DLAUNCH_RDZV_PASSWORD", "hunter2")
    assert main(["--summary-json", "out.json", *arguments.split()]) in (2, 66, 78)
    assert "hunter2" not in capfd.readouterr().err + (here / "out.json").read_text()


def test_a_control_character_of_a_name_reaches_the_terminal(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evil\x1b[2J\nname"]) == 66
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """A root user may read and write everything, so be nobody for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def foreign(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder that belongs to another user, who lets everybody read it."""
    assert main(["nowhere.py"]) == 66  # whatever main imports late is imported by now
    folder = Path(tempfile.mkdtemp())
    (folder / "train.py").write_text("")
    folder.chmod(0o555)
    monkeypatch.chdir(folder)
    yield folder
    monkeypatch.chdir(here)
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["secret.py"], 66, "The script 'secret.py' cannot be read. Check its permissions: ls -l secret.py."),
        (
            ["--log-dir", ".", "train.py"],
            78,
            "The log directory '.' cannot be used: no permission to write there. "
            "Give another --log-dir, or /dev/null for none.",
        ),
        (
            ["--log-dir", "logs", "train.py"],
            78,
            "The log directory 'logs' cannot be used: permission denied. "
            "Give another --log-dir, or /dev/null for none.",
        ),
        (
            ["--summary-json", "out.json", "train.py"],
            78,
            "The summary cannot be written to 'out.json': no permission to write in '.'. Give another --summary-json.",
        ),
    ],
)
def test_a_missing_permission_is_not_told_in_its_sentence(
    foreign: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    capfd.readouterr()
    foreign.chmod(0o755)
    (foreign / "secret.py").touch(mode=0o000)
    foreign.chmod(0o555)
    with unprivileged():
        assert main(arguments) == code
    assert capfd.readouterr().err == f"dlaunch: {sentence}\n"


def test_the_command_does_not_pass_its_exit_code_on(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlaunch", "--nnodes", "3:2", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "dlaunch: --nnodes is '3:2'. Give MIN:MAX with 1 <= MIN <= MAX.\n"


def test_a_closed_stderr_makes_a_traceback(here: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m dlaunch nowhere.py 2>&-"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (66, b"")


def test_a_current_folder_that_is_gone_makes_a_traceback(here: Path) -> None:
    gone = here / "gone"
    gone.mkdir()
    command = ["/bin/sh", "-c", f'rmdir "{gone}"; exec "$@"', "sh", sys.executable, "-m", "dlaunch", "train.py"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # an editable install looks for its folder
    done = subprocess.run(command, cwd=gone, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 78, done.stderr
    assert done.stderr == (
        "dlaunch: The current folder cannot be used: no such file or directory. Change to another.\n"
    )


def test_a_bug_of_ours_is_not_told_with_its_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_pid: int) -> set[int]:
        raise ZeroDivisionError("as a bug would")

    monkeypatch.setattr(os, "sched_getaffinity", broken)
    assert main(["--summary-json", "out.json", "--nproc-per-node", "cpu", "train.py"]) == 70
    document = json.loads((here / "out.json").read_text())
    assert (document["state"], document["exit_code"]) == ("crashed", 70)
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "Traceback (most recent call last):"
    assert err[-2] == "ZeroDivisionError: as a bug would"
    assert err[-1] == f"dlaunch: this is a bug of dlaunch {__version__}: please report it with the lines above."


VALUES = st.sampled_from(
    ["", "0", "1", "-1", "2:4", "3:1", "auto", "nan", "0:3,1:2", ",", "a=b", "[::1]:1", "x" * 5000]
)
WORDS = st.one_of(
    st.sampled_from([spelling for option in OPTIONS for spelling in option.spellings]),
    VALUES,
    st.builds("{}={}".format, st.sampled_from([option.name for option in OPTIONS]), VALUES),
    st.sampled_from(
        ["--", "-", "--help", "--version", "run", "-rt", "--=", "-=", "---", "\udcff", "\U0001f600", "a\nb"]
    ),
)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(words=st.lists(WORDS, max_size=8))
def test_a_senseless_command_line_makes_a_traceback(
    here: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code = main(words)
    err = capfd.readouterr().err
    assert code in (0, 2, 66, 78)
    assert err.count("\n") == (0 if code == 0 else 1), err
