"""What can go wrong before or around a job, and the exit code that says so.

    DlaunchError
    ├── UsageError            2   the command line is wrong
    ├── ScriptNotFound       66   the script is missing or cannot be read
    ├── StoreUnreachable     69   the coordination service cannot be reached
    ├── TemporaryFailure     75   too few nodes came, a resource was busy: trying again may help
    └── ConfigurationError   78   well-formed settings that cannot be carried out here

Any other exception of ours is a bug (70). A job that ran and failed is not an error of dlaunch but an `Outcome`, with
the worker's own exit code.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """dlaunch's own exit codes (BSD sysexits and shell conventions); other codes are the job's."""

    OK = 0
    USAGE = 2
    SCRIPT_NOT_FOUND = 66
    STORE_UNREACHABLE = 69
    INTERNAL = 70
    TEMPORARY = 75
    CONFIGURATION = 78
    HANG = 124
    INTERRUPTED = 130
    TERMINATED = 143


class DlaunchError(Exception):
    """A mistake or a condition that is told in one sentence, with the fix; never with a traceback of ours."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, sentence: str, fix: str = "") -> None:
        super().__init__(f"{sentence} {fix}".strip())
        self.sentence = sentence
        self.fix = fix


class UsageError(DlaunchError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class ScriptNotFound(DlaunchError):
    """The script is missing or cannot be read."""

    exit_code = ExitCode.SCRIPT_NOT_FOUND


class StoreUnreachable(DlaunchError):
    """The coordination service cannot be reached."""

    exit_code = ExitCode.STORE_UNREACHABLE


class TemporaryFailure(DlaunchError):
    """Trying again later may help."""

    exit_code = ExitCode.TEMPORARY


class ConfigurationError(DlaunchError):
    """Settings that are well-formed but cannot be carried out on this machine."""

    exit_code = ExitCode.CONFIGURATION
