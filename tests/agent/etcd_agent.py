"""An agent to be killed that runs a private etcd: prints the pids below it as JSON once it is ready, and waits.

``python -m tests.agent.etcd_agent PORT``
"""

from __future__ import annotations

import json
import os
import signal
import sys

from dlaunch.agent.etcd_server import EtcdServer, EtcdState
from dlaunch.worker.family import alive_below

PATIENCE_S = 60.0


def main() -> None:
    server = EtcdServer.start("127.0.0.1", int(sys.argv[1]), None)
    assert isinstance(server, EtcdServer)
    assert server.settled(PATIENCE_S) is EtcdState.READY
    print(json.dumps([[each.pid, each.name] for each in alive_below(os.getpid())]), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
