"""The agent's decisions: a pure machine that takes an event and the time, and returns actions.

It does no I/O and reads no clock. What it may meet in which phase is `TRANSITIONS`, a table that the docs print;
`loop.py` performs what it returns.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dlaunch.errors import ExitCode
from dlaunch.outcome import Attempt, ExitStatus, Failure, FailureKind, Outcome, RunState, describe
from dlaunch.spec import RestartPolicy, StartMethod

from .actions import (
    Abandon,
    Action,
    CancelTimer,
    DestroyStarter,
    Finish,
    ForwardSignal,
    KillWorkers,
    Say,
    SetTimer,
    SignalWorkers,
    SpawnGroup,
    StartStarter,
    Sweep,
)
from .cause import WorkerEnd, count_victims, root_cause
from .events import (
    Begin,
    Event,
    SignalArrived,
    StarterLost,
    StarterReady,
    StarterRefused,
    StoreExited,
    Swept,
    Timer,
    TimerFired,
    WorkerExited,
    WorkerFailing,
    WorkerNotStarted,
    WorkerStarted,
)
from .restart import GiveUp, decide_restart

KILL_S = 5.0  # how long a killed worker may take to be reaped before everything is destroyed
SWEEP_S = 10.0  # how long the starter may take to answer a sweep, beyond the gentle part
IMPATIENT = (signal.SIGINT, signal.SIGQUIT)  # a second one of these kills at once


class Phase(Enum):
    """Where the agent stands."""

    IDLE = "idle"
    PREPARING = "preparing"  # the starter is not ready yet
    MEETING = "meeting"  # no worker lives; the nodes have not agreed on a round (several nodes only)
    RUNNING = "running"
    STOPPING = "stopping"  # workers were asked to end; some still live
    SWEEPING = "sweeping"  # all workers ended; what they left behind is being cleared
    WAITING = "waiting"  # the backoff before a restart
    LEAVING = "leaving"  # what the others have to know is being written (several nodes only)
    ENDED = "ended"


class Ending(Enum):
    """What the attempt is coming to."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"  # as the nodes have agreed, or because this node's lease ran out


class Settings(NamedTuple):
    """What the machine needs to know of the job."""

    local_world_size: int
    run_id: str
    node: str
    start_method: StartMethod
    restart: RestartPolicy
    grace_s: float
    ending_signals: tuple[int, ...]
    run_dir: str | None = None


@dataclass(slots=True)
class _Worker:
    """One worker of the current attempt."""

    rank: int
    started_at: float
    pid: int | None = None
    exited: WorkerExited | None = None
    not_started: str = ""
    failing: bool = False  # it ends by itself, with an exit code that is worth waiting for
    told_to_stop_at: float | None = None

    @property
    def lives(self) -> bool:
        return self.exited is None and not self.not_started


class Machine:
    """One run on one node."""

    def __init__(self, settings: Settings) -> None:
        self.phase = Phase.IDLE
        self._settings = settings
        self._method = settings.start_method
        self._attempts: list[Attempt] = []
        self._restarts: list[float] = []  # when each restart was decided
        self._workers: dict[int, _Worker] = {}
        self._started_at = 0.0
        self._attempt_started_at = 0.0
        self._ending: Ending | None = None
        self._infrastructure: Failure | None = None  # of a process of our own in this attempt
        self._interrupted_by: int | None = None
        self._starter_lives = False
        self._starters_lost_early = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about ``event``; an event that means nothing in this phase does nothing."""
        transition = self.transitions().get((self.phase, type(event)))
        return list(transition.perform(self, event, now)) if transition else []

    def transitions(self) -> Mapping[tuple[Phase, type], Transition]:
        """What may happen in which phase."""
        return TRANSITIONS

    # --- preparing -----------------------------------------------------------------------------------------------

    def _begin(self, event: Begin, now: float) -> Iterable[Action]:
        self._started_at = self._attempt_started_at = now
        return self._prepare()

    def _prepare(self) -> Iterable[Action]:
        self.phase = Phase.PREPARING
        return [StartStarter(self._method)]

    def _starter_ready(self, event: StarterReady, now: float) -> Iterable[Action]:
        self._starter_lives = True
        return self._spawn(now)

    def _starter_refused(self, event: StarterRefused, now: float) -> Iterable[Action]:
        if event.asked:
            self.phase = Phase.ENDED
            return [Abandon(event.reason, "Leave it out of --preload, or use --start-method exec.")]
        self._method = StartMethod.EXEC  # taken up when the starter's end is told
        return [Say(f"{event.reason} Workers are started with plain interpreters instead.")]

    def _starter_lost_before_ready(self, event: StarterLost, now: float) -> Iterable[Action]:
        self._starters_lost_early += 1
        if self._method is StartMethod.EXEC and self._starters_lost_early > 1:
            self._infrastructure = self._starter_failure(event, now)
            self._ending = Ending.FAILED
            return self._conclude(now)
        if self._method is StartMethod.WARM and self._starters_lost_early > 1:
            self._method = StartMethod.EXEC
            say = "the warm starter keeps ending before it is ready; starting workers with plain interpreters instead"
            return [Say(say), *self._prepare()]
        return self._prepare()

    def _spawn(self, now: float) -> Iterable[Action]:
        self.phase = Phase.RUNNING
        self._ending = None
        self._infrastructure = None
        self._attempt_started_at = now
        self._workers = {n: _Worker(rank=n, started_at=now) for n in range(self._settings.local_world_size)}
        return [SpawnGroup(self._attempt_number())]

    # --- running -------------------------------------------------------------------------------------------------

    def _worker_started(self, event: WorkerStarted, now: float) -> Iterable[Action]:
        worker = self._workers[event.local_rank]
        worker.pid, worker.started_at = event.pid, event.at
        return []

    def _worker_not_started(self, event: WorkerNotStarted, now: float) -> Iterable[Action]:
        self._workers[event.local_rank].not_started = event.error
        return self._stop(Ending.FAILED, signal.SIGTERM, now)

    def _worker_failing(self, event: WorkerFailing, now: float) -> Iterable[Action]:
        """The others are stopped before they learn of a lost peer the hard way."""
        self._workers[event.local_rank].failing = True
        return self._stop(Ending.FAILED, signal.SIGTERM, now)

    def _worker_exited(self, event: WorkerExited, now: float) -> Iterable[Action]:
        self._workers[event.local_rank].exited = event
        if not event.status.ok:
            return self._stop(Ending.FAILED, signal.SIGTERM, now)
        if not self._living():
            self._ending = Ending.SUCCEEDED
            return self._sweep(now)
        return []

    def _store_exited(self, event: StoreExited, now: float) -> Iterable[Action]:
        self._infrastructure = self._own_failure("the process that served the workers' store", event.status, event.at)
        return self._stop(Ending.FAILED, signal.SIGTERM, now)

    def _forward_or_stop(self, event: SignalArrived, now: float) -> Iterable[Action]:
        if event.signum not in self._settings.ending_signals:
            return [ForwardSignal(event.signum, self._living())]
        self._interrupted_by = event.signum
        return self._stop(Ending.INTERRUPTED, event.signum, now)

    def _starter_lost(self, event: StarterLost, now: float) -> Iterable[Action]:
        """Whatever the workers were doing, they are dead now, and so is all that they started."""
        self._starter_lives = False
        if self._ending is None:
            self._ending = Ending.FAILED
            self._infrastructure = self._starter_failure(event, now)
        return self._conclude(now)

    # --- stopping ------------------------------------------------------------------------------------------------

    def _stop(self, ending: Ending, signum: int, now: float) -> Iterable[Action]:
        self._ending = ending
        living = self._living()
        if not living:
            return self._sweep(now)
        self.phase = Phase.STOPPING
        told = tuple(n for n in living if not self._workers[n].failing)
        for local_rank in told:
            self._workers[local_rank].told_to_stop_at = now
        return [SignalWorkers(signum, told), SetTimer(Timer.GRACE, now + self._settings.grace_s)]

    def _straggler_exited(self, event: WorkerExited, now: float) -> Iterable[Action]:
        self._workers[event.local_rank].exited = event
        return [] if self._living() else [*_cancel(Timer.GRACE, Timer.KILL), *self._sweep(now)]

    def _straggler_not_started(self, event: WorkerNotStarted, now: float) -> Iterable[Action]:
        self._workers[event.local_rank].not_started = event.error
        return [] if self._living() else [*_cancel(Timer.GRACE, Timer.KILL), *self._sweep(now)]

    def _hurry(self, event: SignalArrived, now: float) -> Iterable[Action]:
        """A signal while workers are already being stopped."""
        if event.signum not in self._settings.ending_signals:
            return []
        repeated = self._ending is Ending.INTERRUPTED and event.signum in IMPATIENT
        self._interrupt(event.signum)
        return [CancelTimer(Timer.GRACE), *self._kill(now)] if repeated else []

    def _timer_while_stopping(self, event: TimerFired, now: float) -> Iterable[Action]:
        if event.name == Timer.GRACE:
            late = ", ".join(str(self._workers[n].rank) for n in self._living())
            return [Say(f"rank {late} did not stop within {self._settings.grace_s:g} s: killed"), *self._kill(now)]
        return [DestroyStarter()] if event.name == Timer.KILL else []

    def _kill(self, now: float) -> list[Action]:
        return [KillWorkers(self._living()), SetTimer(Timer.KILL, now + KILL_S)]

    def _interrupt(self, signum: int) -> None:
        self._ending = Ending.INTERRUPTED
        self._interrupted_by = self._interrupted_by or signum

    # --- sweeping ------------------------------------------------------------------------------------------------

    def _sweep(self, now: float) -> Iterable[Action]:
        self.phase = Phase.SWEEPING
        gentle_s = self._settings.grace_s if self._ending is Ending.SUCCEEDED else 0.0
        return [Sweep(gentle_s), SetTimer(Timer.SWEEP, now + gentle_s + SWEEP_S)]

    def _hurry_sweep(self, event: SignalArrived, now: float) -> Iterable[Action]:
        """The workers' verdict stands where all had succeeded; what they left behind is killed now."""
        if event.signum not in self._settings.ending_signals:
            return []
        if self._ending is not Ending.SUCCEEDED:
            self._interrupt(event.signum)
        return [Sweep(0.0), SetTimer(Timer.SWEEP, now + SWEEP_S)]

    def _timer_while_sweeping(self, event: TimerFired, now: float) -> Iterable[Action]:
        return [DestroyStarter()] if event.name == Timer.SWEEP else []

    def _swept(self, event: Swept, now: float) -> Iterable[Action]:
        said = [Say(_left_behind(event.killed))] if event.killed and self._ending is Ending.SUCCEEDED else []
        return [*said, *self._conclude(now)]

    # --- after an attempt ----------------------------------------------------------------------------------------

    def _conclude(self, now: float) -> Iterable[Action]:
        """The attempt is over and nothing of it is left: what next?"""
        attempt = self._close_attempt(now)
        cancelled = _cancel(Timer.GRACE, Timer.KILL, Timer.SWEEP)
        if self._ending is Ending.SUCCEEDED:
            return [*cancelled, self._finish(RunState.SUCCEEDED, ExitCode.OK, "all workers succeeded", now)]
        if self._ending is Ending.INTERRUPTED:
            return [*cancelled, self._finish_interrupted(now)]
        return [*cancelled, *self._restart_or_give_up(attempt, now)]

    def _close_attempt(self, now: float) -> Attempt:
        cause = self._blame()
        victims = count_victims(self._ends(), cause) if cause else 0
        shown = cause if self._ending is Ending.FAILED else None
        attempt = Attempt(self._attempt_number(), self._attempt_started_at, now, shown, victims if shown else 0)
        self._attempts.append(attempt)
        return attempt

    def _blame(self) -> Failure | None:
        """The root cause of this attempt, as far as its workers' ends are known."""
        cause = root_cause(self._ends(), attempt=self._attempt_number(), node=self._settings.node)
        if cause is None or (self._infrastructure and self._infrastructure.at < cause.at):
            return self._infrastructure
        return cause

    def _ends(self) -> list[WorkerEnd]:
        return [_end(local_rank, worker) for local_rank, worker in sorted(self._workers.items())]

    def _attempt_number(self) -> int:
        """Of the attempt that is under way."""
        return len(self._attempts)

    def _restart_or_give_up(self, attempt: Attempt, now: float) -> Iterable[Action]:
        cause = attempt.root_cause
        decision = decide_restart(self._settings.restart, self._attempts, self._restarts, now)
        if isinstance(decision, GiveUp):
            code = cause.exit_code if cause else ExitCode.INTERNAL
            return [self._finish(RunState.FAILED, code, decision.reason, now)]
        self._restarts.append(now)
        said = Say(self._restart_sentence(cause, decision.delay_s))
        if decision.delay_s > 0:
            self.phase = Phase.WAITING
            return [said, SetTimer(Timer.BACKOFF, now + decision.delay_s)]
        return [said, *self._again(now)]

    def _again(self, now: float) -> Iterable[Action]:
        self._starters_lost_early = 0
        return self._spawn(now) if self._starter_lives else self._prepare()

    def _backoff_over(self, event: TimerFired, now: float) -> Iterable[Action]:
        return self._again(now) if event.name == Timer.BACKOFF else []

    def _starter_lost_while_waiting(self, event: StarterLost, now: float) -> Iterable[Action]:
        self._starter_lives = False
        return []

    def _end_now(self, event: SignalArrived, now: float) -> Iterable[Action]:
        """A signal while no worker lives."""
        if event.signum not in self._settings.ending_signals:
            return []
        self._interrupt(event.signum)
        return [CancelTimer(Timer.BACKOFF), self._finish_interrupted(now)]

    # --- outcomes ------------------------------------------------------------------------------------------------

    def _finish_interrupted(self, now: float) -> Finish:
        signum = self._interrupted_by or signal.SIGTERM
        return self._finish(RunState.INTERRUPTED, 128 + signum, f"stopped by {_name(signum)}", now)

    def _finish(self, state: RunState, code: int, reason: str, now: float) -> Finish:
        self.phase = Phase.ENDED
        settings = self._settings
        return Finish(
            Outcome(
                state=state,
                exit_code=int(code),
                reason=reason,
                attempts=tuple(self._attempts),
                world_size=settings.local_world_size,
                restarts_used=len(self._restarts),
                max_restarts=settings.restart.max_restarts,
                run_id=settings.run_id,
                node=settings.node,
                started_at=self._started_at,
                ended_at=now,
                signal=self._interrupted_by if state is RunState.INTERRUPTED else None,
                run_dir=settings.run_dir,
            )
        )

    def _restart_sentence(self, cause: Failure | None, delay_s: float) -> str:
        used, allowed = len(self._restarts), self._settings.restart.max_restarts
        when = f" in {delay_s:g} s" if delay_s > 0 else ""
        group = "all workers" if self._settings.local_world_size > 1 else "it"
        what = describe(cause) if cause else "the attempt failed"
        budget = f"{used} of {allowed}" if self._settings.restart.window_s is None else f"number {used}"
        return f"{what}; restarting {group}{when} (restart {budget})"

    def _starter_failure(self, event: StarterLost, now: float) -> Failure:
        return self._own_failure("the parent process of the workers", event.status, now)

    def _own_failure(self, what: str, status: ExitStatus | None, at: float) -> Failure:
        lifetime_s = max(0.0, at - self._attempt_started_at)
        number, node = self._attempt_number(), self._settings.node
        kind = FailureKind.INFRASTRUCTURE
        return Failure(kind, number, None, None, node, None, status, at, lifetime_s, detail=f"{what} died")

    def _living(self) -> tuple[int, ...]:
        return tuple(n for n, worker in sorted(self._workers.items()) if worker.lives)


def _end(local_rank: int, worker: _Worker) -> WorkerEnd:
    return WorkerEnd(
        local_rank=local_rank,
        rank=worker.rank,
        pid=worker.pid,
        started_at=worker.started_at,
        exited=worker.exited,
        not_started=worker.not_started,
        told_to_stop_at=worker.told_to_stop_at,
    )


def _cancel(*names: str) -> list[Action]:
    return [CancelTimer(name) for name in names]


def _left_behind(killed: tuple[tuple[int, str], ...]) -> str:
    names = ", ".join(f"{name} (pid {pid})" for pid, name in killed[:3])
    more = f" and {len(killed) - 3} more" if len(killed) > 3 else ""
    return f"the workers succeeded but left processes behind, now ended: {names}{more}"


def _name(signum: int) -> str:
    return signal.Signals(signum).name


Handler = Callable[[Machine, "Event", float], "Iterable[Action]"]


class Transition(NamedTuple):
    """What happens at one event in one phase, and where it may lead."""

    perform: Handler
    leads_to: tuple[Phase, ...]


def to_phases(handler: object, *phases: Phase) -> Transition:
    """A row of the table."""
    return Transition(handler, phases)  # type: ignore[arg-type]  # each handler takes the one event of its row


_P = Phase
_AFTER = (_P.RUNNING, _P.PREPARING, _P.WAITING, _P.ENDED)  # an attempt is over
TRANSITIONS: dict[tuple[Phase, type], Transition] = {
    (_P.IDLE, Begin): to_phases(Machine._begin, _P.PREPARING),
    (_P.PREPARING, StarterReady): to_phases(Machine._starter_ready, _P.RUNNING),
    (_P.PREPARING, StarterRefused): to_phases(Machine._starter_refused, _P.PREPARING, _P.ENDED),
    (_P.PREPARING, StarterLost): to_phases(Machine._starter_lost_before_ready, _P.PREPARING, *_AFTER[2:]),
    (_P.PREPARING, SignalArrived): to_phases(Machine._end_now, _P.PREPARING, _P.ENDED),
    (_P.RUNNING, WorkerStarted): to_phases(Machine._worker_started, _P.RUNNING),
    (_P.RUNNING, WorkerNotStarted): to_phases(Machine._worker_not_started, _P.STOPPING, _P.SWEEPING),
    (_P.RUNNING, WorkerFailing): to_phases(Machine._worker_failing, _P.STOPPING),
    (_P.RUNNING, WorkerExited): to_phases(Machine._worker_exited, _P.RUNNING, _P.STOPPING, _P.SWEEPING),
    (_P.RUNNING, StoreExited): to_phases(Machine._store_exited, _P.STOPPING, _P.SWEEPING),
    (_P.RUNNING, SignalArrived): to_phases(Machine._forward_or_stop, _P.RUNNING, _P.STOPPING, _P.SWEEPING),
    (_P.RUNNING, StarterLost): to_phases(Machine._starter_lost, *_AFTER[1:]),
    (_P.STOPPING, WorkerStarted): to_phases(Machine._worker_started, _P.STOPPING),
    (_P.STOPPING, WorkerNotStarted): to_phases(Machine._straggler_not_started, _P.STOPPING, _P.SWEEPING),
    (_P.STOPPING, WorkerExited): to_phases(Machine._straggler_exited, _P.STOPPING, _P.SWEEPING),
    (_P.STOPPING, SignalArrived): to_phases(Machine._hurry, _P.STOPPING),
    (_P.STOPPING, TimerFired): to_phases(Machine._timer_while_stopping, _P.STOPPING),
    (_P.STOPPING, StarterLost): to_phases(Machine._starter_lost, *_AFTER[1:]),
    (_P.SWEEPING, Swept): to_phases(Machine._swept, *_AFTER),
    (_P.SWEEPING, SignalArrived): to_phases(Machine._hurry_sweep, _P.SWEEPING),
    (_P.SWEEPING, TimerFired): to_phases(Machine._timer_while_sweeping, _P.SWEEPING),
    (_P.SWEEPING, StarterLost): to_phases(Machine._starter_lost, *_AFTER[1:]),
    (_P.WAITING, TimerFired): to_phases(Machine._backoff_over, _P.WAITING, _P.RUNNING, _P.PREPARING),
    (_P.WAITING, StarterLost): to_phases(Machine._starter_lost_while_waiting, _P.WAITING),
    (_P.WAITING, SignalArrived): to_phases(Machine._end_now, _P.WAITING, _P.ENDED),
}


def transition_table(table: Mapping[tuple[Phase, type], Transition] = TRANSITIONS) -> str:
    """The table as Markdown: what the docs show."""
    lines = ["| phase | event | may lead to |", "|---|---|---|"]
    for (phase, event), transition in table.items():
        phases = ", ".join(sorted({p.value for p in transition.leads_to}))
        lines.append(f"| {phase.value} | {event.__name__} | {phases} |")
    return "\n".join(lines)
