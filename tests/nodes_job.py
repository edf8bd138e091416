"""One job on several nodes, driven through the real command: what its launchers print, and when which workers lived.

The workers' programs write down when they live (nodes_worker.py, benchmarks/programs/nodes_steps.py); `worlds` and
`overlaps` judge that. A node is one dlaunch process and all below it; a host may be this machine or one of hosts.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

RUN, NODE = "NODES_TEST_RUN", "NODES_TEST_NODE"  # in the environment of every process of a job, and of a node
PATIENCE_S = 60.0  # for anything that should happen at once, on a loaded machine
LOOK_S = 0.02  # there is no event for what another process writes into a file; when it was written stands in it
_T = TypeVar("_T")


class NotInTime(AssertionError):
    """Something did not happen; the message says what, and how things stood."""


class Life(NamedTuple):
    """One worker process, as it has written it down itself."""

    pid: int
    host: str
    rank: int
    world_size: int
    told: Mapping[str, str]  # the variables that it was given
    begun_at: float  # seconds on CLOCK_BOOTTIME
    ticks: tuple[float, ...]  # when it lived
    steps: tuple[tuple[float, int], ...]  # when each training step was done, for a program that trains

    @property
    def world(self) -> str:
        """What tells this worker's world from others: dlaunch gives each round a store of its own."""
        return f"{self.told['MASTER_ADDR']}:{self.told['MASTER_PORT']}"

    @property
    def restarts(self) -> int:
        return int(self.told["TORCHELASTIC_RESTART_COUNT"])

    @property
    def last(self) -> float:
        """When it is last known to have lived."""
        return self.ticks[-1] if self.ticks else self.begun_at


class Overlap(NamedTuple):
    """Two worlds at once."""

    seconds: float
    at: float  # when the earlier one first lived although the later one was there
    earlier: Life
    later: Life

    def __str__(self) -> str:
        old, new = (
            f"rank {life.rank} on {life.host} (pid {life.pid}) of {life.world}" for life in (self.earlier, self.later)
        )
        return (
            f"{old} lived for {self.seconds:.3f} s at {self.at:.3f}, after {new} had begun at {self.later.begun_at:.3f}"
        )


class Node:
    """One launcher, on one host."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self.began_at = now()
        self._mark = environment[NODE]
        self._lines: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._news:
                self._lines.append((now(), line.decode(errors="replace").rstrip("\n")))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        """What it has printed, on stdout and stderr."""
        return "\n".join(line for _at, line in self._lines)

    @property
    def timed_output(self) -> list[tuple[float, str]]:
        return list(self._lines)

    def line(self, having: str, limit_s: float = PATIENCE_S) -> str:
        """Wait for a line of its output."""

        def found() -> str | None:
            return next((line for _at, line in self._lines if having in line), None)

        with self._news:
            self._news.wait_for(lambda: found() or not self._reader.is_alive(), limit_s)
        if (line := found()) is None:
            raise NotInTime(f"{self.name} printed no line with {having!r}:\n{self.output}")
        return line

    def end(self, limit_s: float = PATIENCE_S) -> int:
        """Wait for the launcher's end; its exit code."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise NotInTime(f"{self.name} did not end within {limit_s:g} s:\n{self.output}") from None
        self._reader.join(PATIENCE_S)
        return code

    @property
    def pid(self) -> int:
        """Of the agent itself."""
        return self.process.pid

    def signal(self, signum: int) -> None:
        """Send a signal to the agent."""
        self.process.send_signal(signum)

    def processes(self) -> list[int]:
        """Everything of this node that lives."""
        return marked(NODE, self._mark)

    def signal_all(self, signum: int) -> None:
        """Send a signal to everything of this node, the agent first."""
        for pid in sorted(self.processes(), key=lambda pid: pid != self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


class NodesJob:
    """A job: its nodes, and the folder in which its workers write."""

    def __init__(
        self, folder: Path, command: Sequence[str], program: Path, environment: dict[str, str] | None = None
    ) -> None:
        """``command`` starts a launcher on every node, with what all nodes have in common."""
        self.folder = folder
        self.nodes: list[Node] = []
        self._command = tuple(command)
        self._program = program
        self._mark = uuid.uuid4().hex
        foreign = ("PET_", "DLAUNCH_", "TORCHELASTIC_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self._environment = {**clean, RUN: self._mark, **(environment or {})}
        self._readers: dict[int, _LifeReader] = {}
        (folder / "lives").mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *flags: str, prefix: Sequence[str] = ()) -> Node:
        """Start a launcher; ``prefix`` leads to its host."""
        environment = {**self._environment, NODE: f"{self._mark}.{len(self.nodes)}"}
        command = [*prefix, *self._command, *flags, str(self._program), str(self.folder)]
        node = Node(name, command, environment, self.folder)
        self.nodes.append(node)
        return node

    def put(self, name: str, content: str = "") -> None:
        """Tell the workers something, by a file that is there at once with its content."""
        fresh = self.folder / f".{name}"
        fresh.write_text(content)
        fresh.rename(self.folder / name)

    def lives(self) -> list[Life]:
        """All workers that ever were, in the order in which they began."""
        for file in (self.folder / "lives").iterdir():
            if file.name.isdigit() and int(file.name) not in self._readers:
                self._readers[int(file.name)] = _LifeReader(file)
        found = [life for reader in self._readers.values() if (life := reader.read())]
        return sorted(found, key=lambda life: life.begun_at)

    def workers_of(self, node: Node) -> list[Life]:
        """The workers of a node that live."""
        living = set(node.processes())
        return [life for life in self.lives() if life.pid in living]

    # --- waiting ---------------------------------------------------------------------------------------------------

    def until(self, what: str, ask: Callable[[], _T | None], limit_s: float = PATIENCE_S) -> _T:
        """Wait for something that is found in files; what was found."""
        deadline = now() + limit_s
        while not (found := ask()):
            if now() > deadline:
                raise NotInTime(f"not within {limit_s:g} s: {what}\n{self.story()}")
            time.sleep(LOOK_S)
        return found

    def world(self, size: int, since: float = 0.0, limit_s: float = PATIENCE_S, *, steps: bool = False) -> list[Life]:
        """Wait for a whole world whose workers all began at ``since`` or later (with ``steps``: and trained)."""

        def whole() -> list[Life] | None:
            fresh = [life for life in self.lives() if life.begun_at >= since and life.world_size == size]
            for lives in reversed(list(worlds(fresh).values())):
                if {life.rank for life in lives} == set(range(size)) and all(life.steps or not steps for life in lives):
                    return sorted(lives, key=lambda life: life.rank)
            return None

        return self.until(f"a whole world of {size}{' that trains' if steps else ''}", whole, limit_s)

    def story(self) -> str:
        """All that there is to understand a failure."""
        told = [
            f"--- {node.name} (pid {node.pid}, exit code {node.process.poll()})\n"
            + "\n".join(f"{at - node.began_at:8.3f} {line}" for at, line in node.timed_output[-60:])
            for node in self.nodes
        ]
        lived = [
            f"{life.begun_at:.3f} to {life.last:.3f}: rank {life.rank}/{life.world_size} of {life.world}, "
            f"restart {life.restarts}, on {life.host}, pid {life.pid}, {len(life.steps)} steps"
            for life in self.lives()
        ]
        return "\n".join([*told, "--- workers", *lived])

    # --- the end ---------------------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Everything of the job that lives, wherever it has gone."""
        return marked(RUN, self._mark)

    def left(self, limit_s: float = 20.0) -> list[str]:
        """What still lives so long after the end; nothing should."""
        deadline = now() + limit_s
        while (left := self.processes()) and now() < deadline:
            time.sleep(0.02)  # there is no event for the end of somebody else's process
        return [describe(pid) for pid in left]

    def kill(self) -> None:
        """Kill all of it, until nothing lives."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for node in self.nodes:
            node.end()


class _LifeReader:
    """Reads a worker's file as it grows."""

    def __init__(self, file: Path) -> None:
        self._file = file.open()
        self._pid = int(file.name)
        self._life: Life | None = None
        self._pending = ""
        self._ticks: list[float] = []
        self._steps: list[tuple[float, int]] = []

    def read(self) -> Life | None:
        *lines, self._pending = (self._pending + self._file.read()).split("\n")
        if not lines:
            return self._life
        if self._life is None:
            told = json.loads(lines.pop(0))
            self._life = Life(
                self._pid, told["host"], int(told["RANK"]), int(told["WORLD_SIZE"]), told, told["at"], (), ()
            )
        for line in lines:
            at, _space, step = line.partition(" ")
            self._ticks.append(float(at))
            if step and int(step) > len(self._steps):
                self._steps.append((float(at), int(step)))
        self._life = self._life._replace(ticks=tuple(self._ticks), steps=tuple(self._steps))
        return self._life


def worlds(lives: Iterable[Life]) -> dict[str, list[Life]]:
    """The workers of each world, in the order in which the worlds began."""
    found: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        found[life.world].append(life)
    return found


def overlaps(lives: Iterable[Life]) -> list[Overlap]:
    """Every pair of worlds that were there at once, by the workers that show it best.

    A worker lived when it says so: the time for which it stood still is no life.
    """
    found = []
    groups = sorted(worlds(lives).values(), key=lambda group: min(life.begun_at for life in group))
    for number, group in enumerate(groups):
        for other in groups[number + 1 :]:
            later = min(other, key=lambda life: life.begun_at)
            pairs = [_overlap(earlier, later) for earlier in group if earlier.last > later.begun_at]
            if pairs:
                found.append(max(pairs))
    return found


def _overlap(earlier: Life, later: Life) -> Overlap:
    ticks = [at for at in earlier.ticks if at > later.begun_at]
    return Overlap(ticks[-1] - ticks[0], ticks[0], earlier, later)


def now() -> float:
    """Seconds on CLOCK_BOOTTIME, the one clock of all processes of this machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def marked(name: str, value: str) -> list[int]:
    """Every living process that was born with a variable of this value; a zombie is none."""
    needle = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0") and _state(entry) not in "ZX":
                    found.append(int(entry.name))
    return found


def children(pid: int) -> list[int]:
    """The living children of a process, the oldest first."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return sorted(int(child) for child in found)


def describe(pid: int) -> str:
    """A process in one line."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"pid {pid} ({_state(Path(f'/proc/{pid}'))}) {command[:300]}"
    return f"pid {pid}, gone meanwhile"


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


DLAUNCH = (sys.executable, "-m", "dlaunch", "run")
