"""The script that chaos.py runs under dlaunch: says that it is there, behaves as it is told, ends when it is told.

    chaos_worker.py FOLDER BEHAVIOUR

In FOLDER it writes ``alive_<attempt>_<rank>`` (JSON: its pid and its child's) when it is set up, and
``stopping_<attempt>_<rank>`` when a SIGTERM has reached its handler. It ends with 0 once ``finish`` is there; rank 0
of the first attempt ends with 7 once ``fail`` is there. It ends by itself after two minutes, whatever happens.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FAIL_CODE = 7
SLOW_STOP_S = 1.8  # at most: less than the grace period of the scenarios that strike meanwhile
LIMIT_S = 120.0


def tell(folder: Path, what: str, content: object = None) -> None:
    """Put a file in place at once, so that nobody reads half of it."""
    name = f"{what}_{ATTEMPT}_{RANK}"
    fresh = folder / f".{name}"
    fresh.write_text(json.dumps(content))
    fresh.replace(folder / name)


def sleeper(*before: str) -> int:
    """A child that sleeps for longer than any scenario lasts; returns its pid."""
    return subprocess.Popen([*before, "sleep", "600"]).pid


def ignore_the_polite_signals(folder: Path) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


def end_well_at_sigterm(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def stop_slowly(folder: Path) -> None:
    def on_term(*_: object) -> None:
        tell(folder, "stopping")
        deadline = time.monotonic() + SLOW_STOP_S
        while not (folder / "finish").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)


def note_usr1(folder: Path) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: tell(folder, "usr1"))


def have_a_child(folder: Path) -> int:
    return sleeper()


def have_grandchildren(folder: Path) -> int:
    """A shell that waits for two sleepers: it lives, and so do they."""
    return subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"]).pid


def have_a_stubborn_child(folder: Path) -> int:
    return sleeper("env", "--ignore-signal=TERM", "--ignore-signal=HUP", "--ignore-signal=INT")


def have_a_daemon(folder: Path) -> int:
    """Forked twice, in a session of its own, with nothing left of our descriptors: as far away as one can get."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) != 0:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.closerange(0, 100)
        os.execvp("sleep", ["sleep", "600"])
    os.wait()
    return int(os.read(read, 20))


def print_all_the_time(folder: Path) -> None:
    """Handled in `work`: a line at each look."""


def train(folder: Path) -> None:
    """Handled in `work`: a collective at each look."""
    import torch.distributed as dist  # noqa: PLC0415  -- the other behaviours do without

    dist.init_process_group("gloo")


BEHAVIOURS: dict[str, Callable[[Path], "int | None"]] = {
    "idle": lambda _folder: None,
    "prints": print_all_the_time,
    "ignores-term": ignore_the_polite_signals,
    "ends-well-at-term": end_well_at_sigterm,
    "stops-slowly": stop_slowly,
    "handles-usr1": note_usr1,
    "child": have_a_child,
    "grandchildren": have_grandchildren,
    "stubborn-child": have_a_stubborn_child,
    "daemon": have_a_daemon,
    "trains": train,
}


def work(folder: Path, behaviour: str) -> None:
    """Look again and again whether the end has come."""
    deadline = time.monotonic() + LIMIT_S
    turn = 0
    while not told_to_finish(folder, behaviour):
        if RANK == 0 and ATTEMPT == 0 and (folder / "fail").exists():
            sys.exit(FAIL_CODE)
        if time.monotonic() > deadline:
            sys.exit("nobody came to end this scenario")
        turn += 1
        if behaviour == "prints":
            print(f"attempt {ATTEMPT} rank {RANK} line {turn}", flush=True)
        time.sleep(0.01)


def told_to_finish(folder: Path, behaviour: str) -> bool:
    finish = (folder / "finish").exists()
    if behaviour != "trains":
        return finish
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    flag = torch.tensor(int(finish))
    dist.all_reduce(flag)  # all of them leave at the same step
    return bool(flag.item())


def main() -> None:
    folder, behaviour = Path(sys.argv[1]), sys.argv[2]
    child = BEHAVIOURS[behaviour](folder)
    tell(folder, "alive", {"pid": os.getpid(), "child": child})
    work(folder, behaviour)


if __name__ == "__main__":
    main()
