"""A whole run whose log directory hangs: the job is supervised as ever."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


def test_a_signal_ends_the_job_in_time_although_a_log_file_hangs(
    script: Callable[..., str], job: Callable[..., Any]
) -> None:
    """In the first attempt the script puts a named pipe, which hangs, where the next one's log file is to be."""
    path = script(
        """
        import os, pathlib, signal, sys
        first = os.environ["LOCAL_RANK"] == "0"
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if first:
                run = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2]
                hung = run / "attempt_1/0/stderr.log"
                hung.parent.mkdir(parents=True)
                os.mkfifo(hung)
                sys.exit(1)
        elif first:
            sys.stderr.write("x" * 1_000_000)
            print("has written")
        while True:
            signal.pause()
        """
    )
    run = job("--nproc-per-node", "2", "--max-restarts", "1", "--redirects", "0:2", "--start-method", "exec", path)
    run.line("has written")
    run.signal(signal.SIGTERM)
    done = run.end(timeout=30)
    assert done.exit_code == 128 + signal.SIGTERM
    assert "attempt_1/0/stderr.log" in done.stderr
    assert "cannot be completed: the file system does not answer" in done.stderr
    run.nothing_left()
