"""All that makes up one run before it begins, drawn from one seed: the hosts, the settings, the weather, the faults."""

from __future__ import annotations

import random
from typing import NamedTuple

from dlaunch.rendezvous.records import Join, RunSettings

from .clock import HostClock
from .faults import Fault, Trap, draw_faults, draw_outage, draw_rare, draw_traps
from .weather import FAIR, Weather, draw_weather


class HostPlan(NamedTuple):
    """A machine, and when its first agent starts."""

    starts_at: float = 0.0
    workers: int = 2
    name: str = ""  # empty: a letter; two of one name are one host to the run
    clock: HostClock = HostClock(1000.0)
    role: str = "default"
    node_rank: int | None = None  # the group rank that it wishes for


class Plan(NamedTuple):
    """One run."""

    seed: int
    hosts: tuple[HostPlan, ...]
    settings: RunSettings
    weather: Weather = FAIR
    faults: tuple[Fault, ...] = ()
    traps: tuple[Trap, ...] = ()
    etcd: tuple[str, int] = ("3.6.0", 1)  # its version, and how many members it has
    needed_s: float = 10.0  # of training with a whole world
    heals_at: float = 0.0  # from then on nothing is wrong any more
    timeout_s: float = 600.0  # --rdzv-timeout
    store_on: int | None = None  # the host that runs a private etcd; None: the etcd is elsewhere


SETTINGS = RunSettings(
    min_nodes=1, max_nodes=4, max_restarts=1000, early_stop=False, lease_ttl_s=5.0, outage_limit_s=20.0
)


PRIVATE_TIMEOUT_S = 20.0  # --rdzv-timeout of runs with a private etcd: for so long is it waited for in vain


def draw_plan(seed: int, agents: int = 5) -> Plan:
    """The run of a seed, with up to so many agents: mostly few, for that is where most faults hurt."""
    return _with_rare(draw_plain_plan(seed, agents))


def _with_rare(plan: Plan) -> Plan:
    """A plan with what few runs have: roles, wishes, hosts that are set aside, two agents on one host, a private etcd,
    and what people do to the run's keys.
    """
    dice = random.Random(f"{plan.seed}:rare")
    count, lease_s = len(plan.hosts), plan.settings.lease_ttl_s
    roles, wishes, twins = dice.random() < 0.3, dice.random() < 0.3, dice.random() < 0.1
    hosts = tuple(
        host._replace(
            role=dice.choice(("actor", "learner")) if roles else host.role,
            node_rank=dice.choice((None, *range(count))) if wishes else None,
            name="A" if twins and index < 2 else host.name,
        )
        for index, host in enumerate(plan.hosts)
    )
    settings = plan.settings._replace(
        max_node_failures=dice.choice((None, None, 1, 2)),
        cool_down_s=dice.choice((1.0, 5.0, 600.0)),
        restart_window_s=dice.choice((None, None, None, 5.0)),
    )
    faults = plan.faults + draw_rare(dice, hosts=count, from_s=0.0, to_s=plan.heals_at, lease_s=lease_s)
    timeout_s = dice.choice((*(plan.timeout_s,) * 9, 5.0))
    plan = plan._replace(hosts=hosts, settings=settings, faults=faults, timeout_s=timeout_s)
    if dice.random() < 0.15:
        plan = plan._replace(store_on=0, timeout_s=PRIVATE_TIMEOUT_S, etcd=("3.5.1", 1))
    return plan


def draw_plain_plan(seed: int, agents: int = 5) -> Plan:
    """The run of a seed without what is rare."""
    dice = random.Random(f"{seed}:plan")
    count = (
        min(agents, dice.choice((1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 5)))
        if agents <= 5
        else dice.randint(2, agents)
    )
    nodes = max(dice.randint(1, count), dice.randint(1, count))
    settings = SETTINGS._replace(
        min_nodes=min(dice.randint(1, nodes), dice.randint(1, nodes)),
        max_nodes=nodes,
        max_restarts=dice.choice((0, 3, 1000, 1000)),
        early_stop=dice.random() < 0.2,
        join=dice.choice((Join.NOW, Join.NOW, Join.AT_RESTART, Join.SETTLE)),
        join_settle_s=dice.choice((0.5, 3.0)),
        settle_s=dice.choice((0.5, 2.0)),
        lease_ttl_s=float(dice.choice((2, 2, 3, 3, 5))),
        outage_limit_s=dice.choice((0.0, 4.0, 8.0, 12.0)),
        backoff_s=dice.choice((0.0, 0.0, 0.5)),
    )
    hosts = tuple(_draw_host(dice, late=index > 0) for index in range(count))
    heals_at = dice.uniform(4.0, 14.0) + dice.choice((0.0, settings.outage_limit_s))
    needed_s = dice.choice((dice.uniform(1.0, heals_at), heals_at, heals_at + 3.0, heals_at + 3.0))
    lease_s, from_s = settings.lease_ttl_s, dice.choice((0.0, 2.0, 4.0))
    outages = dice.choice((0, 1, 1, 2))
    most = dice.choice((2, 4, 8, 12)) if not outages or dice.random() < 0.3 else 2
    faults = draw_faults(dice, hosts=count, from_s=from_s, to_s=heals_at, most=most, lease_s=lease_s)
    for _ in range(outages):
        faults += draw_outage(dice, hosts=count, from_s=from_s, to_s=heals_at, lease_s=lease_s)
    traps = draw_traps(dice, lease_s=lease_s)
    weather = draw_weather(dice)
    etcd = dice.choice((("3.6.0", 1), ("3.5.21", 3), ("3.4.23", 3), ("3.4.23", 1)))
    return Plan(seed, hosts, settings, weather, faults, traps, etcd, needed_s, heals_at)


def draw_crowd(seed: int, agents: int) -> Plan:
    """Many agents that come at once, in fair weather: how long do they take?"""
    dice = random.Random(f"{seed}:plan")
    settings = SETTINGS._replace(min_nodes=agents, max_nodes=agents)
    hosts = tuple(_draw_host(dice, late=False) for _ in range(agents))
    return Plan(seed, hosts, settings, needed_s=5.0)


def _draw_host(dice: random.Random, *, late: bool) -> HostPlan:
    clock = HostClock(dice.uniform(10.0, 1e6), 1.0 + dice.uniform(-1e-4, 1e-4))
    starts_at = dice.choice((dice.uniform(0.0, 0.2), dice.uniform(0.0, 3.0), dice.uniform(0.0, 15.0)))
    return HostPlan(starts_at if late else dice.uniform(0.0, 0.2), dice.choice((1, 1, 2, 2, 4)), clock=clock)
