"""``nodes_worker.py FOLDER``: a worker without torch, for tests of many nodes. It shows when it lived, in which world.

It writes a file of its own, ``FOLDER/lives/<pid>``: one line of JSON with the variables that it was given, then a line
with the seconds on CLOCK_BOOTTIME every few milliseconds. It ends with 0 once FOLDER holds ``finish``, and with what
``fail-<rank>-<restart count>`` holds once that is there. It ends by itself after three minutes.
"""

import json
import os
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
LIMIT_S = 180.0
TICK_S = 0.005
NAMES = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def main() -> None:
    told = {name: os.environ.get(name, "") for name in NAMES}
    begun_at = now()
    fail = FOLDER / f"fail-{told['RANK']}-{told['TORCHELASTIC_RESTART_COUNT']}"
    fresh = FOLDER / "lives" / f".{os.getpid()}"
    with fresh.open("wb", buffering=0) as life:
        life.write((json.dumps(told | {"host": os.uname().nodename, "at": begun_at}) + "\n").encode())
        fresh.rename(fresh.with_name(str(os.getpid())))
        print(f"rank {told['RANK']} of {told['WORLD_SIZE']}", flush=True)
        while now() < begun_at + LIMIT_S:
            life.write(b"%.6f\n" % now())
            if fail.exists():
                sys.exit(int(fail.read_text() or "1"))
            if (FOLDER / "finish").exists():
                sys.exit(0)
            time.sleep(TICK_S)
    sys.exit("nobody came to end this test")


if __name__ == "__main__":
    main()
