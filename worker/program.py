"""Workers as programs of their own (``--start-method exec`` and ``--no-python``): fork, then execve."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from .birth import NotStarted, Request, fork
from .hooked import CHANNEL, ENTRY, hooked
from .signals import SignalInbox, unignore_for_exec

_LOOK_UP_MS = 100  # from waiting for a program
_NOT_EXECUTED = 127  # the shell's code for it; nobody but us sees it


class ProgramBirth:
    """Starts each worker with execve. A Python program passes through our hook, for the error capture."""

    def __init__(self, inbox: SignalInbox, entry: str) -> None:
        self._inbox = inbox
        self._private = {ENTRY: entry} if entry else {}

    def worker(self, request: Request, meanwhile: Callable[[], None]) -> int:
        """Start the program, and wait until the kernel has taken it or refused it.

        That takes milliseconds, but for a file system that hangs.
        """
        told, tell = os.pipe2(os.O_CLOEXEC)
        try:
            pid = fork(self._inbox)
            if pid == 0:
                _become_program(request, self._private, tell)
        finally:
            os.close(tell)
        waiting = select.poll()
        waiting.register(told, select.POLLIN)
        while not waiting.poll(_LOOK_UP_MS):
            meanwhile()
        refusal = os.read(told, 4096)  # whole: less than PIPE_BUF
        os.close(told)
        if refusal:
            os.waitpid(pid, 0)
            raise NotStarted(refusal.decode("utf-8", "surrogateescape"))
        return pid

    def store(self, request: Request) -> int:
        """Programs meet without our help: always raises NotStarted."""
        raise NotStarted("only a warm starter can serve the workers' store.")


def why_not_executed(program: str, error: OSError) -> str:
    """One sentence, with the fix where there is one. Source of the cases: execve(2)."""
    if error.errno == errno.ENOENT and os.path.exists(program):  # noqa: PTH110
        return f"{program} cannot be executed: the interpreter that its first line names does not exist."
    if error.errno == errno.ENOENT:
        return f"{program} was not found."
    if error.errno == errno.EACCES:
        return f"{program} may not be executed: it needs the execute permission (chmod +x)."
    if error.errno == errno.ENOEXEC:
        return f"{program} is not a program: a script needs a first line that names its interpreter (#!/bin/sh)."
    return f"{program} cannot be executed: {error.strerror}."


def _become_program(request: Request, private: Mapping[str, str], tell: int) -> NoReturn:
    command: list[str] = request.frame["command"]
    try:
        out, err, channel = request.fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        unignore_for_exec()
        environment = {**os.environ, **request.frame["environment"]}
        if request.frame.get("python"):
            os.set_inheritable(channel, True)
            environment = hooked(environment, {CHANNEL: str(channel), **private})
        os.execvpe(command[0], command, environment)
    except OSError as error:
        _answer(tell, why_not_executed(command[0], error))
    except BaseException as error:
        _answer(tell, f"{error!r}")
    os._exit(_NOT_EXECUTED)


def _answer(tell: int, sentence: str) -> None:
    with suppress(OSError):
        os.write(tell, sentence.encode("utf-8", "surrogateescape"))
