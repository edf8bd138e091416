"""Members of one run in a test: the real `Member`, on keys in memory and a clock that jumps from event to event.

Workers start and stop as told (stopping takes as long as a test says); nothing else is simulated. What must never be is
checked all the time: no exception, no two worlds, no rank twice.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from dlaunch.outcome import ExitStatus, Failure, FailureKind
from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.etcd_messages import encode, watch_request
from dlaunch.rendezvous.keys import Keys
from dlaunch.rendezvous.member import Member, MemberSettings, NodeInfo
from dlaunch.rendezvous.memory import MemoryKeys
from dlaunch.rendezvous.records import RoundRecord, RunSettings, read_round
from dlaunch.rendezvous.store import (
    Answer,
    Changes,
    Delete,
    LeaseAlive,
    Operation,
    Put,
    Range,
    RangeAnswer,
    Request,
    StoreError,
    Txn,
    WatchLost,
)
from dlaunch.rendezvous.values import Assignment

LATENCY_S = 0.001  # of a request and of a watch
PATIENCE_S = 60.0  # of the jumping clock

Refusal = Callable[[Request], "StoreError | None"]


class World:
    """A store, a clock, and the nodes of one run (others may share the store)."""

    def __init__(self, settings: RunSettings | None = None, *, run_id: str = "run", prefix: str = "/dlaunch") -> None:
        self.now = 1000.0
        self.memory = MemoryKeys()
        self.keys = Keys.of(prefix, run_id)
        self.settings = MemberSettings(run_id, settings or RunSettings(2, 2, settle_s=0.1), prefix)
        self.nodes: list[Node] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._watches: list[_Watch] = []

    # --- nodes -------------------------------------------------------------------------------------------------------

    def add(self, **changes: Any) -> Node:
        """One more node; it has not joined yet."""
        number = len(self.nodes)
        info = NodeInfo(f"host{number}", f"boot{number}", f"10.0.0.{number}:29400", 2)
        self.nodes.append(Node(self, info._replace(**changes)))
        return self.nodes[-1]

    def join(self, count: int = 2) -> list[Node]:
        """So many nodes more, that join now."""
        nodes = [self.add() for _ in range(count)]
        for node in nodes:
            node.handle(events.Join())
        return nodes

    def running(self, count: int = 2) -> list[Node]:
        """So many nodes, whose workers run."""
        nodes = self.join(count)
        self.until(lambda: all(node.running for node in nodes))
        return nodes

    @property
    def round(self) -> RoundRecord:
        """What stands in the store."""
        (kv,) = self.read(self.keys.round)
        return read_round(kv.key, kv.value)

    # --- the store, from outside -------------------------------------------------------------------------------------

    def write(self, *operations: Operation) -> None:
        """Somebody writes under our keys."""
        answer = self.memory.apply(Txn((), operations), self.now)
        assert not isinstance(answer, StoreError), answer
        self.tell_watches()

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Somebody writes one key."""
        self.write(Put(key, value, lease))

    def delete(self, key: str, *, prefix: bool = False) -> None:
        """Somebody deletes one key, or all that start with it."""
        self.write(Delete(key, prefix))

    def read(self, key: str, *, prefix: bool = False) -> tuple[Any, ...]:
        """What stands under a key."""
        answer = self.memory.apply(Range(key, prefix), self.now)
        assert isinstance(answer, RangeAnswer)
        return answer.kvs

    def tell_watches(self) -> None:
        """Let every watch hear what is new, a moment later."""
        for watch in list(self._watches):
            watch.catch_up()

    def watch(self, watch: _Watch) -> None:
        self._watches.append(watch)
        watch.catch_up()

    def unwatch(self, watch: _Watch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    # --- time --------------------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._due, (when, next(self._order), call))

    def until(self, holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Let things happen until a condition holds."""
        end = self.now + within_s
        while not holds():
            assert self._step(end), f"it did not happen within {within_s:g} s: {self.story()}"

    def run_for(self, for_s: float) -> None:
        """Let things happen for a time."""
        end = self.now + for_s
        while self._step(end):
            pass

    def _step(self, end: float) -> bool:
        expiry = self.memory.next_expiry()
        next_at = self._due[0][0] if self._due else end
        if min(next_at, end if expiry is None else expiry) >= end:
            self.now = end
            return False
        if expiry is not None and expiry <= next_at:
            self.now = max(self.now, expiry)
            self.memory.expire(self.now)
            self.tell_watches()
            return True
        when, _, call = heapq.heappop(self._due)
        self.now = max(self.now, when)
        call()
        return True

    def story(self) -> str:
        """Where everybody stands, for a test that fails."""
        return "; ".join(f"{node.info.host}: {node}" for node in self.nodes)

    # --- what must never be ------------------------------------------------------------------------------------------

    def check_worlds(self) -> None:
        """One world at a time, and every rank of it once."""
        alive = [node.assignment for node in self.nodes if node.assignment]
        assert len({assignment.round for assignment in alive}) <= 1, f"two worlds: {self.story()}"
        ranks = sorted((one.base_rank, one.base_rank + one.local_world_size) for one in alive)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranks)), f"a rank twice: {self.story()}"


class Node:
    """A member, and the workers that it has started."""

    def __init__(self, world: World, info: NodeInfo) -> None:
        self.world, self.info = world, info
        self.stopping_takes_s = 0.01
        self.getting_ready_takes_s = LATENCY_S
        self.lags_in_leases = False  # the store's member that it asks is behind, and says so where it may
        self.refuses: Refusal = lambda _request: None  # what the store answers this node in place of an answer
        self.assignment: Assignment | None = None  # of the workers that live here
        self.assignments: list[Assignment] = []  # all there ever were
        self.said: list[str] = []
        self.ended: effects.EndRun | effects.Left | None = None
        self.refused: effects.Refuse | None = None
        self.asked: list[Request] = []
        self.deadline = float("-inf")
        self.lives = True
        self._ids = itertools.count()
        self._timers: dict[str, int] = {}
        self._watches: dict[int, _Watch] = {}
        number = len(world.nodes)
        self.member = Member(world.settings, info, lambda: f"n{number}f{next(self._ids)}")

    def __str__(self) -> str:
        workers = f"round {self.assignment.round}" if self.assignment else "no workers"
        return f"{workers}, said {self.said}, refused {self.refused}, ended {self.ended}"

    @property
    def running(self) -> int:
        """The round of the workers that live here; 0: none."""
        return self.assignment.round if self.assignment else 0

    @property
    def has_ended(self) -> bool:
        """Whether the process may end."""
        return self.ended is not None  # a `Left` has no fields, so it is false

    @property
    def sentence(self) -> str:
        """Why it does not take part any longer; empty: it does."""
        return str(self.refused.error) if self.refused else ""

    def handle(self, event: events.Event) -> None:
        """Let the member handle an event, and do what it asks for."""
        if self.lives:
            for effect in self.member.handle(event, self.world.now):
                self._perform(effect)

    def finish(self) -> None:
        """All workers here succeed."""
        number, self.assignment = self.running, None
        self.handle(events.WorkersFinished(number))

    def fail(self) -> None:
        """A worker here fails."""
        number, self.assignment = self.running, None
        failure = Failure(FailureKind.EXIT, 0, 0, 0, self.info.host, 77, ExitStatus(code=3), self.world.now, 100.0)
        self.handle(events.WorkersFailed(number, failure))
        self.handle(events.WorkersStopped(number, failure))

    def die(self) -> None:
        """The agent and all that it has started are gone, without a word."""
        self.lives, self.assignment = False, None
        for watch in self._watches.values():
            self.world.unwatch(watch)

    def _perform(self, effect: effects.Effect) -> None:  # noqa: PLR0912  -- one case for each effect
        match effect:
            case effects.Ask(number, request):
                self._ask(number, request)
            case effects.WatchKeys(number, key, prefix, from_revision):
                watch_request(key, prefix, from_revision)  # etcd's client can say it
                self._watches[number] = _Watch(self, number, key, prefix, from_revision)
                self.world.watch(self._watches[number])
            case effects.Unwatch(number):
                self.world.unwatch(self._watches.pop(number))
            case effects.SetTimer(name, at):
                order = self._timers[name] = next(self._ids)
                self.world.at(at, lambda: self._time_out(name, order))
            case effects.CancelTimer(name):
                self._timers.pop(name, None)
            case effects.SetDeadline(at):
                self.deadline = at
                self.world.at(at, self._die_at_deadline)
            case effects.OpenMeeting(number):
                opened = events.MeetingOpened(number, self.info.host, 29500, True)
                self.world.at(self.world.now + self.getting_ready_takes_s, lambda: self.handle(opened))
            case effects.RunRound(assignment):
                assert self.world.now < self.deadline
                self.assignment = assignment
                self.assignments.append(assignment)
                self.world.check_worlds()
            case effects.StopRound(number, _, by_deadline):
                takes_s = 0.0 if by_deadline else self.stopping_takes_s
                self.world.at(self.world.now + takes_s, lambda: self._stopped(number))
            case effects.Say(text):
                assert text
                self.said.append(text)
            case effects.Refuse():
                assert str(effect.error)
                self.refused = effect
                if number := self.running:
                    self.world.at(self.world.now + self.stopping_takes_s, lambda: self._stopped(number))
                else:
                    self.world.at(self.world.now, lambda: self.handle(events.Leave("refused")))
            case effects.EndRun() | effects.Left():
                self.ended = effect
                assert self.assignment is None
            case effects.SetToken() | effects.SendPeer() | effects.FollowPeer():
                pass

    def _ask(self, number: int, request: Request) -> None:
        self.asked.append(request)
        encode(request)  # etcd's client can say it
        self.world.at(self.world.now + LATENCY_S, partial(self._perform_request, number, request))

    def _perform_request(self, number: int, request: Request) -> None:
        if not self.lives:
            return
        answer: Answer | StoreError = self.refuses(request) or self.world.memory.apply(request, self.world.now)
        self.world.tell_watches()
        if self.lags_in_leases and isinstance(answer, LeaseAlive):
            answer = answer._replace(revision=answer.revision - 1)
        found = answer
        self.world.at(self.world.now + LATENCY_S, lambda: self.handle(events.Answered(number, found)))

    def _time_out(self, name: str, order: int) -> None:
        if self._timers.get(name) == order:
            del self._timers[name]
            self.handle(events.TimerFired(name))

    def _stopped(self, number: int) -> None:
        if self.running == number:
            self.assignment = None
            self.handle(events.WorkersStopped(number, None))
        if self.refused and not self.has_ended:
            self.handle(events.Leave("refused"))

    def _die_at_deadline(self) -> None:
        """The starter kills what is past its deadline."""
        if self.assignment and self.world.now >= self.deadline and self.lives:
            self._stopped(self.running)


class _Watch:
    """A watch of one node."""

    def __init__(self, node: Node, number: int, key: str, prefix: bool, from_revision: int) -> None:
        self._node, self._number, self._key, self._prefix = node, number, key, prefix
        self._next = from_revision

    def catch_up(self) -> None:
        news = self._node.world.memory.changes_since(self._next, self._key, self._prefix)
        if isinstance(news, Changes) and not news.changes:
            return
        if isinstance(news, Changes):
            self._next = news.revision + 1
        else:
            self._node.world.unwatch(self)
        self._post(news)

    def _post(self, news: Changes | WatchLost) -> None:
        node, number = self._node, self._number
        node.world.at(node.world.now + LATENCY_S, lambda: node.handle(events.WatchHeard(number, news)))
