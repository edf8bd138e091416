"""The agent's decisions in a run of several nodes: when to start and stop workers is agreed, not decided here.

A `Machine` whose attempts are rounds: it starts one when it is told to, tells the others how it went, and ends when the
run does. What it shares with a run on one node, the life of one group of workers, is in machine.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from dlaunch.errors import DlaunchError
from dlaunch.outcome import Attempt, ExceptionInfo, Failure, FailureKind, Outcome
from dlaunch.rendezvous.values import Assignment, Ending
from dlaunch.spec import StartMethod

from .actions import (
    Action,
    CancelTimer,
    Finish,
    GiveUp,
    JoinRun,
    KillWorkers,
    LeaveRun,
    SetTimer,
    SignalWorkers,
    SpawnGroup,
    TellFailed,
    TellFinished,
    TellLeaving,
    TellStopped,
)
from .events import (
    HasLeft,
    RoundStarts,
    RoundStops,
    RunEnds,
    RunRefused,
    SignalArrived,
    StarterLost,
    StarterOverdue,
    StarterReady,
    StoreExited,
    Swept,
    Timer,
    TimerFired,
    WorkerExited,
    WorkerFailing,
    WorkerNotStarted,
)
from .machine import (
    KILL_S,
    TRANSITIONS,
    Machine,
    Phase,
    Settings,
    Transition,
    to_phases,
)
from .machine import Ending as Attempted

VICTIM_S = 0.03  # an exception may come of a peer's end that its own node is about to tell: let that be first
STARTER_LATE_S = 1.0  # how long after the deadline a starter may take to have killed its workers
UNTOLD = ExceptionInfo("Exception", "")  # until the worker that raises it has ended


class NodeMachine(Machine):
    """One run on one of several nodes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._assignment: Assignment | None = None  # of the round whose workers live here, or are to start
        self._joined = False
        self._told_failed = False
        self._world_size = 0
        self._error: DlaunchError | None = None

    def transitions(self) -> Mapping[tuple[Phase, type], Transition]:
        """What may happen in which phase, with several nodes."""
        return NODE_TRANSITIONS

    # --- between rounds ------------------------------------------------------------------------------------------

    def _starter_is_ready(self, event: StarterReady, now: float) -> Iterable[Action]:
        self._starter_lives, self._starters_lost_early = True, 0
        if self._assignment is not None:
            return self._spawn(now)
        self.phase = Phase.MEETING
        self._joined = True
        return [JoinRun()]

    def _round_starts(self, event: RoundStarts, now: float) -> Iterable[Action]:
        self._assignment = event.assignment
        self._world_size = event.assignment.world_size
        self._told_failed = False
        return self._spawn(now) if self.phase is Phase.MEETING else []

    def _spawn(self, now: float) -> Iterable[Action]:
        assignment = self._assignment
        assert assignment
        list(super()._spawn(now))
        for local_rank, worker in self._workers.items():
            worker.rank = assignment.base_rank + local_rank
        return [SpawnGroup(self._attempt_number(), assignment)]

    def _round_stops_before_it_starts(self, event: RoundStops, now: float) -> Iterable[Action]:
        if self._assignment is None or event.round != self._assignment.round:
            return []
        self._assignment = None
        return [TellStopped(event.round, None)]

    def _starter_lost_while_meeting(self, event: StarterLost, now: float) -> Iterable[Action]:
        self._starter_lives = False
        return self._prepare()

    # --- in a round ----------------------------------------------------------------------------------------------

    def _worker_is_failing(self, event: WorkerFailing, now: float) -> Iterable[Action]:
        return [*self._worker_failing(event, now), SetTimer(Timer.TELL, now + VICTIM_S)]

    def _time_to_tell(self, event: TimerFired, now: float) -> Iterable[Action]:
        if event.name == Timer.TELL:
            return self._tell_failed(now)
        return self._timer_while_stopping(event, now)

    def _time_to_tell_while_sweeping(self, event: TimerFired, now: float) -> Iterable[Action]:
        if event.name == Timer.TELL:
            return self._tell_failed(now)
        return self._timer_while_sweeping(event, now)

    def _worker_has_exited(self, event: WorkerExited, now: float) -> Iterable[Action]:
        actions = list(self._worker_exited(event, now))
        return actions if event.status.ok else [*self._tell_failed(now), *actions]

    def _worker_was_not_started(self, event: WorkerNotStarted, now: float) -> Iterable[Action]:
        actions = list(self._worker_not_started(event, now))
        return [*self._tell_failed(now), *actions]

    def _store_has_exited(self, event: StoreExited, now: float) -> Iterable[Action]:
        actions = list(self._store_exited(event, now))
        return [*self._tell_failed(now), *actions]

    def _round_stops(self, event: RoundStops, now: float) -> Iterable[Action]:
        if self._assignment is None or event.round != self._assignment.round:
            return []
        actions = list(self._stop(Attempted.STOPPED, signal.SIGTERM, now))
        return [*actions, *self._kill_by_deadline(now)] if event.by_deadline and self._living() else actions

    def _round_stops_while_stopping(self, event: RoundStops, now: float) -> Iterable[Action]:
        if event.by_deadline:
            return self._kill_by_deadline(now)
        return [] if event.is_ours else self._hurry_victims(now)

    def _hurry_victims(self, now: float) -> list[Action]:
        """The failure that counts is elsewhere: how a failing worker of ours would have ended is of no interest."""
        victims = tuple(n for n in self._living() if self._workers[n].told_to_stop_at is None)
        for local_rank in victims:
            self._workers[local_rank].told_to_stop_at = now
        return [SignalWorkers(signal.SIGTERM, victims)] if victims else []

    def _kill_by_deadline(self, now: float) -> list[Action]:
        """The starter does this by itself; one that is stopped or hangs is destroyed."""
        kill = KillWorkers(self._living())
        return [CancelTimer(Timer.GRACE), kill, SetTimer(Timer.KILL, now + STARTER_LATE_S)]

    def _overdue(self, event: StarterOverdue, now: float) -> Iterable[Action]:
        """The deaths that follow are nobody's failure."""
        for local_rank in self._living():
            self._workers[local_rank].told_to_stop_at = now
        if self._ending is None:
            self._ending = Attempted.STOPPED
        self.phase = Phase.STOPPING
        if not self._living():
            return [CancelTimer(Timer.GRACE), *self._sweep(now)]
        return [CancelTimer(Timer.GRACE), SetTimer(Timer.KILL, now + KILL_S)]

    def _signal_in_a_round(self, event: SignalArrived, now: float) -> Iterable[Action]:
        actions = list(self._forward_or_stop(event, now))
        if self._ending is not Attempted.INTERRUPTED:
            return actions
        return [TellLeaving(self._leaving_because()), *actions]

    def _refused_in_a_round(self, event: RunRefused, now: float) -> Iterable[Action]:
        self._error = event.error
        return self._stop(Attempted.STOPPED, signal.SIGTERM, now) if self.phase is Phase.RUNNING else []

    def _tell_failed(self, now: float) -> Iterable[Action]:
        """Once a round, with what is known by now; the details follow when all have stopped."""
        if self._told_failed or self._assignment is None or self._ending is not Attempted.FAILED:
            return []
        self._told_failed = True
        failure = self._blame()
        if failure is None:
            failing = next((worker for worker in self._workers.values() if worker.failing), None)
            if failing is None:
                return []
            lifetime_s = max(0.0, now - failing.started_at)
            failure = Failure(
                FailureKind.EXCEPTION,
                self._attempt_number(),
                failing.rank,
                failing.rank - self._assignment.base_rank,
                self._settings.node,
                failing.pid,
                None,
                now,
                lifetime_s,
                exception=UNTOLD,
            )
        return [TellFailed(self._assignment.round, failure)]

    # --- after a round -------------------------------------------------------------------------------------------

    def _conclude(self, now: float) -> Iterable[Action]:
        """Nothing of the round is left here: tell, and wait for what the nodes agree on next."""
        attempt, ending, assignment = self._close_attempt(now), self._ending, self._assignment
        self._ending = None
        self._assignment = None
        actions: list[Action] = [CancelTimer(name) for name in (Timer.GRACE, Timer.KILL, Timer.SWEEP, Timer.TELL)]
        if assignment is not None:
            finished = ending is Attempted.SUCCEEDED
            told = TellFinished(assignment.round) if finished else TellStopped(assignment.round, attempt.root_cause)
            actions.append(told)
        if self._method is StartMethod.EXEC and self._starters_lost_early > 1:
            self._error = DlaunchError("No worker can be started here: their parent process ends at once.")
        if self._error is not None or ending is Attempted.INTERRUPTED:
            return [*actions, *self._leave(now)]
        if not self._starter_lives:
            return [*actions, *self._prepare()]
        self.phase = Phase.MEETING
        return actions

    def _attempt_number(self) -> int:
        """Rounds are counted for all nodes alike, so that their logs can be laid side by side."""
        return self._assignment.round - 1 if self._assignment else len(self._attempts)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _signal_between_rounds(self, event: SignalArrived, now: float) -> Iterable[Action]:
        if event.signum not in self._settings.ending_signals:
            return []
        self._interrupted_by = event.signum
        told = [] if self._assignment is None else [TellStopped(self._assignment.round, None)]
        self._assignment = None
        return [TellLeaving(self._leaving_because()), *told, *self._leave(now)]

    def _refused_between_rounds(self, event: RunRefused, now: float) -> Iterable[Action]:
        self._error = event.error
        return self._leave(now)

    def _leave(self, now: float) -> Iterable[Action]:
        if not self._joined:
            return self._gone(HasLeft(), now)
        self.phase = Phase.LEAVING
        return [LeaveRun(str(self._error) if self._error else self._leaving_because())]

    def _gone(self, event: HasLeft, now: float) -> Iterable[Action]:
        if self._error is not None:
            self.phase = Phase.ENDED
            return [GiveUp(self._error)]
        return [self._finish_interrupted(now)]

    def _signal_while_leaving(self, event: SignalArrived, now: float) -> Iterable[Action]:
        if event.signum not in self._settings.ending_signals:
            return []
        return self._gone(HasLeft(), now)

    def _run_ends(self, event: RunEnds, now: float) -> Iterable[Action]:
        return [self._finish_as(event.ending, now)]

    def _finish_as(self, ending: Ending, now: float) -> Finish:
        if ending.failure is not None:
            self._blame_in_last_attempt(ending.failure, now)
        finish = self._finish(ending.state, ending.exit_code, ending.reason, now)
        return Finish(self._of_many(finish.outcome)._replace(restarts_used=ending.restarts_used))

    def _blame_in_last_attempt(self, failure: Failure, now: float) -> None:
        """The root cause of the last round, wherever it was."""
        victims = max(0, self._world_size - 1)
        if self._attempts:
            self._attempts[-1] = self._attempts[-1]._replace(root_cause=failure, victims=victims)
        else:
            self._attempts.append(Attempt(failure.attempt, self._started_at, now, failure, victims))

    def _finish_interrupted(self, now: float) -> Finish:
        if self._interrupted_by is None:
            self._interrupted_by = signal.SIGTERM
        return super()._finish_interrupted(now)  # of this node's own workers: the run goes on elsewhere

    def _of_many(self, outcome: Outcome) -> Outcome:
        return outcome._replace(world_size=self._world_size or outcome.world_size)

    def _leaving_because(self) -> str:
        return f"it was sent {signal.Signals(self._interrupted_by or signal.SIGTERM).name}"


_P = Phase
_AFTER = (_P.MEETING, _P.PREPARING, _P.LEAVING, _P.ENDED)  # a round is over
_STOPS = (_P.STOPPING, _P.SWEEPING)
_M = NodeMachine
NODE_TRANSITIONS: dict[tuple[Phase, type], Transition] = {
    **{key: transition for key, transition in TRANSITIONS.items() if key[0] is not _P.WAITING},
    (_P.PREPARING, StarterReady): to_phases(_M._starter_is_ready, _P.MEETING, _P.RUNNING),
    (_P.PREPARING, StarterLost): to_phases(_M._starter_lost_before_ready, _P.PREPARING, _P.LEAVING, _P.ENDED),
    (_P.PREPARING, RoundStarts): to_phases(_M._round_starts, _P.PREPARING),
    (_P.PREPARING, RoundStops): to_phases(_M._round_stops_before_it_starts, _P.PREPARING),
    (_P.PREPARING, SignalArrived): to_phases(_M._signal_between_rounds, _P.PREPARING, _P.LEAVING, _P.ENDED),
    (_P.PREPARING, RunRefused): to_phases(_M._refused_between_rounds, _P.LEAVING),
    (_P.PREPARING, RunEnds): to_phases(_M._run_ends, _P.ENDED),
    (_P.MEETING, RoundStarts): to_phases(_M._round_starts, _P.RUNNING),
    (_P.MEETING, StarterLost): to_phases(_M._starter_lost_while_meeting, _P.PREPARING),
    (_P.MEETING, SignalArrived): to_phases(_M._signal_between_rounds, _P.MEETING, _P.LEAVING),
    (_P.MEETING, RunRefused): to_phases(_M._refused_between_rounds, _P.LEAVING),
    (_P.MEETING, RunEnds): to_phases(_M._run_ends, _P.ENDED),
    (_P.RUNNING, WorkerNotStarted): to_phases(_M._worker_was_not_started, *_STOPS),
    (_P.RUNNING, WorkerFailing): to_phases(_M._worker_is_failing, *_STOPS),
    (_P.RUNNING, WorkerExited): to_phases(_M._worker_has_exited, _P.RUNNING, *_STOPS),
    (_P.RUNNING, StoreExited): to_phases(_M._store_has_exited, *_STOPS),
    (_P.RUNNING, StarterOverdue): to_phases(_M._overdue, *_STOPS),
    (_P.RUNNING, RoundStops): to_phases(_M._round_stops, _P.RUNNING, *_STOPS),
    (_P.RUNNING, RunRefused): to_phases(_M._refused_in_a_round, *_STOPS),
    (_P.RUNNING, SignalArrived): to_phases(_M._signal_in_a_round, _P.RUNNING, *_STOPS),
    (_P.RUNNING, StarterLost): to_phases(_M._starter_lost, *_AFTER),
    (_P.STOPPING, StarterOverdue): to_phases(_M._overdue, *_STOPS),
    (_P.STOPPING, RoundStops): to_phases(_M._round_stops_while_stopping, _P.STOPPING),
    (_P.STOPPING, RunRefused): to_phases(_M._refused_in_a_round, _P.STOPPING),
    (_P.STOPPING, TimerFired): to_phases(_M._time_to_tell, _P.STOPPING),
    (_P.STOPPING, StarterLost): to_phases(_M._starter_lost, *_AFTER),
    (_P.SWEEPING, TimerFired): to_phases(_M._time_to_tell_while_sweeping, _P.SWEEPING),
    (_P.SWEEPING, Swept): to_phases(_M._swept, *_AFTER),
    (_P.SWEEPING, RunRefused): to_phases(_M._refused_in_a_round, _P.SWEEPING),
    (_P.SWEEPING, StarterLost): to_phases(_M._starter_lost, *_AFTER),
    (_P.LEAVING, HasLeft): to_phases(_M._gone, _P.ENDED),
    (_P.LEAVING, SignalArrived): to_phases(_M._signal_while_leaving, _P.LEAVING, _P.ENDED),
}
