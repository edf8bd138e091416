"""An agent to be killed that listens, and whose guard holds the listening socket: prints who is who, and waits.

``python -m tests.worker.listening_agent warm|exec script``
"""

from __future__ import annotations

import json
import signal
import socket
import sys

from dlaunch import frames
from tests.worker.driver import Driver


def main() -> None:
    mode, script = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as listener, Driver(mode, [sys.executable, "-u", script]) as driver:
        frames.send(driver.guard_socket, {"kind": "hold"}, [listener.fileno()])
        driver.starter_says("ready")
        worker = driver.spawn()
        worker.out.lines(1)
        told = {"guard": driver.guard.pid, "starter": driver.starter_pid, "port": listener.getsockname()[1]}
        print(json.dumps({**told, "worker": driver.starter_says("started", worker.id)["pid"]}), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
