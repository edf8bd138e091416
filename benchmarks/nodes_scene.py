"""Where a fault happens: hosts with their own addresses, three etcd members, and a job that trains on some of them."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for tests/, whose real hosts and real etcd these are

from tests.hosts import INTERFACE, HostedEtcd, Hosts, NoHosts  # noqa: E402
from tests.nodes_job import DLAUNCH, Life, Node, NodesJob, NotInTime, children, now, overlaps  # noqa: E402

__all__ = [
    "DLAUNCH",
    "INTERFACE",
    "Arm",
    "HostedEtcd",
    "Hosts",
    "Life",
    "NoHosts",
    "Node",
    "NodesJob",
    "NotInTime",
    "Scene",
    "Stage",
    "children",
    "now",
    "overlaps",
]

NODES = ("a", "b", "c")
MEMBERS = ("e0", "e1", "e2")
START_LIMIT_S = 120.0  # several processes import torch at once, on a loaded machine
WARM_STEPS = 20  # before anything is done to a job
PROGRAM = ROOT / "benchmarks" / "programs" / "nodes_steps.py"
TORCHRUN = (str(Path(sys.executable).parent / "torchrun"),)
MAX_RESTARTS = "20"


class Arm(NamedTuple):
    """A launcher, and how long it may take to train again."""

    name: str
    is_ours: bool
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()


@dataclass
class Stage:
    """What all trials share: the hosts and the etcd."""

    hosts: Hosts
    etcd: HostedEtcd
    members: tuple[str, ...]

    @classmethod
    @contextmanager
    def build(cls, members: int) -> Iterator[Stage]:
        """etcd has the heartbeats and elections that it has by default."""
        names = MEMBERS[:members]
        with Hosts((*NODES, *names)) as hosts:
            etcd = HostedEtcd(hosts, names, heartbeat_ms=100, election_ms=1000)
            with etcd:
                yield cls(hosts, etcd, names)

    def etcd_version(self) -> str:
        """As the first member tells it."""
        return str(self.etcd.post(0, "maintenance/status", {})["version"])

    def mend(self) -> None:
        """Let every member run again."""
        for member in range(len(self.members)):
            self.etcd.mend(member)
        self.etcd.wait_healthy()


@dataclass
class Scene:
    """One job of one trial."""

    stage: Stage
    arm: Arm
    nnodes: str = "1:2"
    more_flags: tuple[str, ...] = ()
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    may_overlap_s: float = 0.0

    def __post_init__(self) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.folder = Path(tempfile.mkdtemp(prefix="dlaunch-faults-"))
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE, **dict(self.arm.environment)}
        self.job = NodesJob(self.folder, self._command(), PROGRAM, environment)
        self.expected_codes: dict[str, tuple[int, ...]] = {}

    def _command(self) -> list[str]:
        common = [f"--nnodes={self.nnodes}", "--nproc-per-node=1", f"--max-restarts={MAX_RESTARTS}"]
        common += [f"--rdzv-id={self.run_id}", *self.more_flags, f"--log-dir={self.folder / 'logs'}"]
        if self.arm.is_ours:
            endpoints = ",".join(self.stage.etcd.endpoints)
            return [*DLAUNCH, *common, "--rdzv-backend=etcd", f"--rdzv-endpoint={endpoints}"]
        return [*TORCHRUN, *common, "--rdzv-backend=c10d", f"--rdzv-endpoint={self.stage.hosts['a'].address}:29400"]

    # --- what happens ----------------------------------------------------------------------------------------------

    def start(self, name: str) -> Node:
        """A launcher on a host."""
        host = self.stage.hosts[name]
        return self.job.start(name, *(() if self.arm.is_ours else self._helps_torchrun(name)), prefix=host.prefix)

    def _helps_torchrun(self, name: str) -> tuple[str, ...]:
        """It would look host names up, and these lead nowhere."""
        return (f"--local-addr={self.stage.hosts[name].address}", f"--rdzv-conf=is_host={int(name == 'a')}")

    def train(self, *names: str) -> list[Node]:
        """Start launchers, and wait until the world of them all has trained for a while."""
        nodes = [self.start(name) for name in names]
        world = self.job.world(len(names), steps=True, limit_s=START_LIMIT_S)
        pids = {life.pid for life in world}
        self.until_trained(lambda life: life.pid in pids)
        return nodes

    def until_trained(self, which: Callable[[Life], bool]) -> None:
        """Wait until certain workers have made some steps."""

        def ready() -> bool:
            lives = [life for life in self.job.lives() if which(life)]
            return bool(lives) and all(len(life.steps) >= WARM_STEPS for life in lives)

        self.job.until("the world has trained for a while", ready, START_LIMIT_S)

    def trains_again(self, size: int, since: float) -> float:
        """Seconds from ``since`` to the first step of a whole new world of this size."""
        world = self.job.world(size, since=since, limit_s=self.arm.limit_s, steps=True)
        return max(life.steps[0][0] for life in world) - since

    def goes_on(self, pids: set[int], since: float, until: float) -> None:
        """See that these workers train until then, and that no others were started since."""
        self.job.until("the time has come", lambda: now() >= until, until - now() + 10.0)
        fresh = [life for life in self.job.lives() if life.pid not in pids and life.begun_at > since]
        if fresh:
            self.wrong.append(f"{len(fresh)} workers were started anew, although nothing had failed")
        for life in self.job.lives():
            if life.pid in pids and life.last < until - 2.0:
                self.wrong.append(f"the worker of rank {life.rank} was stopped")

    def longest_gap(self, pids: set[int], since: float, until: float) -> float:
        """The longest time between two steps of these workers."""
        gaps = [0.0]
        for life in self.job.lives():
            if life.pid in pids:
                at = [since, *(t for t, _step in life.steps if since <= t <= until), until]
                gaps += [after - before for before, after in pairwise(at)]
        return max(gaps)

    # --- who is who ------------------------------------------------------------------------------------------------

    def world_now(self) -> list[Life]:
        """The workers that live."""
        living = set(self.job.processes())
        return [life for life in self.job.lives() if life.pid in living]

    def by_group_rank(self, group_rank: int) -> Node:
        """The node whose workers have this group rank now."""
        wanted = str(group_rank)
        host = next(life.host for life in reversed(self.world_now()) if life.told["GROUP_RANK"] == wanted)
        return self.node_on(host)

    def node_on(self, host: str) -> Node:
        """The newest launcher on a host."""
        return next(node for node in reversed(self.job.nodes) if node.name == host)

    def oldest_proposer(self) -> Node:
        """The node that is the first to propose, as etcd has it."""
        elder = self.keys("round")[0][1]["elders"][0]
        host = next(record["host"] for key, record in self.keys("nodes/") if key.endswith(elder))
        return self.node_on(host)

    def registered(self) -> int:
        """How many nodes are registered."""
        return len(self.keys("nodes/"))

    def until_registered(self, count: int) -> float:
        """Wait for so many nodes; when they were there."""
        self.job.until(f"{count} nodes are registered", lambda: self.registered() >= count, START_LIMIT_S)
        return now()

    def keys(self, below: str) -> list[tuple[str, Any]]:
        """What stands in etcd under a name of this run."""
        key = f"/dlaunch/{self.run_id}/{below}".encode()
        body = {"key": _base64(key), "range_end": _base64(key[:-1] + bytes([key[-1] + 1]))}
        answer = self.stage.etcd.post(self.stage.etcd.leader(), "kv/range", body)
        return [
            (base64.b64decode(kv["key"]).decode(), json.loads(base64.b64decode(kv["value"])))
            for kv in answer.get("kvs", [])
        ]

    # --- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the job end, and judge how it did: exit codes, what is left, worlds that were there at once."""
        self.job.put("finish")
        for node in self.job.nodes:
            allowed = self.expected_codes.get(node.name, (0,))
            try:
                code = node.end(60.0)
            except NotInTime:
                self.wrong.append(f"{node.name} did not end within 60 s")
                continue
            if code not in allowed and self.arm.is_ours:
                self.wrong.append(f"{node.name} ended with {code}, not with {' or '.join(map(str, allowed))}")
        if self.arm.is_ours:
            self.wrong += [f"left behind: {one}" for one in self.job.left()]

    def judge(self) -> None:
        """No two worlds at once, ever."""
        if not self.arm.is_ours:
            return
        for overlap in overlaps(self.job.lives()):
            if overlap.seconds > self.may_overlap_s:
                self.wrong.append(f"two worlds: {overlap}")
            else:
                self.notes.append(f"a frozen host ran on for {overlap.seconds * 1000:.0f} ms")

    def close(self) -> None:
        """Nothing of it lives afterwards."""
        self.job.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
