"""An agent to be killed that runs a private etcd: prints the pids below it as JSON once it is ready, and waits.

``python -m tests.agent.etcd_agent PORT``
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

from dlaunch.agent.etcd_server import EtcdServer
from dlaunch.worker.family import alive_below


def main() -> None:
    server = EtcdServer.start("127.0.0.1", int(sys.argv[1]), None)
    assert isinstance(server, EtcdServer)
    while not server.is_ready():
        select.select([server.socket], [], [])
    print(json.dumps([[each.pid, each.name] for each in alive_below(os.getpid())]), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
