"""An agent to be killed: starts a tree of processes below a worker, prints all process ids, and waits.

``python -m tests.worker.agent_process warm|exec script [seconds until the workers are to be dead]``
"""

from __future__ import annotations

import json
import signal
import sys

from dlaunch.clock import now
from tests.worker.driver import Driver

PROCESSES_BELOW = 5


def main() -> None:
    mode, script, *deadline_s = sys.argv[1:]
    with Driver(mode, [sys.executable, "-u", script]) as driver:
        driver.starter_says("ready")
        worker = driver.spawn()
        pids = [driver.starter_says("started", worker.id)["pid"]]
        pids += [int(line) for line in worker.out.lines(PROCESSES_BELOW)]
        if deadline_s:
            driver.ask({"kind": "deadline", "at": now() + float(deadline_s[0])})
        print(json.dumps({"guard": driver.guard.pid, "starter": driver.starter_pid, "below": pids}), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
