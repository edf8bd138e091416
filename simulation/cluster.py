"""A whole run: hosts, agents, their store and their network, on one clock, until it has ended or a rule is broken."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from dlaunch.agent.events import Begin, SignalArrived
from dlaunch.outcome import ExitStatus
from dlaunch.rendezvous.keys import Keys
from dlaunch.rendezvous.lapses import checks_leader_before_revoking
from dlaunch.rendezvous.records import read_round
from dlaunch.rendezvous.store import Change, Put, Request, Txn
from dlaunch.rendezvous.values import Ending

from .clock import HostClock, Scheduler
from .etcd import Etcd
from .faults import Fault, Kind, Leases, Trap
from .invariants import Invariants, Violation
from .job import LOST_PEER, Job, WholeWorld
from .network import Network
from .node import Agent, Host
from .people import People
from .plan import HostPlan, Plan
from .private import PrivateStore
from .starter import KILLED, Worker
from .story import Story
from .weather import FAIR

MOST_STEPS = 400_000  # of a small cluster: more than this is no progress
MOST_ROUNDS = 60  # after all faults have healed, and for each host: more than these are no progress
COMES_IN_VAIN = 0.9  # chance that an agent that would come after the end does not
CONNECT_S = 16.0  # how long an agent tries to reach the store before it gives up, and a little more
RUN_ID = "run"


class Brain(Protocol):
    """What decides for an agent: no I/O, no clock."""

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """What is to be done about an event."""


class Body(NamedTuple):
    """What a brain is told of the agent that it decides for."""

    host: str
    address: str
    boot_id: str
    workers: int
    fresh: Callable[[], str]  # a text that is used nowhere else
    role: str = "default"
    node_rank: int | None = None
    serves_store: bool = False  # the private etcd of the run is this agent's


MakeBrain = Callable[[Plan, Body], Brain]


class Result(NamedTuple):
    """How a simulated run went."""

    violation: Violation | None
    story: Story
    ended_at: float  # virtual seconds
    steps: int
    rounds: int
    ending: Ending | None
    stops: tuple[str, ...]  # why rounds were stopped
    restarts: int
    worlds: tuple[WholeWorld, ...]  # that came together
    problems: tuple[str, ...]  # of agents that could not take part
    counts: dict[str, int]


class Cluster:
    """One simulated run."""

    def __init__(self, plan: Plan, make_brain: MakeBrain, *, tells: bool = False) -> None:
        self.plan = plan
        self.scheduler = Scheduler()
        self.story = Story(self.scheduler, tells)
        self.dice = random.Random(f"{plan.seed}:run")
        self.weather = plan.weather
        self.keys = Keys.of("/dlaunch", RUN_ID)
        self.etcd = Etcd(self.scheduler, self.dice, plan.weather, self.story)
        self.etcd.keys.version, self.etcd.keys.members = plan.etcd
        self.network = Network(self.scheduler, self.dice, plan.weather, self.story)
        self.job = Job(self.scheduler, self.dice, plan.weather, self.network, plan.needed_s)
        self.invariants = Invariants(self.keys, plan.settings.lease_ttl_s)
        self.hosts: list[Host] = []
        self.agents: list[Agent] = []
        self._make_brain = make_brain
        self._ports = 7000
        self._texts = 0
        self._has_healed = False
        self._rounds_when_healed = 0
        self.closed_at: float | None = None
        self._traps = list(plan.traps)
        self.living = 0  # agents
        self._to_come = 0  # agents that are going to start
        self.people = People(self)
        self.private = PrivateStore(self, plan.store_on) if plan.store_on is not None else None
        self.etcd.observers.append(self._written)

    # --- running -------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Let it all happen."""
        violation, ended_at = None, 0.0
        try:
            self.arrange()
            self._go_on()
            ended_at = self.scheduler.now
            self._check_end()
        except Violation as found:
            violation = found
        except Exception as error:  # a bug of the code under test is a finding too
            violation = Violation("no crash", f"{type(error).__name__}: {error}")
            violation.__cause__ = error
            self.story.tell("", traceback.format_exc())
        if violation is not None:
            self.story.tell("", f"** {violation}")
        closed = self.invariants.closed
        return Result(
            violation,
            self.story,
            ended_at or self.scheduler.now,
            self.scheduler.steps,
            self.invariants.rounds,
            closed.ending if closed else None,
            tuple(self.invariants.stops),
            self.invariants.round.restarts if self.invariants.round else 0,
            tuple(self.job.whole),
            tuple(agent.problem for agent in self.agents if agent.problem is not None),
            self.etcd.counts,
        )

    def arrange(self) -> None:
        """Let the hosts and the faults come, each at its time."""
        for host in self.plan.hosts:
            self._add_host(host)
            self._start_later(len(self.hosts) - 1, host.starts_at)
        for fault in self.plan.faults:
            self.scheduler.at(fault.at, self.strike, fault)
        if self.plan.faults or self.plan.weather != FAIR:
            self.scheduler.at(self.plan.heals_at, self.heal)
        else:
            self._has_healed = True

    def _go_on(self) -> None:
        plan, scheduler = self.plan, self.scheduler
        waits_s = plan.settings.outage_limit_s + 10 * plan.settings.lease_ttl_s + 3 * plan.needed_s
        until = max(plan.heals_at, *(host.starts_at for host in plan.hosts)) + waits_s + 90.0
        most = MOST_STEPS * max(1, len(plan.hosts) // 5)
        while self.living or not self._is_over():
            if not scheduler.step(until) or scheduler.steps > most:
                living = ", ".join(agent.name for agent in self.agents if agent.lives)
                record = self.invariants.round
                stands = f"round {record.number} is {record.phase.value} ({record.reason})" if record else "no round"
                raise Violation("5 progress", f"{living} have not come to an end: {stands}")

    def _is_over(self) -> bool:
        return self.closed_at is not None or (self._has_healed and not self._to_come)

    def _check_end(self) -> None:
        """All have ended alike, and nothing is left."""
        invariants = self.invariants
        closed = invariants.closed
        for agent in self.agents:
            self._check_agents_end(agent)
        if left := invariants.alive():
            raise Violation("6 the end", f"workers are left: {sorted(worker.pid for worker in left)}")
        if closed is None and all(agent.was_asked_to_leave for agent in self.agents):
            return
        if self.private is not None and not self.private.can_run():
            return  # the store has ended with its agent, and all keys with it
        self.scheduler.step(self.scheduler.now)
        until = self.scheduler.now + 3 * self.plan.settings.lease_ttl_s + 5.0
        while self.scheduler.step(until):
            pass
        if invariants.registered:
            raise Violation("6 the end", f"keys are left: {sorted(invariants.registered)}")

    def _check_agents_end(self, agent: Agent) -> None:
        closed = self.invariants.closed
        early = self.closed_at is None or agent.ended_at < self.closed_at
        restored = self.invariants.is_restored
        may_give_up = restored or agent.may_give_up_until >= agent.ended_at or self._was_out_of_reach(agent)
        if agent.problem is not None and early and not may_give_up:
            raise Violation("6 the end", f"{agent.name} gave up: {agent.problem}")
        if agent.outcome is None or agent.was_asked_to_leave:
            return
        if closed is None or closed.ending is None:
            raise Violation("6 the end", f"{agent.name} ended, and the run did not: {agent.outcome.reason}")
        told = (agent.outcome.state, agent.outcome.exit_code)
        if told != (closed.ending.state, closed.ending.exit_code):
            raise Violation("6 the end", f"{agent.name} ended with {told}, the run with {closed.ending}")

    def _was_out_of_reach(self, agent: Agent) -> bool:
        """Whether it heard nothing of the store for so long that it may give up."""
        patience_s = self.plan.settings.outage_limit_s + self.plan.timeout_s
        silent_s = max(agent.client.longest_silence_s, agent.ended_at - agent.client.heard_at)
        return silent_s > patience_s / 2  # the agent may have stood still while an answer came

    # --- hosts and agents ----------------------------------------------------------------------------------------

    def _add_host(self, plan: HostPlan) -> Host:
        host = Host(self, len(self.hosts), plan)
        self.hosts.append(host)
        return host

    def _start_later(self, index: int, at: float, address: str = "") -> None:
        self._to_come += 1
        self.scheduler.at(at, self._start_agent, index, address)

    def _start_agent(self, index: int, address: str) -> None:
        self._to_come -= 1
        host = self.hosts[index]
        if not host.has_power or host.agent is not None or (self.closed_at and self.dice.random() < COMES_IN_VAIN):
            return
        if self.closed_at and self.private:
            return  # there may be nobody left who knows how it ended
        if host.is_frozen:
            self._start_later(index, self.scheduler.now + 0.5, address)
            return
        address = address or f"{host.name}:{self.next_port()}"
        before = self.network.at_address.get(address)
        if before is not None and not before.is_buried():
            self._start_later(index, self.scheduler.now + 0.05, address)  # its guard still holds the port
            return
        serves = self.private is not None and self.private.is_on(host)
        boot_id, plan = f"boot-{host.name}-{host.boots}", host.plan
        body = Body(host.name, address, boot_id, plan.workers, self.fresh, plan.role, plan.node_rank, serves)
        agent = Agent(host, self._make_brain(self.plan, body), address, len(host.agents))
        host.agents.append(agent)
        self.agents.append(agent)
        self.network.at_address[address] = agent
        self.living += 1
        self.story.tell(agent.name, "starts")
        if self.private is not None:
            self.private.agent_starts(agent)
        agent.deliver(Begin())

    def fresh(self) -> str:
        """A text that was not used before."""
        self._texts += 1
        return f"{self._texts:x}"

    def next_port(self) -> int:
        """A port that was not used before."""
        self._ports += 1
        return self._ports

    # --- what is told to the cluster -----------------------------------------------------------------------------

    def worker_started(self, worker: Worker) -> None:
        """A worker runs."""
        self.job.worker_started(worker)
        if self.story.kept:
            self._tell_workers(worker, "starts")
        self.invariants.worker_started(worker)

    def worker_ended(self, worker: Worker, status: ExitStatus) -> None:
        """A worker is gone."""
        self.job.worker_ended(worker)
        self.invariants.worker_ended(worker)
        if self.story.kept:
            self._tell_workers(worker, f"ends with {status}")

    def worker_failed(self, worker: Worker, status: ExitStatus) -> None:
        """A worker fails of itself."""
        if self.story.kept:
            self._tell_workers(worker, f"fails: {status}")

    def _tell_workers(self, worker: Worker, what: str) -> None:
        self.story.tell(worker.starter.host.name, f"rank {worker.rank} of round {worker.assignment.round} {what}")

    def freeze_changed(self, host: Host) -> None:
        """A host runs no longer, or runs again."""
        if self.private is not None:
            self.private.freeze_changed(host)
        self.invariants.check_worlds()

    def agent_is_gone(self, agent: Agent) -> None:
        """An agent process is no more, however it ended."""
        if self.private is not None:
            self.private.agent_is_gone(agent)

    def node_named(self, agent: Agent, before: str) -> None:
        """An agent has a node id, or a new one."""
        self.invariants.node_named(agent, before)

    def peer_heard(self, agent: Agent, node_id: str, message: dict[str, Any]) -> None:
        """A message from a peer has arrived."""
        if self.story.kept:
            told = ", ".join(f"{name} {value}" for name, value in message.items() if name != "kind")
            self.story.tell(agent.name, f"hears {message.get('kind')} from {node_id}: {told}")

    def peer_told(self, agent: Agent, message: dict[str, Any]) -> None:
        """A message to a peer is sent."""
        if message.get("kind") == "promise":
            self.invariants.promised(agent, message)

    def gone_heard(self, agent: Agent, node_id: str) -> None:
        """An agent is told that the peer that it follows is gone."""
        self.story.tell(agent.name, f"finds {node_id} gone")
        self.invariants.gone_heard(agent, node_id)

    def asked(self, agent: Agent, request: Request) -> Trap | None:
        """An agent sends a request to the store: does it run into a trap?"""
        if isinstance(request, Txn):
            for operation in request.success:
                if isinstance(operation, Put):
                    if operation.key == self.keys.round:
                        self._proposed(agent, operation.value)
                    if self._traps and (trap := self._trap_for(agent, operation)) is not None:
                        return trap
        return None

    def _proposed(self, agent: Agent, value: bytes) -> None:
        if self.story.kept:
            self.story.tell(agent.name, f"proposes {_round_in_words(value)}")
        self.invariants.proposes(agent, value)

    def _trap_for(self, agent: Agent, put: Put) -> Trap | None:
        name, value = put.key.removeprefix(self.keys.root), put.value.decode()
        for trap in self._traps:
            if trap.key in name and trap.value in value:
                self._traps.remove(trap)
                self.story.tell("FAULT", f"{agent.name} writes {name}: {trap.snag.value} ({trap.for_s:.2f} s)")
                return trap
        return None

    def agent_ended(self, agent: Agent) -> None:
        """An agent comes to its end by itself. One that never got through to the store may give up."""
        agent.ended_at = self.scheduler.now
        if not agent.node_id and self.scheduler.now < self.plan.heals_at + CONNECT_S:
            agent.may_give_up_until = agent.ended_at

    def _written(self, revision: int, changes: tuple[Change, ...]) -> None:
        if self.story.kept:
            self._tell_changes(revision, changes)
        if self.etcd.performing is self.people.client:
            self.invariants.written_by_people(changes)
        else:
            self.invariants.written(self.etcd.performing, changes)
        if self.invariants.closed is not None and self.closed_at is None:
            self.closed_at = self.scheduler.now
        record = self.invariants.round
        if self._has_healed and record and self.invariants.rounds - self._rounds_when_healed > MOST_ROUNDS:
            raise Violation("5 progress", f"{MOST_ROUNDS} rounds since all healed")

    def _tell_changes(self, revision: int, changes: tuple[Change, ...]) -> None:
        by = self.etcd.performing
        for change in changes:
            name = change.key.removeprefix(self.keys.root)
            who = f" (by {by.name})" if by else " (its lease has run out)"
            if name == "round" and change.value is not None:
                self.story.tell("STORE", f"{revision}: {_round_in_words(change.value)}{who}")
            elif change.value is not None or name.startswith("nodes/"):
                self.story.tell("store", f"{revision}: {name}{'' if change.value is not None else ' is gone'}{who}")

    # --- faults --------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Let a fault happen."""
        if self._has_healed:
            return
        host = self.hosts[fault.host % len(self.hosts)]
        self.story.tell(
            "FAULT", f"{fault.kind.value}: {host.name}, {fault.for_s:.2f} s" + (", hard" if fault.hard else "")
        )
        _STRIKE[fault.kind](self, host, fault)

    def _worker_fails(self, host: Host, fault: Fault) -> None:
        worker = self._some_worker(host)
        if worker is not None:
            if fault.hard:
                worker.fail(KILLED)
            else:
                worker.fail(ExitStatus(code=1), LOST_PEER._replace(type="ValueError"))

    def _worker_stalls(self, host: Host, fault: Fault) -> None:
        worker = self._some_worker(host)
        if worker is not None:
            worker.is_stalled = True

    def _some_worker(self, host: Host) -> Worker | None:
        starter = host.agents[-1].starter if host.agents else None
        return self.dice.choice(list(starter.workers.values())) if starter and starter.workers else None

    def _starter_dies(self, host: Host, fault: Fault) -> None:
        if host.agent and host.agent.starter:
            host.when_running(host.agent.starter.die)

    def _agent_crashes(self, host: Host, fault: Fault) -> None:
        if host.agent is not None and not host.is_frozen:
            self.crash_agent(host.agent, fault.for_s, same_address=fault.hard)

    def crash_agent(self, agent: Agent, for_s: float, *, same_address: bool = False) -> None:
        """kill -9 of an agent; after a while there is another."""
        self.story.tell(agent.name, "is killed")
        agent.crash()
        address = agent.address if same_address else ""
        self._start_later(agent.host.index, self.scheduler.now + for_s, address)

    def _agent_freezes(self, host: Host, fault: Fault) -> None:
        if (agent := host.agent) is not None:
            agent.freeze()
            self.scheduler.after(fault.for_s, agent.thaw)

    def _host_freezes(self, host: Host, fault: Fault) -> None:
        if host.has_power:
            host.freeze()
            self.scheduler.after(fault.for_s, host.thaw)

    def _power_fails(self, host: Host, fault: Fault) -> None:
        if host.has_power:
            host.lose_power()
            self.scheduler.after(fault.for_s, self._boot, host)

    def _boot(self, host: Host) -> None:
        if not host.has_power:
            host.get_power()
            self._start_later(host.index, self.scheduler.now + 0.2)

    def _store_cut(self, host: Host, fault: Fault) -> None:
        if (agent := host.agent) is not None:
            agent.client.set_cut(True, not fault.hard)
            self.scheduler.after(fault.for_s, agent.client.set_cut, False)

    def _store_away(self, host: Host, fault: Fault) -> None:
        if self.etcd.up:
            self.etcd.stop(refuses=not fault.hard)
            self.scheduler.after(fault.for_s, self._store_back, fault.leases)

    def _store_back(self, leases: Leases) -> None:
        if not self.etcd.up and (self.private is None or self.private.can_run()):
            self.etcd.start(leases)

    def _leader_changes(self, host: Host, fault: Fault) -> None:
        if self.etcd.up and self.etcd.keys.members > 1:
            gap_s = min(fault.for_s, 3.0)
            self.etcd.change_leader(gap_s)
            if fault.hard and not checks_leader_before_revoking(self.etcd.keys.version):
                self.scheduler.after(gap_s + 0.1, self.etcd.end_leases_early, self.keys.nodes)

    def _compaction(self, host: Host, fault: Fault) -> None:
        self.etcd.compact()

    def _peers_cut(self, host: Host, fault: Fault) -> None:
        self._cut(host.index, fault.other % len(self.hosts), fault.for_s)

    def _host_cut(self, host: Host, fault: Fault) -> None:
        self._store_cut(host, fault._replace(hard=True))
        for other in self.hosts:
            if other is not host:
                self._cut(host.index, other.index, fault.for_s)

    def _cut(self, one: int, other: int, for_s: float) -> None:
        if one != other:
            self.network.cut(one, other)
            self.scheduler.after(for_s, self.network.mend, one, other)

    def _join(self, host: Host, fault: Fault) -> None:
        if len(self.hosts) < 2 * len(self.plan.hosts) + 2:
            clock = HostClock(fault.at * 7.0 + 100.0, 1.0 + 5e-5)
            new = self._add_host(HostPlan(workers=1 + fault.other % 3, clock=clock))
            self._start_later(new.index, self.scheduler.now)

    def _leave(self, host: Host, fault: Fault) -> None:
        if (agent := host.agent) is not None:
            agent.was_asked_to_leave = True
            agent.deliver(SignalArrived(signal.SIGTERM))
            self._start_later(host.index, self.scheduler.now + 5.0 + fault.for_s)

    def _snapshot(self, host: Host, fault: Fault) -> None:
        self.etcd.take_snapshot()

    def _restore(self, host: Host, fault: Fault) -> None:
        self.invariants.is_restored = True
        self.etcd.restore()

    def _answers_slow(self, host: Host, fault: Fault) -> None:
        if (agent := host.agent) is not None:
            agent.client.answers_take_s = fault.delay_s
            self.scheduler.after(fault.for_s, setattr, agent.client, "answers_take_s", 0.0)

    def _peers_slow(self, host: Host, fault: Fault) -> None:
        one, other = host.index, fault.other % len(self.hosts)
        self.network.slow(one, other, fault.delay_s)
        self.scheduler.after(fault.for_s, self.network.slow, one, other, 0.0)

    def _garbage(self, host: Host, fault: Fault) -> None:
        self.people.write_garbage()

    def _key_deleted(self, host: Host, fault: Fault) -> None:
        self.people.delete_registration(host)

    def _user_stops(self, host: Host, fault: Fault) -> None:
        self.people.stop_run()

    def heal(self) -> None:
        """Nothing is wrong any more, and enough nodes are there."""
        self.story.tell("FAULT", "all faults heal")
        self._has_healed = True
        self._traps.clear()
        self._rounds_when_healed = self.invariants.rounds
        self.weather = self.etcd.weather = self.network.weather = self.job.weather = FAIR
        self._store_back(Leases.KEPT)
        self.network.mend_all()
        for host in self.hosts:
            if not host.has_power:
                self._boot(host)
            host.thaw_all()
        for agent in self.agents:
            if agent.lives:
                agent.client.set_cut(False)
                agent.client.answers_take_s = 0.0
                agent.thaw_all()
        for worker in self.invariants.alive():
            worker.is_stalled = False
        for host in self.hosts:  # users see to it that an agent runs everywhere
            self._start_later(host.index, self.scheduler.now + 1.0)
            self._start_later(host.index, self.scheduler.now + 40.0)


def _round_in_words(value: bytes) -> str:
    record = read_round("round", value)
    return f"round {record.number} is {record.phase.value}: {record.reason} ({record.restarts} restarts)"


_STRIKE: dict[Kind, Callable[[Cluster, Host, Fault], None]] = {
    Kind.WORKER_FAILS: Cluster._worker_fails,
    Kind.WORKER_STALLS: Cluster._worker_stalls,
    Kind.STARTER_DIES: Cluster._starter_dies,
    Kind.AGENT_CRASHES: Cluster._agent_crashes,
    Kind.AGENT_FREEZES: Cluster._agent_freezes,
    Kind.HOST_FREEZES: Cluster._host_freezes,
    Kind.POWER_FAILS: Cluster._power_fails,
    Kind.STORE_CUT: Cluster._store_cut,
    Kind.STORE_AWAY: Cluster._store_away,
    Kind.LEADER_CHANGES: Cluster._leader_changes,
    Kind.COMPACTION: Cluster._compaction,
    Kind.PEERS_CUT: Cluster._peers_cut,
    Kind.HOST_CUT: Cluster._host_cut,
    Kind.JOIN: Cluster._join,
    Kind.LEAVE: Cluster._leave,
    Kind.SNAPSHOT: Cluster._snapshot,
    Kind.RESTORE: Cluster._restore,
    Kind.ANSWERS_SLOW: Cluster._answers_slow,
    Kind.PEERS_SLOW: Cluster._peers_slow,
    Kind.GARBAGE: Cluster._garbage,
    Kind.KEY_DELETED: Cluster._key_deleted,
    Kind.USER_STOPS: Cluster._user_stops,
}
