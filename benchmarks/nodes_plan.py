"""One chaos scenario of several nodes: which job, and which faults at which moments, all from one integer. Pure."""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import NamedTuple

LEASE_S = 2.0
OUTAGE_LIMIT_S = 8.0
MAX_RESTARTS = 20


class Kind(Enum):
    """What is done."""

    KILL_WORKER = "a worker is killed"
    KILL_STARTER = "a starter is killed"
    KILL_GUARD = "a guard is killed"
    KILL_AGENT = "an agent is killed"
    KILL_NODE = "a node is killed, all its processes at once"
    LOSE_NODE = "a node vanishes: its cable first, then its processes"
    LEAVE = "a node is asked to leave"
    JOIN = "a node joins"
    FREEZE_AGENT = "an agent is frozen for a while"
    FREEZE_NODE = "a node is frozen for a while"
    CUT_FROM_ETCD = "a node cannot reach etcd for a while"
    CUT_FROM_PEERS = "a node cannot reach its peers for a while"
    UNPLUG = "a node's cable is out for a while"
    KILL_LEADER = "etcd's leader is killed, and comes back"
    STOP_MEMBER = "an etcd member is stopped for a while"
    ETCD_AWAY = "all of etcd is killed, and comes back"


REMOVES = (Kind.KILL_AGENT, Kind.KILL_NODE, Kind.LOSE_NODE, Kind.LEAVE)  # a node
COSTS_A_RESTART = (Kind.KILL_WORKER, Kind.KILL_STARTER, Kind.KILL_GUARD)  # at most
LASTS = (
    *(Kind.FREEZE_AGENT, Kind.FREEZE_NODE, Kind.CUT_FROM_ETCD, Kind.CUT_FROM_PEERS, Kind.UNPLUG),
    *(Kind.KILL_LEADER, Kind.STOP_MEMBER, Kind.ETCD_AWAY),
)


class Fault(NamedTuple):
    """One of them."""

    kind: Kind
    after_s: float  # after the one before began
    victim: float  # which of those that are there: a fraction of their number
    lasts_s: float  # for what does not last, 0

    def __str__(self) -> str:
        lasting = f" ({self.lasts_s:.1f} s)" if self.lasts_s else ""
        return f"{self.kind.value}{lasting}"


class Plan(NamedTuple):
    """All that a scenario does."""

    seed: int
    nodes: int  # that are started, spares included
    least: int
    most: int
    nproc: int
    max_restarts: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        job = f"{self.nodes} x {self.nproc}, --nnodes {self.least}:{self.most}, restarts {self.max_restarts}"
        return f"{', '.join(map(str, self.faults))} [{job}]"


def draw(seed: int) -> Plan:
    """The scenario of a seed."""
    random = Random(seed)
    most = random.choice((2, 2, 3))
    least = random.choice((1, most - 1, most))
    nodes = most + (random.random() < 0.3)
    if random.random() < 0.08:  # a job that must fail
        faults = (Fault(Kind.KILL_WORKER, random.uniform(0.0, 1.0), random.random(), 0.0),)
        return Plan(seed, nodes, least, most, random.choice((1, 2)), 0, faults)
    faults = tuple(_fault(random) for _ in range(random.choice((1, 1, 2, 2, 3))))
    return Plan(seed, nodes, least, most, random.choice((1, 1, 2)), MAX_RESTARTS, faults)


def _fault(random: Random) -> Fault:
    kind = random.choice(tuple(Kind))
    lasts_s = random.choice((0.5, LEASE_S * 0.8, LEASE_S * 1.3, LEASE_S * 2.5)) if kind in LASTS else 0.0
    return Fault(kind, random.choice((0.0, 0.02, 0.3, 1.0, 3.0)), random.random(), lasts_s)
