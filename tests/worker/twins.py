"""The same program twice: under plain Python, and below a starter. What came out of it, to be compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .driver import PATIENCE_S, Driver

# Other versions, on a machine that has them: DLAUNCH_TEST_PYTHONS=/some/python3.10:/some/python3.13
PYTHONS = [sys.executable, *filter(None, os.environ.get("DLAUNCH_TEST_PYTHONS", "").split(os.pathsep))]
# A Python below any other Python (torchrun's workers too) finds LC_CTYPE set where nobody chose a locale (PEP 538).
BASIC = {"LC_CTYPE": "C.UTF-8"} | {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


class Result(NamedTuple):
    """How a program ended and what it wrote, without addresses, which are new in every process."""

    exit_code: int
    stdout: str
    stderr: str

    @classmethod
    def of(cls, exit_code: int, stdout: bytes, stderr: bytes) -> Result:
        """From bytes."""
        return cls(
            exit_code, *(re.sub("0x[0-9a-f]+", "0x", text.decode(errors="replace")) for text in (stdout, stderr))
        )


class Surroundings(NamedTuple):
    """Where a program runs, and with what."""

    cwd: Path
    environment: Mapping[str, str] = BASIC
    python: str = sys.executable
    preload: Sequence[str] = ()
    torch: bool = False

    def plainly(self, arguments: Sequence[str], stdin: str = "") -> Result:
        """Run ``python -u arguments`` here."""
        done = subprocess.run(
            [self.python, "-u", *arguments],
            cwd=self.cwd,
            env=dict(self.environment),
            input=stdin.encode(),
            capture_output=True,
            start_new_session=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return Result.of(done.returncode, done.stdout, done.stderr)

    def starter(self, mode: str, arguments: Sequence[str], stdin: str = "") -> Driver:
        """A starter of the same command here."""
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, stdin.encode())
            os.close(write_end)
            return Driver(
                mode,
                [self.python, "-u", *arguments],
                preload=self.preload if mode == "warm" else (),
                torch=self.torch,
                inherited=self.environment,
                cwd=self.cwd,
                stdin=read_end,
            )
        finally:
            os.close(read_end)

    def below_starter(self, mode: str, arguments: Sequence[str], stdin: str = "") -> Result:
        """Run it as the only worker of a new starter."""
        with self.starter(mode, arguments, stdin) as driver:
            return run_in(driver)


def run_in(driver: Driver, command: Sequence[str] | None = None) -> Result:
    """Run a worker to its end."""
    worker = driver.spawn(command=command)
    code = driver.exit_code(worker)
    driver.sweep()
    return Result.of(code, worker.out.all(), worker.err.all())
