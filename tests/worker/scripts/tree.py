"""A worker with a child, a grandchild, one in a session of its own, a daemon, and one that ignores signals.

Prints the process id of each; all of them live until they are killed.
"""

import os
import signal


def live() -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # whole: others print at the same time
    while True:
        signal.pause()


def child_with_a_child() -> None:
    if os.fork() == 0:
        live()
    live()


def own_session() -> None:
    os.setsid()
    live()


def daemon() -> None:
    os.setsid()
    if os.fork() == 0:
        live()
    os._exit(0)


def deaf() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    live()


for branch in (child_with_a_child, own_session, daemon, deaf):
    if os.fork() == 0:
        branch()
while True:
    signal.pause()
