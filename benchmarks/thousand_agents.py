"""A thousand agents against one real etcd: how long a round takes, and what one agent costs the store.

    python -m benchmarks.thousand_agents                     10, 100 and 1,000 agents
    python -m benchmarks.thousand_agents --agents 1000 --profile out.prof

Every agent is a real `Member` on a real `EtcdStore`; what it asks for besides the store is simulated: workers start and
stop at once, and a peer that dies is noticed at once. All agents share one thread, so the times are an upper bound of
what a thousand machines would need, apart from their networks. Requests are counted by etcd itself.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import resource
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dlaunch.clock import now
from dlaunch.outcome import ExitStatus, Failure, FailureKind
from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.endpoints import EtcdSettings
from dlaunch.rendezvous.etcd import EtcdStore
from dlaunch.rendezvous.member import Member, MemberSettings, NodeInfo
from dlaunch.rendezvous.records import RunSettings
from dlaunch.rendezvous.store import Range, Store, Watch
from tests.etcd_cluster import EtcdCluster

PATIENCE_S = 120.0  # for one phase of the largest run on a loaded machine
QUIET_S = 3.0  # between two phases: what the last one left behind is over
STEADY_S = 8.0  # how long the steady state is watched
BUDGET_S = 5.0  # of forming a round of BUDGET_AGENTS
BUDGET_AGENTS = 1000
POLL_S = 0.005
ANSWERED = "grpc_server_handled_total"
RECEIVED = "grpc_server_msg_received_total"


# --- one thread runs all agents --------------------------------------------------------------------------------------


class Driver:
    """Runs all agents on the thread of the stores' event loop: one thread, so nobody waits for the interpreter lock."""

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self.agents: dict[str, Agent] = {}  # by node id
        self._loop: Any = None
        first = EtcdStore(EtcdSettings(endpoints), self.deliver)
        known = threading.Event()
        first.request(Range("/"), PATIENCE_S, lambda _answer: known.set())
        known.wait()  # from here on the loop is known
        first.close()

    def deliver(self, call: Callable[[], None]) -> None:
        """Have something called on this thread, which is where stores call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._loop.call_soon(call)

    def begin(self, call: Callable[[], None]) -> None:
        """Have something called there; from any thread."""
        self._loop.call_soon_threadsafe(call)

    def wait(self) -> None:
        """Return when all that was begun before has been called."""
        done = threading.Event()
        self.begin(done.set)
        done.wait()

    def at(self, when: float, call: Callable[[], None]) -> Callable[[], None]:
        """Have something called at a time; returns what takes that back."""
        handle = self._loop.call_later(when - now(), call)
        cancel: Callable[[], None] = handle.cancel
        return cancel

    def until(self, holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds. What counts are the times that the agents write down."""
        deadline = now() + within_s
        while not holds():
            if now() > deadline:
                raise TimeoutError(f"it did not happen within {within_s:g} s; {self._states()}")
            time.sleep(POLL_S)

    def _states(self) -> str:
        return ", ".join(
            f"{count} x {state}" for state, count in Counter(map(str, self.agents.values())).most_common(8)
        )


class Agent:
    """A member with workers that start and stop at once."""

    def __init__(self, driver: Driver, store: Store, number: int, settings: MemberSettings) -> None:
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:29400"
        self.info = NodeInfo(f"node{number:05d}", f"boot{number}", address, 8)
        self.member = Member(settings, self.info, lambda: secrets.token_hex(6))
        self.running = 0  # the round of its workers
        self.ran_at: dict[int, float] = {}  # when the workers of each round started
        self.rank: int | None = None
        self.followed: str | None = None
        self.ended: Any = None
        self.lives = True
        self._driver, self._store = driver, store
        self._timers: dict[str, Callable[[], None]] = {}  # what cancels each
        self._watches: dict[int, Watch] = {}

    def __str__(self) -> str:
        return f"running {self.running}" if self.ended is None else f"ended ({self.ended})"

    def handle(self, event: events.Event) -> None:
        """Let the member handle an event, and do what it asks for."""
        if self.lives:
            for effect in self.member.handle(event, now()):
                self._perform(effect)

    def fail(self, failure: Failure) -> None:
        """A worker fails; the others are dead at once."""
        number, self.running = self.running, 0
        self.handle(events.WorkersFailed(number, failure))
        self.handle(events.WorkersStopped(number, failure))

    def die(self) -> None:
        """kill -9: nothing more is said; the connection of whoever follows this agent breaks."""
        self.lives = False
        for end in (*self._timers.values(), *(watch.cancel for watch in self._watches.values())):
            end()

    def _time_out(self, name: str) -> None:
        del self._timers[name]
        self.handle(events.TimerFired(name))

    def _perform(self, effect: effects.Effect) -> None:  # noqa: PLR0912  -- one case for each effect
        match effect:
            case effects.Ask(number, request, timeout_s):
                self._store.request(request, timeout_s, lambda answer: self.handle(events.Answered(number, answer)))
            case effects.WatchKeys(number, key, prefix, from_revision):
                self._watches[number] = self._store.watch(
                    key,
                    prefix=prefix,
                    from_revision=from_revision,
                    heard=lambda what: self.handle(events.WatchHeard(number, what)),
                )
            case effects.Unwatch(number):
                self._watches.pop(number).cancel()
            case effects.SetTimer(name, at):
                self._timers.pop(name, int)()
                self._timers[name] = self._driver.at(at, lambda: self._time_out(name))
            case effects.CancelTimer(name):
                self._timers.pop(name, int)()
            case effects.SetToken(_, node_id):
                self._driver.agents[node_id] = self
            case effects.SendPeer(peer, message):
                other, me = self._driver.agents[peer.node_id], self.member.node_id
                self._driver.deliver(lambda: other.handle(events.PeerSaid(me, message)))
            case effects.FollowPeer(peer):
                self.followed = peer.node_id if peer else None
            case effects.OpenMeeting(number):
                opened = events.MeetingOpened(number, self.info.host, 29500, True)
                self._driver.deliver(lambda: self.handle(opened))
            case effects.RunRound(assignment):
                self.running, self.rank = assignment.round, assignment.group_rank
                self.ran_at[assignment.round] = now()
            case effects.StopRound(number):
                self.running = 0
                self._driver.deliver(lambda: self.handle(events.WorkersStopped(number, None)))
            case effects.EndRun() | effects.Refuse() | effects.Left():
                self.ended = effect
                self.lives = False
            case effects.Say() | effects.SetDeadline():
                pass


# --- what etcd counts ------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What was asked of etcd in a phase, and what it cost. Divided, it is the cost of one agent."""

    reads: float  # transactions that only read are not told apart by etcd: they are among txns
    txns: float
    leases: float  # grants and revocations
    renewals: float
    watches: float  # begun or ended
    puts: float  # keys written
    ranges: float  # keys or ranges read, in transactions too
    sent_kb: float  # by etcd
    client_cpu_s: float
    etcd_cpu_s: float

    def minus(self, other: Load) -> Load:
        """What came between two of them."""
        return Load(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def divided(self, by: float) -> Load:
        """The share of one."""
        return Load(*(value / by for value in self))


def load_of(cluster: EtcdCluster) -> Load:
    """Everything since etcd started."""
    metrics = cluster.metrics(0)

    def calls(name: str, *methods: str) -> float:
        wanted = [f'grpc_method="{method}"' for method in methods]
        return sum(
            value
            for label, value in metrics.items()
            if label.startswith(name) and any(method in label for method in wanted)
        )

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Load(
        reads=calls(ANSWERED, "Range"),
        txns=calls(ANSWERED, "Txn"),
        leases=calls(ANSWERED, "LeaseGrant", "LeaseRevoke"),
        renewals=calls(RECEIVED, "LeaseKeepAlive"),
        watches=calls(RECEIVED, "Watch"),
        puts=metrics["etcd_mvcc_put_total"],
        ranges=metrics["etcd_mvcc_range_total"],
        sent_kb=metrics["etcd_network_client_grpc_sent_bytes_total"] / 1000,
        client_cpu_s=usage.ru_utime + usage.ru_stime,
        etcd_cpu_s=metrics["process_cpu_seconds_total"],
    )


# --- one run ---------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """One run of so many agents."""

    form_s: float  # from the first join to the last start of workers
    restart_s: float  # from a worker's failure to the last start of workers
    loss_s: float  # from an agent's death to the last start of workers, with a spare in its place
    end_s: float  # from the last worker's success to the last agent's end
    form: Load  # each for one agent
    restart: Load
    loss: Load
    steady: Load  # for one agent and second


class Run:
    """So many agents, and one more later, as a spare."""

    def __init__(self, cluster: EtcdCluster, count: int, connections: int) -> None:
        self._cluster, self._count = cluster, count
        self.driver = Driver(cluster.endpoints)
        settings = EtcdSettings(cluster.endpoints)
        self._stores = [EtcdStore(settings, self.driver.deliver) for _ in range(min(connections, count + 1))]
        run = RunSettings(count, count, max_restarts=3)
        member = MemberSettings(secrets.token_hex(4), run)
        self._agents = [Agent(self.driver, self._stores[i % len(self._stores)], i, member) for i in range(count + 1)]

    def measure(self) -> Result:
        """Form, stay, restart, lose one, end."""
        try:
            form_s, form = self._form()
            steady = self._stay()
            restart_s, restart = self._restart()
            loss_s, loss = self._lose()
            return Result(form_s, restart_s, loss_s, self._end(), form, restart, loss, steady)
        finally:
            for store in self._stores:
                store.close()

    def _form(self) -> tuple[float, Load]:
        before, began = load_of(self._cluster), now()
        self._all(self._agents[:-1], events.Join())
        took_s = self._all_run(1) - began
        load = load_of(self._cluster).minus(before).divided(self._count)
        self._all(self._agents[-1:], events.Join())
        self.driver.until(lambda: self._agents[-1].member.node_id in self.driver.agents)
        return took_s, load

    def _stay(self) -> Load:
        time.sleep(QUIET_S)
        before = load_of(self._cluster)
        time.sleep(STEADY_S)
        return load_of(self._cluster).minus(before).divided(STEADY_S * (self._count + 1))

    def _restart(self) -> tuple[float, Load]:
        before, began = load_of(self._cluster), now()
        failing = self._of_rank(self._count // 2)
        failure = Failure(FailureKind.EXIT, 0, 8, 0, failing.info.host, 77, ExitStatus(code=3), began, 1.0)
        self.driver.begin(lambda: failing.fail(failure))
        took_s = self._all_run(2) - began
        return took_s, load_of(self._cluster).minus(before).divided(self._count)

    def _lose(self) -> tuple[float, Load]:
        time.sleep(QUIET_S)
        before, began = load_of(self._cluster), now()
        lost = self._of_rank(self._count // 3)
        self.driver.begin(lost.die)
        self._all(
            [agent for agent in self._agents if agent.followed == lost.member.node_id],
            events.PeerGone(lost.member.node_id),
        )
        took_s = self._all_run(3) - began
        return took_s, load_of(self._cluster).minus(before).divided(self._count)

    def _end(self) -> float:
        began = now()
        self._all(self._agents, events.WorkersFinished(3))
        self.driver.until(lambda: not any(agent.lives for agent in self._agents))
        return now() - began

    def _all(self, agents: list[Agent], event: events.Event) -> None:
        for agent in agents:
            self.driver.begin(partial(agent.handle, event))

    def _of_rank(self, rank: int) -> Agent:
        return next(agent for agent in self._agents if agent.rank == rank and agent.lives)

    def _all_run(self, number: int) -> float:
        """When the last of a whole world's workers started."""
        self.driver.until(lambda: sum(agent.running == number for agent in self._agents) == self._count)
        return max(agent.ran_at[number] for agent in self._agents if number in agent.ran_at)


def measure(count: int, connections: int, profile_into: str | None) -> Result:
    """One run on an etcd of its own; with cProfile's statistics of all agents' thread in a file, if one is named."""
    profile = cProfile.Profile()
    with EtcdCluster() as cluster:
        run = Run(cluster, count, connections)
        try:
            if profile_into:
                run.driver.begin(profile.enable)
            return run.measure()
        finally:
            if profile_into:
                run.driver.begin(profile.disable)
                run.driver.wait()
                profile.dump_stats(profile_into)


# --- the table -------------------------------------------------------------------------------------------------------


def middle(results: list[Result]) -> Result:
    """The median of each number."""
    times = [median(values) for values in zip(*(result[:4] for result in results), strict=True)]
    loads = [
        Load(*(median(values) for values in zip(*(result[i] for result in results), strict=True))) for i in range(4, 8)
    ]
    return Result(*times, *loads)  # type: ignore[arg-type]


def show(by_count: dict[int, Result]) -> None:
    """Print everything, one column for each number of agents."""
    print(f"{'':34}" + "".join(f"{count:>10}" for count in by_count))
    for name, title in (
        ("form_s", "round 1 forms"),
        ("restart_s", "restart for one failed worker"),
        ("loss_s", "one node lost, spare takes over"),
        ("end_s", "all end"),
    ):
        _row(f"{title} (s)", [getattr(result, name) for result in by_count.values()])
    for phase, title in (
        ("form", "joining and round 1, for one agent"),
        ("restart", "restart, for one agent"),
        ("loss", "node lost, for one agent"),
        ("steady", "steady state, for one agent and second"),
    ):
        print(title)
        for field in Load._fields:
            unit = 1000 if field.endswith("cpu_s") else 1
            label = field.replace("cpu_s", "cpu_ms")
            _row(f"  {label}", [getattr(getattr(result, phase), field) * unit for result in by_count.values()])


def _row(title: str, values: list[float]) -> None:
    print(f"{title:34}" + "".join(f"{value:>10.2f}" for value in values), flush=True)


def main() -> int:
    arguments = _parse_arguments()
    by_count: dict[int, Result] = {}
    for count in arguments.agents:
        runs = arguments.runs if count < BUDGET_AGENTS else 1
        by_count[count] = middle([measure(count, arguments.connections, arguments.profile) for _ in range(runs)])
    show(by_count)
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({count: _document(result) for count, result in by_count.items()}))
    largest = by_count.get(BUDGET_AGENTS)
    if largest and largest.form_s > BUDGET_S:
        print(f"over the budget: {BUDGET_AGENTS} agents formed a round in {largest.form_s:.1f} s, of {BUDGET_S:g}")
        return 1
    return 0


def _document(result: Result) -> dict[str, Any]:
    return {name: value._asdict() if isinstance(value, Load) else value for name, value in result._asdict().items()}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A thousand agents against one real etcd.")
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--runs", type=int, default=3, help=f"of fewer than {BUDGET_AGENTS} agents; the median counts")
    parser.add_argument(
        "--connections",
        type=int,
        default=16,
        help="stores that the agents share",
    )
    parser.add_argument("--profile", help="a file for cProfile's statistics of the agents' thread")
    parser.add_argument("--json", help="a file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
