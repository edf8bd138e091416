"""Scenarios over the machine of a node among several: rounds come and go, and what happens here is told."""

from __future__ import annotations

import signal

import pytest

from dlaunch.agent.actions import (
    Action,
    Finish,
    GiveUp,
    JoinRun,
    KillWorkers,
    LeaveRun,
    SetTimer,
    SignalWorkers,
    SpawnGroup,
    StartStarter,
    TellFailed,
    TellFinished,
    TellLeaving,
    TellStopped,
)
from dlaunch.agent.events import (
    Begin,
    Event,
    HasLeft,
    RoundStarts,
    RoundStops,
    RunEnds,
    RunRefused,
    SignalArrived,
    StarterLost,
    StarterOverdue,
    StarterReady,
    Swept,
    Timer,
    TimerFired,
    WorkerExited,
    WorkerFailing,
    WorkerStarted,
)
from dlaunch.agent.machine import Phase, Settings
from dlaunch.agent.node_machine import NODE_TRANSITIONS, VICTIM_S, NodeMachine
from dlaunch.errors import ConfigurationError
from dlaunch.outcome import ExceptionInfo, ExitStatus, Failure, FailureKind, Outcome, RunState
from dlaunch.rendezvous.values import Assignment, Ending, Peer
from dlaunch.spec import RestartPolicy, StartMethod

OK = ExitStatus(code=0)
KILLED = ExitStatus(signal=signal.SIGKILL)
TERMINATED = ExitStatus(signal=signal.SIGTERM)
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def assignment(number: int = 1, **other: object) -> Assignment:
    """The second of two nodes, with two workers each."""
    place = Assignment(number, 0, 1, 2, 2, 4, 2, 2, 4, "10.0.0.1", 4000, True, Peer("a", "10.0.0.1:1"), Peer("a", ""))
    return place._replace(**other)  # type: ignore[arg-type]


class Story:
    """A machine and its clock: each step returns the actions of its events."""

    def __init__(self) -> None:
        settings = Settings(2, "run", "b", StartMethod.WARM, RestartPolicy(), 30.0, ENDING_SIGNALS)
        self.machine = NodeMachine(settings)
        self.now = 100.0
        self.actions: list[Action] = []

    def step(self, *events: Event) -> list[Action]:
        self.actions = []
        for event in events:
            self.now += 0.01
            row = NODE_TRANSITIONS.get((self.machine.phase, type(event)))
            allowed = row.leads_to if row else (self.machine.phase,)
            self.actions += self.machine.handle(event, self.now)
            assert self.machine.phase in allowed, f"the table does not show that {event} leads here"
        return self.actions

    def meeting(self) -> Story:
        self.step(Begin(), StarterReady(50))
        return self

    def running(self, number: int = 1) -> Story:
        self.meeting()
        self.step(RoundStarts(assignment(number)), *(WorkerStarted(n, 1000 + n, self.now) for n in range(2)))
        return self

    def exited(self, local_rank: int, status: ExitStatus = OK, **details: object) -> list[Action]:
        return self.step(WorkerExited(local_rank, status, self.now, **details))  # type: ignore[arg-type]

    @property
    def outcome(self) -> Outcome:
        return next(action.outcome for action in self.actions if isinstance(action, Finish))


def told(actions: list[Action]) -> list[Action]:
    kinds = (JoinRun, TellFailed, TellStopped, TellFinished, TellLeaving, LeaveRun)
    return [action for action in actions if isinstance(action, kinds)]


def test_a_node_joins_once_it_can_start_workers() -> None:
    story = Story()
    assert told(story.step(Begin())) == []
    assert told(story.step(StarterReady(50))) == [JoinRun()]
    assert story.machine.phase is Phase.MEETING


def test_a_round_starts_workers_with_the_ranks_of_the_assignment() -> None:
    story = Story().meeting()
    assert story.step(RoundStarts(assignment(3))) == [SpawnGroup(2, assignment(3))]
    story.step(WorkerStarted(0, 7, 1.0), WorkerStarted(1, 8, 1.0))
    (failed,) = told(story.exited(1, KILLED))
    assert isinstance(failed, TellFailed)
    assert (failed.round, failed.failure.rank, failed.failure.local_rank, failed.failure.attempt) == (3, 3, 1, 2)


def test_a_death_is_told_at_once_and_its_end_once_nothing_is_left() -> None:
    story = Story().running()
    actions = story.exited(0, KILLED)
    assert isinstance(told(actions)[0], TellFailed)
    assert SignalWorkers(signal.SIGTERM, (1,)) in actions
    assert told(story.exited(1, TERMINATED)) == []
    (stopped,) = told(story.step(Swept()))
    assert isinstance(stopped, TellStopped)
    assert stopped.failure is not None
    assert stopped.failure.rank == 2
    assert story.machine.phase is Phase.MEETING


def test_an_exception_is_told_a_moment_later_because_it_may_be_a_victims() -> None:
    story = Story().running()
    actions = story.step(WorkerFailing(1))
    assert told(actions) == []
    assert any(isinstance(a, SetTimer) and a.name == Timer.TELL and a.at == story.now + VICTIM_S for a in actions)
    (failed,) = told(story.step(TimerFired(Timer.TELL)))
    assert isinstance(failed, TellFailed)
    assert (failed.failure.kind, failed.failure.rank) == (FailureKind.EXCEPTION, 3)
    raised = ExceptionInfo("ValueError", "no")
    story.exited(1, ExitStatus(code=1), exception=raised, failed_at=story.now - 0.1)
    story.exited(0, TERMINATED)
    (stopped,) = told(story.step(Swept()))
    assert isinstance(stopped, TellStopped)
    assert stopped.failure is not None
    assert stopped.failure.exception == raised


def test_a_round_that_stops_before_the_moment_is_over_has_no_failure_of_ours_told_early() -> None:
    story = Story().running()
    story.step(WorkerFailing(1))
    story.step(RoundStops(1, "node a was lost"))
    story.exited(0, TERMINATED)
    story.exited(1, ExitStatus(code=1))
    assert [type(action) for action in told(story.step(Swept()))] == [TellStopped]


def test_a_victim_is_not_waited_for_once_the_round_stops_for_another_nodes_failure() -> None:
    story = Story().running()
    story.step(WorkerFailing(1))
    assert SignalWorkers(signal.SIGTERM, (1,)) in story.step(RoundStops(1, "rank 0 on a failed"))


def test_the_culprit_ends_by_itself_with_its_own_exit_code() -> None:
    story = Story().running()
    story.step(WorkerFailing(1))
    assert story.step(RoundStops(1, "rank 3 on b failed", is_ours=True)) == []


def test_a_round_that_stops_is_nobodys_failure() -> None:
    story = Story().running()
    assert SignalWorkers(signal.SIGTERM, (0, 1)) in story.step(RoundStops(1, "node c joins"))
    story.exited(0, TERMINATED)
    assert told(story.exited(1, TERMINATED)) == []
    assert told(story.step(Swept())) == [TellStopped(1, None)]


def test_a_stop_of_another_round_stops_nothing() -> None:
    assert Story().running(2).step(RoundStops(1, "late")) == []


def test_all_workers_finished_is_told_and_the_node_waits_for_the_rest() -> None:
    story = Story().running()
    story.exited(0)
    story.exited(1)
    assert told(story.step(Swept())) == [TellFinished(1)]
    assert SpawnGroup(1, assignment(2)) in story.step(RoundStarts(assignment(2))), "it takes part again"


def test_at_the_deadline_the_deaths_are_nobodys_failure() -> None:
    story = Story().running()
    story.step(StarterOverdue())
    story.exited(0, KILLED)
    assert told(story.exited(1, KILLED)) == []
    assert told(story.step(Swept())) == [TellStopped(1, None)]


def test_a_stop_by_the_deadline_knows_no_grace() -> None:
    story = Story().running()
    assert KillWorkers((0, 1)) in story.step(RoundStops(1, "the lease ran out", by_deadline=True))


def test_a_signal_makes_the_node_leave_with_its_workers_stopped_first() -> None:
    story = Story().running()
    actions = story.step(SignalArrived(signal.SIGTERM))
    assert told(actions) == [TellLeaving("it was sent SIGTERM")]
    story.exited(0, TERMINATED)
    story.exited(1, TERMINATED)
    assert told(story.step(Swept())) == [TellStopped(1, None), LeaveRun("it was sent SIGTERM")]
    story.step(HasLeft())
    assert (story.outcome.state, story.outcome.exit_code, story.outcome.world_size) == (RunState.INTERRUPTED, 143, 2)


def test_a_second_signal_does_not_wait_for_the_store() -> None:
    story = Story().meeting()
    story.step(SignalArrived(signal.SIGINT))
    assert story.machine.phase is Phase.LEAVING
    story.step(SignalArrived(signal.SIGINT))
    assert story.outcome.exit_code == 130


def test_a_signal_before_the_node_has_joined_ends_it_at_once() -> None:
    story = Story()
    story.step(Begin())
    story.step(SignalArrived(signal.SIGTERM))
    assert story.outcome.exit_code == 143


def test_the_starters_death_in_a_round_is_told_and_another_is_started() -> None:
    story = Story().running()
    actions = story.step(StarterLost(KILLED))
    (stopped,) = told(actions)
    assert isinstance(stopped, TellStopped)
    assert stopped.failure is not None
    assert stopped.failure.kind is FailureKind.INFRASTRUCTURE
    assert StartStarter(StartMethod.WARM) in actions
    assert told(story.step(StarterReady(51))) == [JoinRun()]


def test_a_round_that_comes_while_there_is_no_starter_waits_for_it() -> None:
    story = Story().meeting()
    story.step(StarterLost(KILLED))
    assert story.step(RoundStarts(assignment())) == []
    assert story.step(StarterReady(51)) == [SpawnGroup(0, assignment())]


def test_a_round_that_stops_before_its_starter_was_ready_is_told_so() -> None:
    story = Story().meeting()
    story.step(StarterLost(KILLED), RoundStarts(assignment()))
    assert told(story.step(RoundStops(1, "node a was lost"))) == [TellStopped(1, None)]
    assert told(story.step(StarterReady(51))) == [JoinRun()]


def test_a_node_on_which_no_worker_can_be_started_leaves() -> None:
    story = Story()
    story.step(Begin(), *[StarterLost(ExitStatus(code=1))] * 5)
    assert any(isinstance(action, GiveUp) for action in story.actions)


@pytest.mark.parametrize("where", ["meeting", "running"])
def test_a_node_that_is_refused_ends_with_the_reason_and_leaves_nothing(where: str) -> None:
    story = Story().meeting() if where == "meeting" else Story().running()
    story.step(RunRefused(ConfigurationError("It contradicts.")))
    if where == "running":
        story.exited(0, TERMINATED)
        story.exited(1, TERMINATED)
        story.step(Swept())
    assert LeaveRun("It contradicts.") in story.actions
    (end,) = story.step(HasLeft())
    assert isinstance(end, GiveUp)
    assert str(end.error) == "It contradicts."


def test_the_run_ends_here_as_everywhere_with_the_root_cause_of_another_node() -> None:
    story = Story().running()
    story.step(RoundStops(1, "rank 0 on a failed"))
    story.exited(0, TERMINATED)
    story.exited(1, TERMINATED)
    story.step(Swept())
    failure = Failure(FailureKind.EXIT, 0, 0, 0, "a", 5, ExitStatus(code=7), 3.0, 1.0)
    story.step(RunEnds(Ending(RunState.FAILED, 7, "no restarts were allowed", 2, failure)))
    outcome = story.outcome
    assert (outcome.exit_code, outcome.restarts_used, outcome.root_cause) == (7, 2, failure)
    assert outcome.attempts[-1].victims == 3
