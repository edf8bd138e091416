"""What can be seen to be wrong before anything starts: the script, the program, the directories.

A file that does not parse is left to Python itself, whose message is better than ours could be.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlaunch.errors import ConfigurationError, ScriptNotFound, UsageError
from dlaunch.spec import JobSpec, Program, ProgramKind

if TYPE_CHECKING:
    from dlaunch.spec import RendezvousSpec

_MAGIC = {
    b"\x7fELF": "a native program",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"%PDF": "a PDF document",
    b"\x1f\x8b": "compressed",
    b"\x28\xb5\x2f\xfd": "compressed",
}
_HEAD_BYTES = 4096
_MOST_PEM_BYTES = 1 << 20


def check_current_folder() -> None:
    """Relative paths, and the workers, need the folder that we were started in."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigurationError(
            f"The current folder cannot be used: {_reason(error)}.", "Change to another."
        ) from None


def find_interpreter(environ: Mapping[str, str]) -> str:
    """The Python of the workers: PYTHON_EXEC as torchrun has it, else the one that runs dlaunch."""
    wish = environ.get("PYTHON_EXEC", "")
    if not wish:
        return sys.executable
    found = find_program(wish, environ)
    if found is None:
        raise ConfigurationError(f"PYTHON_EXEC is {wish!r}, which cannot be executed.", "Give the path of a Python.")
    return found


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """The absolute path of an executable file: ``name`` itself if it holds a slash, else the first in PATH."""
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        path = os.path.abspath(os.path.join(folder, name))  # noqa: PTH100, PTH118  -- links must stay unresolved
        if os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113
            return path
    return None


def check_job(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Raise the DlaunchError of the first thing that would go wrong."""
    match spec.program.kind:
        case ProgramKind.SCRIPT:
            check_script(spec.program.target)
        case ProgramKind.MODULE:
            check_module(spec.program)
        case ProgramKind.EXECUTABLE:
            check_executable(spec.program.target, environ)
    if spec.output.log_dir is not None:
        check_log_directory(spec.output.log_dir)
    if spec.summary_json is not None:
        check_summary_file(spec.summary_json)
    if spec.rendezvous is not None:
        check_rendezvous_files(spec.rendezvous)


def check_script(target: str) -> None:
    """A readable Python file, or a folder or zip file with a ``__main__.py``."""
    if target == "-":
        raise UsageError("A script from standard input cannot be given to several workers.", "Save it in a file.")
    path = Path(target)
    mode = _mode_of(path, target)
    if not os.access(path, os.R_OK):
        raise ScriptNotFound(f"The script {target!r} cannot be read.", f"Check its permissions: ls -l {target}.")
    if stat.S_ISDIR(mode):
        _check_folder(path, target)
    elif stat.S_ISREG(mode):
        _check_is_python(path, target)


def _mode_of(path: Path, target: str) -> int:
    try:
        return path.stat().st_mode
    except PermissionError:
        raise ScriptNotFound(
            f"The script {target!r} cannot be read.", "Check the permissions of its folders."
        ) from None
    except (OSError, ValueError):
        raise ScriptNotFound(f"There is no script {target!r}.", _neighbour(path) or _where_we_are()) from None


def _neighbour(path: Path) -> str:
    """A suggestion from the folder where the script should be; empty where there is none."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    match = _closest(path.name, names)
    return f"Did you mean {path.parent / match}?" if match else ""


def _closest(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415  -- only a mistake pays for it

    return next(iter(get_close_matches(name, list(names), n=1)), "")


def _where_we_are() -> str:
    return f"Give the path of a Python file; relative paths start in {Path.cwd()}."


def _check_folder(path: Path, target: str) -> None:
    if not (path / "__main__.py").is_file():
        raise ScriptNotFound(f"{target!r} is a folder without __main__.py.", "Give a script in it.")


def _check_is_python(path: Path, target: str) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    kind = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    if not kind and b"\0" in head and path.suffix != ".pyc" and not _is_zip(path):
        kind = "a binary file"
    if not kind and _is_shell_script(path, head):
        kind = "a shell script"
    if kind:
        runs = kind in ("a native program", "a shell script")
        fix = "Say --no-python to run it as it is." if runs else "Give a Python file."
        raise ScriptNotFound(f"{target!r} is not Python: it is {kind}.", fix)


def _is_zip(path: Path) -> bool:
    from zipfile import is_zipfile  # noqa: PLC0415  -- heavy, and rarely needed

    return is_zipfile(path)


def _is_shell_script(path: Path, head: bytes) -> bool:
    """By its first line, unless it is Python as well (as the launchers are that pip writes for long paths)."""
    first = head.split(b"\n", 1)[0]
    interpreter = first.removeprefix(b"#!").split()
    if not first.startswith(b"#!") or not interpreter or not interpreter[-1].endswith(b"sh"):
        return False
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return True
    return False


def check_module(program: Program) -> None:
    """The top-level package or module can be found; what is inside a package is left to Python.

    Nothing is imported. Another interpreter than ours has a path that we do not know, so it is not checked.
    """
    name = program.target
    if "/" in name or name.endswith(".py"):
        raise UsageError(f"-m is for modules, and {name!r} is a file.", "Leave -m out.")
    if program.interpreter != sys.executable:
        return
    top = name.partition(".")[0]
    if not _can_be_found(top):
        match = _closest(top, {entry.stem for entry in Path.cwd().iterdir()})
        fix = f"Did you mean {match}?" if match else f"Is it installed for {program.interpreter}?"
        raise ScriptNotFound(f"There is no module {name!r}.", fix)


def _can_be_found(top: str) -> bool:
    import importlib.util  # noqa: PLC0415  -- only -m pays for it
    from importlib.machinery import PathFinder  # noqa: PLC0415

    try:
        return bool(PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top))  # noqa: PTH109
    except (ImportError, ValueError):  # ValueError: a module without a spec, as __main__ is
        return top in sys.modules


def check_executable(target: str, environ: Mapping[str, str]) -> None:
    """A program of ``--no-python`` that the system would find and run."""
    if find_program(target, environ) is not None:
        return
    path = Path(target)
    if path.is_dir():
        raise ScriptNotFound(f"{target!r} is a folder, not a program.", "Give the path of a program.")
    if path.is_file():
        where = "" if "/" in target else "./"
        if os.access(path, os.X_OK):
            raise ScriptNotFound(f"The program {target!r} is not in PATH.", f"Did you mean {where}{target}?")
        raise ScriptNotFound(f"{target!r} is not executable.", f"Say: chmod +x {target}.")
    if "/" in target:
        raise ScriptNotFound(f"There is no program {target!r}.", _neighbour(path) or _where_we_are())
    raise ScriptNotFound(f"The program {target!r} is not in PATH.", "Give its path.")


def check_log_directory(path: Path) -> None:
    """Make the directory, and see that files can be made in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable_log_directory(path, _reason(error)) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unusable_log_directory(path, "no permission to write there")


def _unusable_log_directory(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The log directory {str(path)!r} cannot be used: {reason}.", "Give another --log-dir, or /dev/null for none."
    )


def check_summary_file(path: Path) -> None:
    """The summary can replace ``path`` when the run ends: its folder is there and can be written."""
    folder = path.parent
    if path.is_dir():
        reason = "it is a directory"
    elif not folder.is_dir():
        reason = f"there is no directory {str(folder)!r}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"no permission to write in {str(folder)!r}"
    else:
        return
    raise ConfigurationError(
        f"The summary cannot be written to {str(path)!r}: {reason}.", "Give another --summary-json."
    )


def check_rendezvous_files(rendezvous: RendezvousSpec) -> None:
    """The files that lead into etcd are there and can be read. No name is looked up, and nothing is connected."""
    for flag, path in (
        ("--rdzv-ca", rendezvous.ca_file),
        ("--rdzv-cert", rendezvous.cert_file),
        ("--rdzv-key", rendezvous.key_file),
    ):
        if path is not None:
            _check_pem(flag, path)
    if rendezvous.password_file is not None:
        from dlaunch.secret import read_password_file  # noqa: PLC0415  -- few runs have one

        read_password_file(rendezvous.password_file)


def _check_pem(flag: str, path: Path) -> None:
    """Certificates and keys for etcd are PEM: text with a line that says so."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # one that waits for a writer would never end
            reason = "it is not a regular file"
        else:
            with path.open("rb") as file:
                reason = "" if b"-----BEGIN " in file.read(_MOST_PEM_BYTES) else "it is not PEM"
    except OSError as error:
        reason = _reason(error)
    except ValueError:
        reason = "a bad name"
    if reason:
        raise ConfigurationError(f"{flag} {str(path)!r} cannot be used: {reason}.", "Give a PEM file.")


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
