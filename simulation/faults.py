"""What is done to a cluster from outside, each at its time: values, so that a run can be replayed with fewer."""

from __future__ import annotations

import random
from enum import Enum
from typing import NamedTuple


class Leases(Enum):
    """What a cluster that was away as a whole makes of its leases."""

    KEPT = "kept"  # each with its full time again
    LAPSED = "lapsed"  # those that ran out meanwhile go at once
    AGED = "aged"  # as above, when it comes to look


class Kind(Enum):
    """The sorts of faults, and of things that users do."""

    WORKER_FAILS = "worker fails"
    WORKER_STALLS = "worker stalls"
    STARTER_DIES = "starter dies"
    AGENT_CRASHES = "agent crashes"
    AGENT_FREEZES = "agent freezes"
    HOST_FREEZES = "host freezes"
    POWER_FAILS = "power fails"
    STORE_CUT = "store cut"  # for one host
    STORE_AWAY = "store away"  # for all
    LEADER_CHANGES = "leader changes"
    COMPACTION = "compaction"
    PEERS_CUT = "peers cut"  # two hosts
    HOST_CUT = "host cut"  # one host from its peers and from the store
    JOIN = "join"
    LEAVE = "leave"  # SIGTERM
    SNAPSHOT = "snapshot"  # of the store
    RESTORE = "restore"  # of the store, to the snapshot
    ANSWERS_SLOW = "answers slow"  # of the store, to one host
    PEERS_SLOW = "peers slow"  # two hosts
    GARBAGE = "garbage"  # somebody writes under the run's keys
    KEY_DELETED = "key deleted"  # a registration, by hand; its lease goes on
    USER_STOPS = "user stops"  # the run


class Snag(Enum):
    """What can happen to one request of one agent."""

    DIES_BEFORE = "its sender dies before it is sent"
    DIES_AFTER = "its sender dies when it is sent"
    REQUEST_LOST = "it is lost"
    ANSWER_LOST = "its answer is lost"
    LATE = "it arrives late"


class Trap(NamedTuple):
    """The first write of a key like this, with a value like this, meets a snag."""

    key: str  # is in the key, below the run's root
    value: str  # is in the value
    snag: Snag
    for_s: float = 0.0  # LATE: by so much; DIES_*: until the next agent starts there


class Fault(NamedTuple):
    """One thing that happens."""

    at: float
    kind: Kind
    host: int = 0  # its number
    other: int = 0
    for_s: float = 0.0  # how long it lasts; where somebody dies, how long until the next agent starts there
    leases: Leases = Leases.KEPT
    hard: bool = False  # STORE_*: silence, not refusals; WORKER_FAILS: a signal; AGENT_CRASHES: same address again
    delay_s: float = 0.0  # *_SLOW: how long an answer or a message takes

    def __str__(self) -> str:
        return f"{self.at:.2f} s: {self.kind.value}, host {self.host}, {self.for_s:.2f} s"


WEIGHTS = {
    Kind.WORKER_FAILS: 6,
    Kind.WORKER_STALLS: 1,
    Kind.STARTER_DIES: 1,
    Kind.AGENT_CRASHES: 5,
    Kind.AGENT_FREEZES: 5,
    Kind.HOST_FREEZES: 3,
    Kind.POWER_FAILS: 2,
    Kind.STORE_CUT: 5,
    Kind.STORE_AWAY: 4,
    Kind.LEADER_CHANGES: 2,
    Kind.COMPACTION: 1,
    Kind.PEERS_CUT: 4,
    Kind.HOST_CUT: 3,
    Kind.JOIN: 2,
    Kind.LEAVE: 2,
}


_RARE = {Kind.ANSWERS_SLOW: 0.2, Kind.PEERS_SLOW: 0.2, Kind.GARBAGE: 0.1, Kind.KEY_DELETED: 0.1, Kind.USER_STOPS: 0.03}

_WRITES = (
    ("round", '"forming"'),
    ("round", '"running"'),
    ("round", '"stopping"'),
    ("round", '"closed"'),
    ("report/", ""),
    ("nodes/", ""),
    ("assign/", ""),
)


def draw_traps(dice: random.Random, *, lease_s: float) -> tuple[Trap, ...]:
    """A few writes that go wrong, each at the worst moment: between two steps of one agent."""
    return tuple(
        Trap(*dice.choice(_WRITES), dice.choice(list(Snag)), dice.choice((0.1, 1.0, 2.5, lease_s, 3 * lease_s)))
        for _ in range(dice.choice((0, 0, 0, 1, 2)))
    )


def draw_outage(dice: random.Random, *, hosts: int, from_s: float, to_s: float, lease_s: float) -> tuple[Fault, ...]:
    """The store is away for some or for all, for about as long as a lease, and meanwhile other things happen."""
    begins = dice.uniform(from_s, max(from_s, to_s - 2 * lease_s))
    lasts = lease_s * dice.choice((dice.uniform(0.3, 1.5), dice.uniform(0.8, 5.0)))
    hard, leases = dice.random() < 0.5, dice.choice(list(Leases))
    faults = []
    if away := dice.random() < 0.6:
        faults.append(Fault(begins, Kind.STORE_AWAY, 0, 0, lasts, leases, hard))
    for host in range(hosts):
        if dice.random() < (0.4 if away else 0.6):  # some find it later than the others, or lose it earlier
            at = begins + lease_s * dice.uniform(-0.5, 0.5)
            faults.append(Fault(at, Kind.STORE_CUT, host, 0, lasts + lease_s * dice.uniform(-0.5, 2.0), leases, hard))
    for _ in range(dice.choice((0, 1, 2, 2, 3))):
        kind = dice.choice(_MEANWHILE)
        at, for_s = begins + dice.uniform(-0.2, 1.2) * lasts, lease_s * dice.choice((0.1, 0.5, 1.0, 1.5, 3.0))
        if kind is Kind.PEERS_CUT:  # with the store, and for as long
            at, for_s = begins + lease_s * dice.uniform(-0.5, 0.5), lasts + lease_s * dice.uniform(-0.2, 2.0)
        faults.append(Fault(at, kind, dice.randrange(hosts), dice.randrange(hosts), for_s, leases, dice.random() < 0.5))
    return tuple(fault for fault in faults if 0.0 <= fault.at < to_s)


_MEANWHILE = (
    Kind.PEERS_CUT,
    Kind.PEERS_CUT,
    Kind.AGENT_FREEZES,
    Kind.AGENT_FREEZES,
    Kind.HOST_FREEZES,
    Kind.AGENT_CRASHES,
    Kind.WORKER_FAILS,
    Kind.WORKER_FAILS,
    Kind.POWER_FAILS,
    Kind.JOIN,
    Kind.LEADER_CHANGES,
)


def draw_faults(
    dice: random.Random, *, hosts: int, from_s: float, to_s: float, most: int, lease_s: float
) -> tuple[Fault, ...]:
    """Up to so many faults, of a few kinds drawn for this run; often close together, for it is then that they hurt."""
    kinds = [kind for kind in WEIGHTS if dice.random() < dice.choice((0.25, 0.5, 0.9))] or list(WEIGHTS)
    weights = [WEIGHTS[kind] for kind in kinds]
    faults = []
    at = dice.uniform(from_s, to_s)
    for _ in range(dice.randint(1, most)):
        close = dice.random() < 0.6
        at = min(to_s, at + dice.expovariate(2.0 / lease_s)) if close else dice.uniform(from_s, to_s)
        kind = dice.choices(kinds, weights)[0]
        one = dice.randrange(hosts)
        other = (one + dice.randrange(1, hosts)) % hosts if hosts > 1 else one
        for_s = dice.choice(
            (dice.uniform(0.0, 1.0), dice.uniform(0.0, 2 * lease_s), dice.uniform(lease_s, 4 * lease_s))
        )
        faults.append(Fault(at, kind, one, other, for_s, dice.choice(list(Leases)), dice.random() < 0.5))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def draw_rare(dice: random.Random, *, hosts: int, from_s: float, to_s: float, lease_s: float) -> tuple[Fault, ...]:
    """What happens in few runs: ways that are slow for a while, and what people do to the run's keys."""
    faults = []
    for kind, chance in _RARE.items():
        while dice.random() < chance:
            one, other = dice.randrange(hosts), dice.randrange(hosts)
            for_s, delay_s = dice.uniform(0.5, 3.0) * lease_s, lease_s * dice.choice((0.1, 0.2, 0.24, 0.4, 0.6))
            faults.append(Fault(dice.uniform(from_s, to_s), kind, one, other, for_s, delay_s=delay_s))
    return tuple(faults)
