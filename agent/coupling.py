"""The two pure machines of a node in a run of several: its workers' (node_machine.py) and the run's (rendezvous).

What one says is an event of the other; what is left over is for the shell. The simulator drives this same class.
"""

from __future__ import annotations

from collections import deque

from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.member import Member

from . import actions
from .actions import Action
from .events import (
    Event,
    HasLeft,
    RoundStarts,
    RoundStops,
    RunEnds,
    RunRefused,
    StarterLost,
    StarterReady,
)
from .node_machine import NodeMachine


class Coupling:
    """One node, as a pure machine of both kinds of events."""

    def __init__(self, machine: NodeMachine, member: Member) -> None:
        self.machine = machine
        self.member = member
        self._joined = False
        self._starter_lives = False
        self._held_meeting: effects.OpenMeeting | None = None  # until there is a starter to serve it

    def handle(self, event: Event | events.Event, now: float) -> list[Action | effects.Effect]:
        """What is left to be done for ``event``, in order."""
        left: list[Action | effects.Effect] = []
        if isinstance(event, StarterLost | StarterReady):
            self._starter_lives = isinstance(event, StarterReady)
        queue: deque[Event | events.Event] = deque([event])
        while queue:
            one = queue.popleft()
            if isinstance(one, _FOR_MEMBER):
                for effect in self.member.handle(one, now):
                    self._route_effect(effect, queue, left)
            else:
                for action in self.machine.handle(one, now):
                    self._route_action(action, queue, left)
        if self._starter_lives and self._held_meeting is not None:
            left.append(self._held_meeting)
            self._held_meeting = None
        return left

    def _route_action(
        self, action: Action, queue: deque[Event | events.Event], left: list[Action | effects.Effect]
    ) -> None:
        match action:
            case actions.JoinRun():
                if not self._joined:
                    self._joined = True
                    queue.append(events.Join())
            case actions.TellFailed(number, failure):
                queue.append(events.WorkersFailed(number, failure))
            case actions.TellStopped(number, failure):
                queue.append(events.WorkersStopped(number, failure))
            case actions.TellFinished(number):
                queue.append(events.WorkersFinished(number))
            case actions.TellLeaving(reason):
                queue.append(events.Leaving(reason))
            case actions.LeaveRun(reason):
                queue.append(events.Leave(reason))
            case _:
                left.append(action)

    def _route_effect(
        self, effect: effects.Effect, queue: deque[Event | events.Event], left: list[Action | effects.Effect]
    ) -> None:
        match effect:
            case effects.RunRound(assignment):
                queue.append(RoundStarts(assignment))
            case effects.StopRound(number, reason, by_deadline, is_ours):
                queue.append(RoundStops(number, reason, by_deadline, is_ours))
            case effects.EndRun(ending):
                queue.append(RunEnds(ending))
            case effects.Refuse(error):
                queue.append(RunRefused(error))
            case effects.Left():
                queue.append(HasLeft())
            case effects.Say(text):
                left.append(actions.Say(text))
            case effects.OpenMeeting() if not self._starter_lives:
                self._held_meeting = effect
            case _:
                left.append(effect)


_FOR_MEMBER = (
    events.Join,
    events.Answered,
    events.WatchHeard,
    events.TimerFired,
    events.PeerSaid,
    events.PeerGone,
    events.MeetingOpened,
    events.WorkersFailed,
    events.WorkersStopped,
    events.WorkersFinished,
    events.Leaving,
    events.Leave,
)
