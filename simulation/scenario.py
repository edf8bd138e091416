"""Fixed stories, each with the end that it must have: what the protocol was made for, one fault after the other.

In all of them a lease lasts 5 s, the outage limit is 20 s, and the weather is fair: what happens is what is said.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dlaunch.outcome import RunState
from dlaunch.rendezvous.records import Join

from .clock import HostClock
from .cluster import Result
from .faults import Fault, Kind, Leases, Snag, Trap
from .plan import SETTINGS, HostPlan, Plan
from .weather import FAIR, Span

A, B, C, D = range(4)  # hosts: they come in this order
BIG_CLOCK, SMALL_CLOCK = HostClock(1e6, 1.0001), HostClock(50.0, 0.9999)


class End(NamedTuple):
    """How a story must end, as far as it is said here."""

    rounds: int = 1
    restarts: int = 0
    stops: tuple[str, ...] = ()  # parts of the reasons for which rounds stopped, in order
    within_s: float | None = None  # from the first fault to the next whole world
    state: RunState = RunState.SUCCEEDED
    sizes: tuple[int, ...] = ()  # of the worlds that came together
    problem: str = ""  # a part of what those say who could not take part


class Scenario(NamedTuple):
    """A story: what happens, and how it must end."""

    says: str
    plan: Plan
    end: End


def complaints(scenario: Scenario, result: Result) -> list[str]:
    """In what the end is not what was expected."""
    end, found = scenario.end, []
    if result.violation is not None:
        found.append(str(result.violation))
    if end.problem:
        if not any(end.problem in problem for problem in result.problems):
            found.append(f"nobody says {end.problem!r}: {result.problems}")
    elif result.ending is None or result.ending.state is not end.state:
        found.append(f"the end is {result.ending}")
    if (result.rounds, result.restarts) != (end.rounds, end.restarts):
        found.append(f"{result.rounds} rounds and {result.restarts} restarts: {result.stops}")
    if len(end.stops) != len(result.stops) or any(a not in b for a, b in zip(end.stops, result.stops, strict=True)):
        found.append(f"stopped because of {result.stops}")
    if end.sizes and tuple(world.size for world in result.worlds) != end.sizes:
        found.append(f"the worlds were {result.worlds}")
    if end.within_s is not None:
        struck_at = min(fault.at for fault in scenario.plan.faults)
        again_s = [world.at - struck_at for world in result.worlds if world.at > struck_at]
        if not again_s or again_s[0] > end.within_s:
            found.append(f"the next world came after {again_s[:1]} s")
    return found


def _plan(
    *faults: Fault, hosts: int = 2, most: int = 2, least: int = 1, traps: tuple[Trap, ...] = (), **other: float
) -> Plan:
    """Hosts that come one after the other, two workers each; the first ``most`` of them are members."""
    clocks = (HostClock(1000.0), BIG_CLOCK, SMALL_CLOCK)
    return Plan(
        seed=1,
        hosts=tuple(HostPlan(0.1 * index, 2, clock=clocks[index % 3]) for index in range(hosts)),
        settings=SETTINGS._replace(min_nodes=least, max_nodes=most, lease_ttl_s=5.0, outage_limit_s=20.0, settle_s=0.5),
        faults=faults,
        weather=FAIR._replace(victim_fails=other.get("victim_fails", 0.0), starter_ready=Span(0.3, 0.3)),
        traps=traps,
        needed_s=other.get("needed_s", 60.0),
        heals_at=other.get("heals_at", 200.0),
    )


def _with(plan: Plan, **settings: Any) -> Plan:
    """The same plan with other settings of the run."""
    return plan._replace(settings=plan.settings._replace(**settings))


def _of_roles(plan: Plan, *hosts: tuple[str, int | None]) -> Plan:
    """The same plan with a role and a wished rank for each host."""
    pairs = zip(plan.hosts, hosts, strict=True)
    return plan._replace(hosts=tuple(host._replace(role=role, node_rank=rank) for host, (role, rank) in pairs))


def _snag(key: str, value: str, snag: Snag, for_s: float = 1.0) -> Plan:
    """A worker fails, and one write on the way to the next round meets a snag."""
    fails = Fault(5.0, Kind.WORKER_FAILS, B, hard=True)
    return _plan(fails, traps=(Trap(key, value, snag, for_s),), hosts=3, most=3, least=2, needed_s=15.0)


_LONG, _ALWAYS = 15.0, 150.0  # three leases; longer than the outage limit and the run
_AWAY = Fault(5.0, Kind.STORE_AWAY, for_s=_LONG, hard=True, leases=Leases.LAPSED)
_B_CUT_OFF = Fault(5.0, Kind.STORE_CUT, B, for_s=_LONG, hard=True)
_STORE_REFUSES_B = Fault(5.5, Kind.STORE_CUT, B, for_s=_LONG)
_FAILED = End(2, 1, ("failed",))

SCENARIOS: dict[str, Scenario] = {
    # --- the stories of the protocol's model ---
    "a newcomer does not fence a vouched member": Scenario(
        "B loses the store, is vouched for, its lease runs out; C comes and has promised nothing",
        _plan(_B_CUT_OFF, Fault(8.0, Kind.JOIN), needed_s=40.0),
        End(),
    ),
    "a spare does not fence members that vouch for each other": Scenario(
        "A and B lose the store, and their leases run out; the spare C alone sees it, and has promised nothing",
        _plan(_B_CUT_OFF, _B_CUT_OFF._replace(host=A), hosts=3, needed_s=40.0),
        End(),
    ),
    "a spare out of reach does not stop training": Scenario(
        "the store is away, and nobody reaches the spare C: only members promise",
        _plan(_AWAY, Fault(5.0, Kind.HOST_CUT, C, for_s=_LONG), hosts=3, needed_s=40.0),
        End(),
    ),
    "a promise runs its full time": Scenario(
        "the store is away; A has promised and comes back first, while B is still cut off and vouched for",
        _plan(_AWAY._replace(for_s=8.0), _B_CUT_OFF._replace(at=4.0, for_s=14.0), needed_s=40.0),
        End(),
    ),
    "no promise is given after a failure": Scenario(
        "B is cut off and vouched for when a worker of A fails: B stops at its deadline; then comes the next round",
        _plan(_B_CUT_OFF._replace(for_s=_ALWAYS), Fault(9.0, Kind.WORKER_FAILS, A, hard=True), needed_s=30.0),
        End(2, 0, ("failed",), sizes=(4, 2)),
    ),
    "no promise is given by a member that has failed": Scenario(
        "A and B are cut off and vouched for when a worker of C fails; the spare D waits for promises of old to end",
        _plan(
            _B_CUT_OFF._replace(host=A, for_s=_ALWAYS),
            _B_CUT_OFF._replace(for_s=_ALWAYS),
            Fault(18.0, Kind.WORKER_FAILS, C, hard=True),
            hosts=4,
            most=3,
            needed_s=30.0,
        ),
        End(2, 0, ("failed",), sizes=(6, 4)),
    ),
    "workers that stop at their deadline stop the round": Scenario(
        "B is cut off from all, so it stops its workers by itself; when it is back, it says so",
        _plan(Fault(5.0, Kind.HOST_CUT, B, for_s=_LONG), least=2, needed_s=30.0),
        End(2, 0, ("lost",)),
    ),
    "a restarted agent on the dead one's address": Scenario(
        "the agent of B is killed, and the next one has its address",
        _plan(Fault(5.0, Kind.AGENT_CRASHES, B, for_s=0.01, hard=True), least=2, needed_s=20.0),
        End(2, 0, ("lost",), within_s=1.5),
    ),
    "old spares are the only proposers": Scenario(
        "both members lose their power; the spares wait the outage limit and a lease",
        _plan(
            Fault(5.0, Kind.POWER_FAILS, A, for_s=_ALWAYS),
            Fault(5.0, Kind.POWER_FAILS, B, for_s=_ALWAYS),
            hosts=4,
            needed_s=20.0,
        ),
        End(2, 0, ("lost",), sizes=(4, 4), within_s=5.0 + 20.0 + 5.0 + 4.0),
    ),
    "a kill that is late because the agent is frozen": Scenario(
        "the agent of B is stopped for three leases: its starter kills in time, A goes on; B comes back",
        _plan(Fault(5.0, Kind.AGENT_FREEZES, B, for_s=_LONG), needed_s=30.0),
        End(3, 0, ("lost", "join"), sizes=(4, 2, 4), within_s=7.5),
    ),
    # --- one fault ---
    "a worker fails": Scenario(
        "one kill -9", _plan(Fault(5.0, Kind.WORKER_FAILS, B, hard=True), needed_s=20.0), _FAILED._replace(within_s=1.0)
    ),
    "an agent is killed, a spare takes over": Scenario(
        "the connection is refused: no lease has to run out",
        _plan(Fault(5.0, Kind.AGENT_CRASHES, B, for_s=_ALWAYS), hosts=3, needed_s=20.0),
        End(2, 0, ("lost",), within_s=1.5, sizes=(4, 4)),
    ),
    "a host is silent, a spare takes over": Scenario(
        "no power, no word: the lease has to run out",
        _plan(Fault(5.0, Kind.POWER_FAILS, B, for_s=_ALWAYS), hosts=3, needed_s=20.0),
        End(2, 0, ("lost",), within_s=7.0, sizes=(4, 4)),
    ),
    "what fails because a host is gone costs nothing": Scenario(
        "the workers of A fail of the lost peer before the lease of B has run out",
        _plan(Fault(5.0, Kind.POWER_FAILS, B, for_s=_ALWAYS), hosts=3, needed_s=20.0, victim_fails=1.0),
        End(2, 0, ("failed",), within_s=8.0, sizes=(4, 4)),
    ),
    "a node leaves": Scenario(
        "SIGTERM; it comes back later, and the job takes it in",
        _plan(Fault(5.0, Kind.LEAVE, B, for_s=_ALWAYS), needed_s=20.0),
        End(2, 0, ("leaves",), within_s=1.0, sizes=(4, 2)),
    ),
    "a node joins": Scenario(
        "below the maximum, the job grows at once",
        _plan(Fault(5.0, Kind.JOIN, other=1), hosts=1, needed_s=20.0),
        End(2, 0, ("joins",), within_s=1.5, sizes=(2, 4)),
    ),
    "a starter dies": Scenario(
        "and all its workers with it: that is a failure",
        _plan(Fault(5.0, Kind.STARTER_DIES, B), needed_s=20.0),
        _FAILED._replace(within_s=2.0),
    ),
    "an agent is stopped and continued": Scenario(
        "for less than a lease: nobody notices",
        _plan(Fault(5.0, Kind.AGENT_FREEZES, B, for_s=2.0), needed_s=20.0),
        End(),
    ),
    "a host is frozen": Scenario(
        "for three leases: it may not come back into its old round",
        _plan(Fault(5.0, Kind.HOST_FREEZES, B, for_s=_LONG), needed_s=30.0),
        End(3, 0, ("lost", "join"), within_s=7.5, sizes=(4, 2, 4)),
    ),
    "cut off from the peers only": Scenario(
        "two hosts do not reach each other: the store tells that both live",
        _plan(Fault(5.0, Kind.PEERS_CUT, A, B, for_s=_LONG), needed_s=30.0),
        End(),
    ),
    "cut off from the store only": Scenario(
        "B is vouched for as long as it takes", _plan(_B_CUT_OFF, needed_s=30.0), End()
    ),
    # --- the store ---
    "the store is away, shorter than a lease": Scenario(
        "nobody notices", _plan(_AWAY._replace(for_s=3.0), needed_s=20.0), End()
    ),
    "the store is away, longer than a lease": Scenario(
        "all vouch for each other; leases run out as it comes back", _plan(_AWAY, needed_s=40.0), End()
    ),
    "the store is away, leases kept": Scenario(
        "as after a restart of the whole cluster", _plan(_AWAY._replace(leases=Leases.KEPT), needed_s=40.0), End()
    ),
    "the store is away beyond the outage limit": Scenario(
        "all stop at the limit; when it is back they go on",
        _plan(_AWAY._replace(for_s=40.0), needed_s=40.0),
        End(2, 0, ("",), sizes=(4, 4)),
    ),
    "the store is back for a moment only": Scenario(
        "it is slow, and away again before anybody has registered: until they have, members go on being vouched for",
        _plan(
            _AWAY._replace(for_s=8.0),
            *(Fault(12.0, Kind.ANSWERS_SLOW, host, for_s=_LONG, delay_s=0.6) for host in (A, B)),
            _AWAY._replace(at=14.9, for_s=9.0),
            needed_s=40.0,
        ),
        End(),
    ),
    "a failure while the store is away": Scenario(
        "it waits for the store: no round without a swap",
        _plan(_AWAY._replace(for_s=8.0), Fault(7.0, Kind.WORKER_FAILS, B, hard=True), needed_s=20.0),
        End(2, 1, ("",)),
    ),
    "the leader changes": Scenario(
        "no writes for 1.5 s",
        _plan(Fault(5.0, Kind.LEADER_CHANGES, for_s=1.5), needed_s=20.0)._replace(etcd=("3.5.21", 3)),
        End(),
    ),
    "a deposed leader ends leases early": Scenario(
        "an old etcd: the leases of healthy nodes are gone, and they register again, their workers running on",
        _plan(Fault(5.0, Kind.LEADER_CHANGES, for_s=1.0, hard=True), needed_s=20.0)._replace(etcd=("3.4.23", 3)),
        End(),
    ),
    "compaction while an agent is away": Scenario(
        "its watch is lost; it lists anew",
        _plan(
            _B_CUT_OFF._replace(for_s=2.0),
            Fault(5.5, Kind.JOIN, other=1),
            Fault(6.8, Kind.COMPACTION),
            most=3,
            needed_s=20.0,
        ),
        End(2, 0, ("joins",), sizes=(4, 6)),
    ),
    "the store is restored from a snapshot": Scenario(
        "revisions fall: the agents stop and say so; others, started by hand, go on",
        _plan(
            Fault(1.0, Kind.SNAPSHOT),
            Fault(5.0, Kind.WORKER_FAILS, B, hard=True),
            Fault(8.0, Kind.RESTORE),
            needed_s=30.0,
            heals_at=30.0,
        ),
        End(4, 0, ("failed", "lost"), problem="restored from an older state"),
    ),
    # --- what is slow: deadlines count from when something was asked for ---
    "a renewal whose answer is slow": Scenario(
        "each renewal of B is answered 1.2 s late; then B is silent: its workers die before its lease has run out",
        _plan(
            Fault(4.0, Kind.ANSWERS_SLOW, B, for_s=_LONG, delay_s=1.2),
            Fault(7.0, Kind.HOST_CUT, B, for_s=_LONG),
            hosts=3,
            needed_s=30.0,
        ),
        End(2, 0, ("lost",), sizes=(4, 4)),
    ),
    "a vouch that is read late": Scenario(
        "the agent of B stands still while its vouch comes; when it runs again, A is out of its reach",
        _plan(
            Fault(4.0, Kind.PEERS_SLOW, A, B, for_s=_ALWAYS, delay_s=0.5),
            _STORE_REFUSES_B,
            Fault(8.3, Kind.AGENT_FREEZES, B, for_s=1.9),
            Fault(9.5, Kind.PEERS_CUT, A, B, for_s=_LONG),
            hosts=3,
            needed_s=40.0,
        ),
        End(2, 0, ("lost",), sizes=(4, 4)),
    ),
    "a promise that comes late": Scenario(
        "C promises A over a slow way, which is cut then; D leaves, so C lists as soon as its promise is over",
        _plan(
            Fault(4.0, Kind.PEERS_SLOW, A, C, for_s=_ALWAYS, delay_s=1.6),
            _STORE_REFUSES_B,
            Fault(8.7, Kind.PEERS_CUT, A, C, for_s=_LONG),
            Fault(14.0, Kind.LEAVE, D, for_s=_ALWAYS),
            hosts=4,
            most=3,
            needed_s=30.0,
        ),
        End(3, 0, ("lost", "join"), sizes=(6, 4, 6)),
    ),
    # --- who takes part ---
    "two spares take two places": Scenario(
        "neighbours are killed at once: for the second one its lease has to run out, as who follows it is dead",
        _plan(
            Fault(5.0, Kind.AGENT_CRASHES, B, for_s=_ALWAYS),
            Fault(5.0, Kind.AGENT_CRASHES, C, for_s=_ALWAYS),
            hosts=5,
            most=3,
            least=3,
            needed_s=20.0,
        ),
        End(2, 0, ("lost",), within_s=7.0, sizes=(6, 6)),
    ),
    "a node that comes waits for the next restart": Scenario(
        "--join at-restart: it is taken in when a worker fails",
        _with(
            _plan(Fault(5.0, Kind.JOIN, other=1), Fault(12.0, Kind.WORKER_FAILS, A), hosts=1, needed_s=20.0),
            join=Join.AT_RESTART,
        ),
        End(2, 1, ("failed",), sizes=(2, 4)),
    ),
    "nodes that come one by one are taken in together": Scenario(
        "--join 3: each of three comes less than 3 s after the one before",
        _with(
            _plan(*(Fault(5.0 + 2.0 * n, Kind.JOIN, other=1) for n in range(3)), hosts=1, most=4, needed_s=20.0),
            join=Join.SETTLE,
            join_settle_s=3.0,
        ),
        End(2, 0, ("joins",), sizes=(2, 8)),
    ),
    "a node that was not ready in time comes in once it is": Scenario(
        "B is registered when the round begins to run, and hears of it only then",
        _plan(needed_s=10.0, traps=(Trap("nodes/", '"host":"B"', Snag.ANSWER_LOST),)),
        End(2, 0, ("joins",), sizes=(2, 4)),
    ),
    "a node leaves while the round forms": Scenario(
        "it was counted on, and is not waited for",
        _plan(Fault(0.4, Kind.LEAVE, B, for_s=_ALWAYS), hosts=3, most=3, least=2, needed_s=10.0),
        End(sizes=(4,)),
    ),
    "a host whose workers fail again and again is set aside": Scenario(
        "--max-node-failures 2: after the second one the spare takes its place",
        _with(
            _plan(*(Fault(at, Kind.WORKER_FAILS, B, hard=True) for at in (5.0, 8.0)), hosts=3, needed_s=20.0),
            max_node_failures=2,
        ),
        End(3, 2, ("failed", "failed"), sizes=(4, 4, 4)),
    ),
    "roles, and ranks that are wished for": Scenario(
        "C wishes for the first place, B for one that there is not; A and C are of one role",
        _of_roles(_plan(hosts=3, most=3, needed_s=5.0), ("actor", None), ("learner", 7), ("actor", 0)),
        End(sizes=(6,)),
    ),
    "too few nodes come": Scenario(
        "--rdzv-timeout 6: the run ends, and says so",
        _plan(least=3, most=3, hosts=2)._replace(timeout_s=6.0),
        End(state=RunState.FAILED),
    ),
    # --- the run's keys ---
    "a user stops the run": Scenario(
        "by a key", _plan(Fault(5.0, Kind.USER_STOPS)), End(stops=("wants it to end",), state=RunState.INTERRUPTED)
    ),
    "a node that is to leave finds that the run has ended": Scenario(
        "the agent of B stands still while it is asked to leave, loses its lease, and a user stops the run",
        _plan(
            Fault(5.0, Kind.AGENT_FREEZES, B, for_s=10.0),
            Fault(6.0, Kind.LEAVE, B, for_s=_ALWAYS),
            Fault(6.5, Kind.USER_STOPS),
        ),
        End(stops=("wants it to end",), state=RunState.INTERRUPTED),
    ),
    "a registration is deleted by hand": Scenario(
        "its lease goes on, so nothing is proved; it is written again",
        _plan(Fault(5.0, Kind.KEY_DELETED, B), needed_s=20.0),
        End(),
    ),
    "garbage under the run's keys": Scenario(
        "before the first agent comes and while the job runs: it is named, and left out",
        _plan(
            *(Fault(0.01 * n, Kind.GARBAGE) for n in range(40)),
            *(Fault(5.0 + 0.01 * n, Kind.GARBAGE) for n in range(40)),
            Fault(6.0, Kind.WORKER_FAILS, B, hard=True),
            needed_s=20.0,
        ),
        _FAILED,
    ),
    # --- a private etcd ---
    "the host of the private etcd dies": Scenario(
        "the others train on up to the outage limit, stop, and give up; users start the run anew",
        _plan(Fault(5.0, Kind.POWER_FAILS, A, for_s=_ALWAYS), hosts=3, needed_s=60.0)._replace(
            store_on=A, timeout_s=10.0, etcd=("3.5.1", 1)
        ),
        End(2, 0, ("joins",), problem="out of reach"),
    ),
    "the host of the private etcd is silent for a while": Scenario(
        "no other host reaches it: the others vouch for each other, as for any store that is away",
        _plan(
            Fault(5.0, Kind.STORE_AWAY, for_s=_LONG, hard=True, leases=Leases.LAPSED), hosts=3, needed_s=40.0
        )._replace(store_on=A, etcd=("3.5.1", 1)),
        End(),
    ),
    "a run with a private etcd ends": Scenario(
        "its host stays until the others have read how",
        _plan(hosts=4, most=3, needed_s=5.0)._replace(store_on=A, etcd=("3.5.1", 1)),
        End(sizes=(6,)),
    ),
    # --- one write ---
    "the proposer dies before its swap": Scenario(
        "of the stop", _snag("round", '"stopping"', Snag.DIES_BEFORE, 60.0), End(2, 0, ("failed",))
    ),
    "the proposer dies after its swap": Scenario(
        "of the stop", _snag("round", '"stopping"', Snag.DIES_AFTER, 60.0), End(2, 0, ("failed",))
    ),
    "the next proposer dies before its swap": Scenario(
        "of the next round", _snag("round", '"number":2', Snag.DIES_BEFORE, 60.0), _FAILED
    ),
    "the next proposer dies after its swap": Scenario(
        "of the next round", _snag("round", '"number":2', Snag.DIES_AFTER, 60.0), _FAILED
    ),
    "an ambiguous swap that landed": Scenario(
        "its answer is lost", _snag("round", '"stopping"', Snag.ANSWER_LOST), _FAILED
    ),
    "an ambiguous swap that did not land": Scenario(
        "it is lost", _snag("round", '"stopping"', Snag.REQUEST_LOST), _FAILED
    ),
    "a swap that lands late": Scenario(
        "after others have swapped", _snag("round", '"stopping"', Snag.LATE, 6.0), _FAILED
    ),
    "an ambiguous report": Scenario("its answer is lost", _snag("report/1", '"failure":{', Snag.ANSWER_LOST), _FAILED),
    "a report that is lost": Scenario("it is sent again", _snag("report/1", '"failure":{', Snag.REQUEST_LOST), _FAILED),
    "a report of a round that is over": Scenario(
        "it must not count", _snag("report/1", '"failure":{', Snag.LATE, 8.0), _FAILED
    ),
    "an ambiguous registration": Scenario(
        "its answer is lost: it is looked up, and the node comes in after the others",
        _snag("nodes/", "", Snag.ANSWER_LOST),
        End(3, 1, ("joins", "failed")),
    ),
    "assignments whose writer dies": Scenario(
        "they count only once `round` names them", _snag("assign/", "", Snag.DIES_AFTER, 0.5), End(2, 0, ("",))
    ),
    # --- several at once ---
    "two failures at the same instant": Scenario(
        "one of them is counted",
        _plan(Fault(5.0, Kind.WORKER_FAILS, A, hard=True), Fault(5.0, Kind.WORKER_FAILS, B, hard=True), needed_s=20.0),
        _FAILED,
    ),
    "a second failure while the round begins": Scenario(
        "each is counted once",
        _plan(Fault(5.0, Kind.WORKER_FAILS, A, hard=True), Fault(5.45, Kind.WORKER_FAILS, B, hard=True), needed_s=20.0),
        End(3, 2, ("failed", "failed")),
    ),
    "SIGTERM on many, below the minimum": Scenario(
        "the rest waits, and goes on when others come",
        _plan(
            Fault(5.0, Kind.LEAVE, A, for_s=10.0),
            Fault(5.0, Kind.LEAVE, B, for_s=14.0),
            hosts=3,
            most=3,
            least=2,
            needed_s=20.0,
        ),
        End(3, 0, ("leaves", "joins"), sizes=(6, 4, 6)),
    ),
    "a storm of joins": Scenario(
        "they are taken in together, not one by one",
        _plan(*(Fault(5.0 + 0.02 * n, Kind.JOIN, other=1) for n in range(6)), hosts=4, most=10, needed_s=20.0),
        End(2, 0, ("joins",), sizes=(8, 20)),
    ),
    "two agents on one host": Scenario(
        "each has its own workers",
        _plan(needed_s=10.0)._replace(hosts=(HostPlan(0.0, name="X"), HostPlan(0.1, name="X", clock=BIG_CLOCK))),
        End(),
    ),
}
