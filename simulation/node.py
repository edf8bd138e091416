"""One host of the cluster, and the agent processes on it: the real machine and the real member on a simulated node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dlaunch.agent import actions
from dlaunch.agent import events as agent_events
from dlaunch.outcome import Outcome
from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.store import Answer, Range, RangeAnswer, StoreError

from .clock import Due, HostClock
from .etcd import Watching
from .faults import Snag
from .starter import Starter

if TYPE_CHECKING:
    from .cluster import Brain, Cluster
    from .plan import HostPlan

STARTER_WAKES_S = 0.02  # a host that was frozen: how long its starter may take to look at the deadline
HOST_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Host:
    """A machine: its clock, its power, and who runs on it."""

    def __init__(self, cluster: Cluster, index: int, plan: HostPlan) -> None:
        self.cluster, self.index, self.clock, self.plan = cluster, index, plan.clock, plan
        self.name = plan.name or (HOST_NAMES[index] if index < len(HOST_NAMES) else f"H{index}")
        self.scheduler = cluster.scheduler
        self.has_power = True
        self.agents: list[Agent] = []  # all that ever ran here
        self._frozen = 0  # by how many faults
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.boots = 1
        self._pid = 1000 * (index + 1)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing on it runs."""
        return self._frozen > 0

    @property
    def agent(self) -> Agent | None:
        """The agent that lives here."""
        return self.agents[-1] if self.agents and self.agents[-1].lives else None

    def shows(self) -> float:
        """What its clock shows now."""
        return self.clock.shows(self.scheduler.now)

    def next_pid(self) -> int:
        """A process id that was not used here before."""
        self._pid += 1
        return self._pid

    def when_running(self, call: Callable[..., object], *arguments: Any) -> None:
        """Do this now, or when the host runs again; never where it lost its power meanwhile."""
        if self._frozen:
            self._waiting.append((call, arguments))
        elif self.has_power:
            call(*arguments)

    def freeze(self) -> None:
        """Nothing on the host runs, its kernel included."""
        self._frozen += 1
        self.cluster.freeze_changed(self)

    def thaw(self) -> None:
        """It runs again: what should have happened meanwhile happens now."""
        if not self._frozen:
            return
        self._frozen -= 1
        if self._frozen:
            return
        for agent in self.agents:
            if agent.starter is not None and agent.starter.lives:
                self._wake_starter(agent.starter)
        self.cluster.freeze_changed(self)
        waiting, self._waiting = self._waiting, deque()
        for call, arguments in waiting:
            self.when_running(call, *arguments)
        for agent in self.agents:
            agent.catch_up()

    def thaw_all(self) -> None:
        """Whoever froze it lets it go."""
        while self._frozen:
            self.thaw()

    def _wake_starter(self, starter: Starter) -> None:
        if starter.is_past_deadline():
            for worker in starter.workers.values():
                worker.excused = True
        self.scheduler.after(STARTER_WAKES_S * self.cluster.dice.random(), self.when_running, starter.look_at_deadline)

    def lose_power(self) -> None:
        """Everything on it is gone, without a word."""
        for agent in self.agents:
            agent.lose_power()
        self.has_power = False
        self._frozen = 0
        self._waiting.clear()
        self.cluster.freeze_changed(self)

    def get_power(self) -> None:
        """It boots."""
        self.has_power = True
        self.boots += 1
        rate = self.clock.rate
        self.clock = HostClock(5.0 - self.scheduler.now * rate, rate)


class Agent:
    """One agent process, from its start to its end: what performs for it what it asks for."""

    def __init__(self, host: Host, brain: Brain, address: str, number: int) -> None:
        self.host, self.brain, self.address = host, brain, address
        self.name = host.name + "'" * number
        self.node_id = ""  # until it has one
        self.lives = True
        self.starter: Starter | None = None
        self.outcome: Outcome | None = None
        self.problem: str | None = None  # why it could not take part
        self.was_asked_to_leave = False
        self.ended_at = 0.0
        self.may_give_up_until = -1.0
        self.client = host.cluster.etcd.client(self.name)
        self._deadline: float | None = None  # as the member told it last: a new starter has to know it too
        self._frozen = 0
        self._is_buried = False
        self._inbox: deque[Any] = deque()
        self._timers: dict[tuple[type, str], Due] = {}
        self._overdue: deque[tuple[type, str]] = deque()
        self._watches: dict[int, Watching] = {}

    # --- as others' sockets see it -------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """The number of its host."""
        return self.host.index

    def is_answering(self) -> bool:
        """It lives and runs."""
        return self.lives and not self.is_frozen

    def is_buried(self) -> bool:
        """Nothing is left of it."""
        return self._is_buried

    def has_kernel(self) -> bool:
        """Its host's kernel answers."""
        return self.host.has_power and not self.host.is_frozen

    def hear_peer(self, node_id: str, message: dict[str, Any]) -> None:
        """A message has arrived."""
        self.host.cluster.peer_heard(self, node_id, message)
        self.deliver(events.PeerSaid(node_id, message))

    def hear_gone(self, node_id: str) -> None:
        """The peer that it follows is gone."""
        self.host.cluster.gone_heard(self, node_id)
        self.deliver(events.PeerGone(node_id))

    # --- the queue -----------------------------------------------------------------------------------------------

    @property
    def is_frozen(self) -> bool:
        """Whether it was stopped, or its host was."""
        return self._frozen > 0 or self.host.is_frozen

    def deliver(self, event: Any) -> None:
        """An event for the agent: handled at once, or when it runs again."""
        if not self.lives:
            return
        if self.is_frozen or self._inbox:
            self._inbox.append(event)
        else:
            self._handle(event)

    def _handle(self, event: Any) -> None:
        for effect in self.brain.handle(event, self.host.shows()):
            if not self.lives:
                return
            _PERFORM[type(effect)](self, effect)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._frozen += 1

    def thaw(self) -> None:
        """SIGCONT."""
        if self._frozen:
            self._frozen -= 1
            self.catch_up()

    def thaw_all(self) -> None:
        """Whoever stopped it lets it go."""
        while self._frozen:
            self.thaw()

    def catch_up(self) -> None:
        """Take in what has piled up, timers among it somewhere."""
        dice = self.host.cluster.dice
        while self.lives and not self.is_frozen and (self._inbox or self._overdue):
            if self._overdue and (not self._inbox or dice.random() < 0.3):
                self._fire(self._overdue.popleft())
            else:
                self._handle(self._inbox.popleft())

    # --- what it asks for ----------------------------------------------------------------------------------------

    def _ask(self, effect: effects.Ask) -> None:
        cluster = self.host.cluster
        trap = cluster.asked(self, effect.request)
        if trap is not None and trap.snag is Snag.DIES_BEFORE:
            cluster.crash_agent(self, trap.for_s)
            return
        answered = partial(self._answered, effect.id)
        if is_list_of_nodes(effect.request, cluster.keys.nodes):
            answered = partial(self._listed, effect.id, self.host.shows())
        self.client.ask(effect.request, effect.timeout_s, answered, trap)
        if trap is not None and trap.snag is Snag.DIES_AFTER:
            cluster.crash_agent(self, trap.for_s)

    def _answered(self, number: int, answer: Answer | StoreError) -> None:
        self.deliver(events.Answered(number, answer))

    def _listed(self, number: int, asked_at: float, answer: Answer | StoreError) -> None:
        if isinstance(answer, RangeAnswer):
            registered = {kv.key.rpartition("/")[2] for kv in answer.kvs}
            self.host.cluster.invariants.listed(self, asked_at, registered)
        self._answered(number, answer)

    def _watch(self, effect: effects.WatchKeys) -> None:
        self._watches[effect.id] = self.client.watch(
            effect.key,
            effect.prefix,
            effect.from_revision,
            lambda heard: self.deliver(events.WatchHeard(effect.id, heard)),
        )

    def _unwatch(self, effect: effects.Unwatch) -> None:
        if (watch := self._watches.pop(effect.id, None)) is not None:
            self.client.unwatch(watch)

    def _set_timer(self, effect: effects.SetTimer | actions.SetTimer) -> None:
        key = _timer(type(effect), effect.name)
        self._forget_timer(key)
        true = self.host.clock.true(effect.at) + 1e-9  # never early by the rounding
        self._timers[key] = self.host.scheduler.at(true, self._time_out, key)

    def _cancel_timer(self, effect: effects.CancelTimer | actions.CancelTimer) -> None:
        self._forget_timer(_timer(type(effect), effect.name))

    def _forget_timer(self, key: tuple[type, str]) -> None:
        if (due := self._timers.pop(key, None)) is not None:
            due.cancel()
            if key in self._overdue:
                self._overdue.remove(key)

    def _time_out(self, key: tuple[type, str]) -> None:
        if self.lives:
            self._overdue.append(key)
            if not self._inbox:
                self.catch_up()

    def _fire(self, key: tuple[type, str]) -> None:
        self._timers.pop(key, None)
        self._handle(key[0](key[1]))

    def _set_token(self, effect: effects.SetToken) -> None:
        before, self.node_id = self.node_id, effect.node_id
        cluster = self.host.cluster
        if before != self.node_id:
            cluster.story.tell(self.name, f"is node {self.node_id}")
            cluster.node_named(self, before)
            cluster.network.wake_followers(self)

    def _send_peer(self, effect: effects.SendPeer) -> None:
        cluster = self.host.cluster
        cluster.peer_told(self, effect.message)
        cluster.network.send(self, self.node_id, effect.peer, effect.message)

    def _follow_peer(self, effect: effects.FollowPeer) -> None:
        self.host.cluster.network.follow(self, effect.peer)

    def _set_deadline(self, effect: effects.SetDeadline) -> None:
        if self.starter is not None:
            self.starter.post(self.starter.set_deadline, effect.at)
        self._deadline = effect.at

    def _open_meeting(self, effect: effects.OpenMeeting) -> None:
        cluster = self.host.cluster
        opened = events.MeetingOpened(effect.round, self.host.name, cluster.next_port(), True)
        cluster.scheduler.after(0.001, self.deliver, opened)

    def _say(self, effect: effects.Say | actions.Say) -> None:
        self.host.cluster.story.tell(self.name, f'says "{effect.text}"')

    def _start_starter(self, effect: actions.StartStarter) -> None:
        self.starter = Starter(self.host, self)
        if self._deadline is not None:
            self.starter.post(self.starter.set_deadline, self._deadline)

    def _spawn_group(self, effect: actions.SpawnGroup) -> None:
        assert self.starter is not None
        assert effect.assignment is not None
        self.starter.spawn(effect.assignment)

    def _signal(self, effect: actions.SignalWorkers | actions.ForwardSignal) -> None:
        if self.starter is not None:
            self.starter.post(self.starter.signal, effect.local_ranks, effect.signum)

    def _kill(self, effect: actions.KillWorkers) -> None:
        if self.starter is not None:
            self.starter.post(self.starter.signal, effect.local_ranks, 9)

    def _sweep(self, effect: actions.Sweep) -> None:
        if self.starter is not None:
            self.starter.post(self.starter.sweep)

    def _destroy_starter(self, effect: actions.DestroyStarter) -> None:
        if self.starter is not None:
            self.host.when_running(self.starter.die)

    def _give_up(self, effect: actions.GiveUp) -> None:
        self.problem = str(effect.error)
        self._exit()

    def _abandon(self, effect: actions.Abandon) -> None:
        self.problem = effect.sentence
        self._exit()

    def _finish(self, effect: actions.Finish) -> None:
        self.outcome = effect.outcome
        self._exit()

    # --- its end -------------------------------------------------------------------------------------------------

    def _exit(self) -> None:
        cluster = self.host.cluster
        ended = self.outcome
        what = f"{ended.state.value}, exit code {ended.exit_code}: {ended.reason}" if ended else self.problem
        cluster.story.tell(self.name, f"ends: {what}")
        cluster.agent_ended(self)
        self._stop_being()
        self.host.when_running(self._bury)

    def crash(self) -> None:
        """kill -9 of the agent: its starter and guard see it, and clean up."""
        if not self.lives:
            return
        self._stop_being()
        cluster = self.host.cluster
        delay_s = cluster.weather.death.draw(cluster.dice)
        self.host.scheduler.after(delay_s, self.host.when_running, self._bury)

    def lose_power(self) -> None:
        """It is gone with its host; nothing says so until the host is back."""
        if not self._is_buried:
            self._stop_being()
            self._bury()

    def _stop_being(self) -> None:
        if not self.lives:
            return
        self.lives = False
        self.host.cluster.living -= 1
        self.client.close()
        for due in self._timers.values():
            due.cancel()
        self._inbox.clear()
        network = self.host.cluster.network
        network.follow(self, None)
        network.wake_followers(self)
        self.host.cluster.agent_is_gone(self)

    def _bury(self) -> None:
        if self.starter is not None:
            self.starter.die(told=False)
        self._is_buried = True


def is_list_of_nodes(request: object, nodes: str) -> bool:
    """Whether this asks for all registrations."""
    return isinstance(request, Range) and request.key == nodes and request.prefix and not request.limit


def _timer(of: type, name: str) -> tuple[type, str]:
    """Machine and member have timers of their own: a timer is known by the event that tells of it, and its name."""
    return (events.TimerFired if of in {effects.SetTimer, effects.CancelTimer} else agent_events.TimerFired), name


_PERFORM: dict[type, Callable[[Agent, Any], None]] = {
    effects.Ask: Agent._ask,
    effects.WatchKeys: Agent._watch,
    effects.Unwatch: Agent._unwatch,
    effects.SetTimer: Agent._set_timer,
    effects.CancelTimer: Agent._cancel_timer,
    effects.SetToken: Agent._set_token,
    effects.SendPeer: Agent._send_peer,
    effects.FollowPeer: Agent._follow_peer,
    effects.SetDeadline: Agent._set_deadline,
    effects.OpenMeeting: Agent._open_meeting,
    effects.Say: Agent._say,
    actions.StartStarter: Agent._start_starter,
    actions.SpawnGroup: Agent._spawn_group,
    actions.SignalWorkers: Agent._signal,
    actions.ForwardSignal: Agent._signal,
    actions.KillWorkers: Agent._kill,
    actions.Sweep: Agent._sweep,
    actions.DestroyStarter: Agent._destroy_starter,
    actions.SetTimer: Agent._set_timer,
    actions.CancelTimer: Agent._cancel_timer,
    actions.Say: Agent._say,
    actions.GiveUp: Agent._give_up,
    actions.Abandon: Agent._abandon,
    actions.Finish: Agent._finish,
}
