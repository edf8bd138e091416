"""Scenarios over the pure machine: events and times in, actions out. No process, no clock, no sleep."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from dlaunch.agent.actions import (
    Abandon,
    Action,
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
from dlaunch.agent.events import (
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
from dlaunch.agent.machine import KILL_S, TRANSITIONS, Machine, Phase, Settings
from dlaunch.outcome import ExceptionInfo, ExitStatus, FailureKind, Outcome, RunState
from dlaunch.spec import RestartPolicy, StartMethod

OK = ExitStatus(code=0)
KILLED = ExitStatus(signal=signal.SIGKILL)
TERMINATED = ExitStatus(signal=signal.SIGTERM)


class Story:
    """A machine and its clock: each step returns the actions of one event."""

    def __init__(self, workers: int = 2, method: StartMethod = StartMethod.WARM, **policy: float | bool) -> None:
        restart = RestartPolicy(**policy)  # type: ignore[arg-type]
        ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        self.machine = Machine(Settings(workers, "run", "host", method, restart, 30.0, ending))
        self.now = 100.0
        self.workers = workers
        self.actions: list[Action] = []

    def step(self, *events: Event, after: float = 0.01) -> list[Action]:
        self.actions = []
        for event in events:
            self.now += after
            self.actions += self.machine.handle(event, self.now)
        return self.actions

    def running(self) -> Story:
        self.step(Begin(), StarterReady(50))
        self.started()
        return self

    def started(self) -> None:
        self.step(*(WorkerStarted(n, 1000 + n, self.now) for n in range(self.workers)))

    def exited(self, local_rank: int, status: ExitStatus = OK, **details: object) -> list[Action]:
        return self.step(WorkerExited(local_rank, status, self.now, **details))  # type: ignore[arg-type]

    @property
    def outcome(self) -> Outcome:
        return next(action.outcome for action in self.actions if isinstance(action, Finish))


def kinds(actions: Sequence[Action]) -> list[str]:
    """The names of the actions that do something to the world."""
    return [type(a).__name__ for a in actions if type(a).__name__ not in {"CancelTimer", "SetTimer", "Say"}]


def test_a_run_starts_a_starter_and_spawns_when_it_is_ready() -> None:
    story = Story()
    assert story.step(Begin()) == [StartStarter(StartMethod.WARM)]
    assert story.step(StarterReady(50)) == [SpawnGroup(0)]


def test_the_run_succeeds_when_every_worker_has_and_nothing_is_left() -> None:
    story = Story().running()
    assert story.exited(1) == []
    assert kinds(story.exited(0)) == ["Sweep"]
    story.step(Swept())
    assert story.outcome.state is RunState.SUCCEEDED
    assert story.outcome.exit_code == 0


def test_a_sweep_after_success_is_gentle_and_says_what_it_ended() -> None:
    story = Story().running()
    story.exited(0)
    assert Sweep(30.0) in story.exited(1)
    actions = story.step(Swept(((77, "daemon"),)))
    assert [a.text for a in actions if isinstance(a, Say)] == [
        "the workers succeeded but left processes behind, now ended: daemon (pid 77)"
    ]


def test_a_failure_stops_the_others_and_restarts_all_while_the_budget_lasts() -> None:
    story = Story(max_restarts=1).running()
    actions = story.exited(1, KILLED)
    assert SignalWorkers(signal.SIGTERM, (0,)) in actions
    assert kinds(story.exited(0, TERMINATED)) == ["Sweep"]
    actions = story.step(Swept())
    assert kinds(actions) == ["SpawnGroup"]
    said = [a.text for a in actions if isinstance(a, Say)]
    assert said == [
        "rank 1 (pid 1001) ended with signal 9 (SIGKILL); restarting all workers (restart 1 of 1)",
    ]


def test_the_last_failure_ends_the_run_with_the_workers_own_exit_code() -> None:
    story = Story().running()
    story.exited(0, ExitStatus(code=42), finalized=True)
    story.exited(1, TERMINATED)
    story.step(Swept())
    outcome = story.outcome
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, 42)
    assert outcome.root_cause is not None
    assert (outcome.root_cause.rank, outcome.root_cause.kind) == (0, FailureKind.EXIT)
    assert outcome.attempts[-1].victims == 1


def test_a_signal_death_becomes_128_plus_its_number() -> None:
    story = Story(workers=1).running()
    story.exited(0, ExitStatus(signal=signal.SIGSEGV))
    story.step(Swept())
    assert story.outcome.exit_code == 139


def test_the_root_cause_is_the_first_exception_not_the_first_to_be_reaped() -> None:
    """A victim of a lost peer may be reaped before the culprit, whose interpreter takes longer to end."""
    story = Story().running()
    culprit = ExceptionInfo("ValueError", "culprit")
    victim = ExceptionInfo("RuntimeError", "Connection closed by peer")
    at = story.now
    story.exited(0, ExitStatus(code=1), exception=victim, failed_at=at + 0.002)
    story.exited(1, TERMINATED, exception=culprit, failed_at=at + 0.001)
    story.step(Swept())
    assert story.outcome.root_cause is not None
    assert story.outcome.root_cause.exception == culprit


def test_a_worker_that_was_ending_well_when_it_was_told_to_stop_is_a_victim() -> None:
    """It had begun its normal end before the other's crash was seen; our own signal then caught it half-way."""
    story = Story().running()
    ending_at = story.now
    story.exited(0, ExitStatus(signal=signal.SIGABRT))
    story.exited(1, TERMINATED, failed_at=ending_at, finalized=True)
    story.step(Swept())
    assert story.outcome.root_cause is not None
    assert story.outcome.root_cause.rank == 0


def test_the_others_are_stopped_as_soon_as_one_says_that_it_is_failing() -> None:
    """And the failing one is left to end by itself: its exit code is the job's."""
    story = Story().running()
    assert SignalWorkers(signal.SIGTERM, (1,)) in story.step(WorkerFailing(0))
    story.exited(1, TERMINATED)
    story.exited(0, ExitStatus(code=1), exception=ExceptionInfo("ValueError", "no"), failed_at=story.now)
    story.step(Swept())
    assert (story.outcome.exit_code, story.outcome.attempts[-1].victims) == (1, 1)


def test_a_failing_worker_that_never_ends_is_killed_after_the_grace() -> None:
    story = Story(workers=1).running()
    story.step(WorkerFailing(0))
    assert KillWorkers((0,)) in story.step(TimerFired(Timer.GRACE))


def test_a_worker_that_fails_because_it_was_told_to_stop_is_a_victim() -> None:
    story = Story().running()
    story.exited(0, KILLED)
    story.exited(1, ExitStatus(code=1), exception=ExceptionInfo("KeyboardInterrupt", ""), failed_at=story.now + 5)
    story.step(Swept())
    assert story.outcome.root_cause is not None
    assert story.outcome.root_cause.rank == 0


def test_a_worker_that_does_not_stop_is_killed_after_the_grace_and_then_destroyed() -> None:
    story = Story().running()
    actions = story.exited(0, KILLED)
    assert SetTimer(Timer.GRACE, story.now + 30.0) in actions
    actions = story.step(TimerFired(Timer.GRACE), after=30.0)
    assert KillWorkers((1,)) in actions
    assert SetTimer(Timer.KILL, story.now + KILL_S) in actions
    assert story.step(TimerFired(Timer.KILL), after=KILL_S) == [DestroyStarter()]
    story.step(StarterLost(None))
    assert story.outcome.exit_code == 137


def test_a_signal_reaches_the_workers_as_it_came_and_ends_the_run_with_its_code() -> None:
    story = Story(max_restarts=5).running()
    assert SignalWorkers(signal.SIGHUP, (0, 1)) in story.step(SignalArrived(signal.SIGHUP))
    story.exited(0, OK)
    story.exited(1, ExitStatus(signal=signal.SIGHUP))
    story.step(Swept())
    assert (story.outcome.state, story.outcome.exit_code) == (RunState.INTERRUPTED, 129)
    assert story.outcome.root_cause is None


def test_a_second_interrupt_kills_at_once() -> None:
    story = Story().running()
    story.step(SignalArrived(signal.SIGINT))
    assert KillWorkers((0, 1)) in story.step(SignalArrived(signal.SIGINT))


def test_a_second_termination_does_not_cut_the_grace_short() -> None:
    story = Story().running()
    story.step(SignalArrived(signal.SIGTERM))
    assert story.step(SignalArrived(signal.SIGTERM)) == []


def test_a_user_signal_is_forwarded_and_ends_nothing() -> None:
    story = Story().running()
    assert story.step(SignalArrived(signal.SIGUSR1)) == [ForwardSignal(signal.SIGUSR1, (0, 1))]
    assert story.machine.phase is Phase.RUNNING


def test_an_interrupt_during_a_failing_stop_prevents_the_restart() -> None:
    story = Story(max_restarts=5).running()
    story.exited(0, KILLED)
    story.step(SignalArrived(signal.SIGINT))
    story.exited(1, TERMINATED)
    story.step(Swept())
    assert (story.outcome.state, story.outcome.exit_code) == (RunState.INTERRUPTED, 130)


def test_an_interrupt_after_success_only_hurries_the_sweep() -> None:
    story = Story(workers=1).running()
    story.exited(0)
    assert Sweep(0.0) in story.step(SignalArrived(signal.SIGINT))
    story.step(Swept())
    assert story.outcome.state is RunState.SUCCEEDED


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.WAITING])
def test_a_signal_while_no_worker_lives_ends_the_run_at_once(phase: Phase) -> None:
    story = Story(workers=1, max_restarts=1, backoff_s=5)
    if phase is Phase.PREPARING:
        story.step(Begin())
    else:
        story.running()
        story.exited(0, KILLED)
        story.step(Swept())
    assert story.machine.phase is phase
    story.step(SignalArrived(signal.SIGTERM))
    assert story.outcome.exit_code == 143


def test_a_restart_waits_for_its_backoff() -> None:
    story = Story(workers=1, max_restarts=1, backoff_s=5).running()
    story.exited(0, KILLED)
    assert SetTimer(Timer.BACKOFF, story.now + 5.01) in story.step(Swept())
    assert story.step(TimerFired(Timer.BACKOFF)) == [SpawnGroup(1)]


def test_a_starter_that_dies_takes_the_attempt_with_it_and_a_new_one_is_started() -> None:
    story = Story(max_restarts=1).running()
    actions = story.step(StarterLost(KILLED))
    assert kinds(actions) == ["StartStarter"]
    story.step(StarterReady(51))
    assert story.actions == [SpawnGroup(1)]
    story.step(StarterLost(KILLED))
    outcome = story.outcome
    assert outcome.exit_code == 137
    assert outcome.root_cause is not None
    assert outcome.root_cause.kind is FailureKind.INFRASTRUCTURE


def test_a_starter_that_dies_during_the_backoff_is_replaced_when_it_is_over() -> None:
    story = Story(workers=1, max_restarts=1, backoff_s=5).running()
    story.exited(0, KILLED)
    story.step(Swept())
    assert story.step(StarterLost(KILLED)) == []
    assert story.step(TimerFired(Timer.BACKOFF)) == [StartStarter(StartMethod.WARM)]


def test_the_death_of_the_workers_store_stops_and_restarts_the_group() -> None:
    story = Story(max_restarts=1).running()
    assert SignalWorkers(signal.SIGTERM, (0, 1)) in story.step(StoreExited(KILLED, story.now))
    story.exited(0, TERMINATED)
    story.exited(1, TERMINATED)
    assert kinds(story.step(Swept())) == ["SpawnGroup"]


def test_a_module_the_user_asked_for_that_cannot_be_forked_over_is_a_configuration_error() -> None:
    story = Story()
    story.step(Begin())
    (action,) = story.step(StarterRefused("mymod starts a thread.", asked=True))
    assert isinstance(action, Abandon)
    assert "--preload" in action.fix


def test_a_starter_that_refuses_of_itself_is_replaced_by_plain_interpreters() -> None:
    story = Story()
    story.step(Begin())
    assert kinds(story.step(StarterRefused("torch initialised CUDA.", asked=False))) == []
    assert story.step(StarterLost(OK)) == [StartStarter(StartMethod.EXEC)]


def test_a_warm_starter_that_never_becomes_ready_gives_way_to_plain_interpreters() -> None:
    story = Story()
    story.step(Begin())
    assert story.step(StarterLost(KILLED)) == [StartStarter(StartMethod.WARM)]
    assert StartStarter(StartMethod.EXEC) in story.step(StarterLost(KILLED))


def test_a_starter_that_can_never_start_fails_the_run_rather_than_loop() -> None:
    story = Story(method=StartMethod.EXEC)
    story.step(Begin())
    story.step(StarterLost(KILLED))
    story.step(StarterLost(KILLED))
    assert story.outcome.state is RunState.FAILED
    assert story.outcome.root_cause is not None


def test_a_program_that_cannot_be_executed_ends_the_run() -> None:
    story = Story(method=StartMethod.EXEC).running()
    story.step(WorkerNotStarted(0, "./tool: Permission denied", story.now))
    story.exited(1, TERMINATED)
    story.step(Swept())
    assert story.outcome.root_cause is not None
    assert story.outcome.root_cause.kind is FailureKind.NOT_STARTED


def test_an_event_that_means_nothing_in_a_phase_does_nothing() -> None:
    story = Story()
    assert story.step(Swept(), TimerFired(Timer.GRACE), StarterReady(1)) == []
    assert story.machine.phase is Phase.IDLE


def test_every_transition_leads_only_where_the_table_says() -> None:
    """Drive the machine with every event in every phase that a short history can reach."""
    events: list[Event] = [
        Begin(),
        StarterReady(50),
        StarterRefused("no.", asked=False),
        StarterLost(KILLED),
        WorkerStarted(0, 1000, 100.0),
        WorkerNotStarted(0, "no", 100.0),
        WorkerFailing(0),
        WorkerExited(0, OK, 100.0),
        WorkerExited(0, KILLED, 100.0),
        StoreExited(KILLED, 100.0),
        Swept(),
        SignalArrived(signal.SIGTERM),
        SignalArrived(signal.SIGINT),
        SignalArrived(signal.SIGUSR2),
        TimerFired(Timer.GRACE),
        TimerFired(Timer.KILL),
        TimerFired(Timer.SWEEP),
        TimerFired(Timer.BACKOFF),
    ]
    seen: set[tuple[Phase, type]] = set()

    def walk(history: tuple[Event, ...], depth: int) -> None:
        for event in events:
            story = Story(workers=1, max_restarts=2, backoff_s=1 if len(history) % 2 else 0)
            story.step(*history)
            before = story.machine.phase
            story.step(event)
            transition = TRANSITIONS.get((before, type(event)))
            if transition is None:
                assert story.machine.phase is before
                continue
            seen.add((before, type(event)))
            assert story.machine.phase in transition.leads_to, (history, event)
            if depth > 1:
                walk((*history, event), depth - 1)

    walk((), 5)
    assert seen == set(TRANSITIONS)
