"""What a chaos scenario must come to, as docs/architecture.md has it. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from scenario import Moment, Scenario, Start, Trigger, Victim

S = signal.Signals
SCRIPT_CODE = 7  # what chaos_worker.py fails with
_KILLERS = (S.SIGKILL, S.SIGSEGV, S.SIGABRT)
_ENDING = (S.SIGTERM, S.SIGINT, S.SIGHUP, S.SIGQUIT)  # those that end a job when its agent gets them


@dataclass(frozen=True, slots=True)
class Ending:
    """One way in which a scenario may end."""

    returncode: int  # negative: the agent died of that signal
    state: str | None  # in the summary; None: there is none
    restarts: int
    why: str
    cause: str = ""  # what the summary must blame for the last failed attempt: "rank N", "any rank", "infrastructure"

    def __str__(self) -> str:
        state = f"{self.state}, restarts used {self.restarts}" if self.state else "no summary"
        blamed = f", blaming {self.cause}" if self.cause else ""
        return f"exit {self.returncode}, {state}{blamed} (because {self.why})"


def expected(scenario: Scenario) -> tuple[Ending, ...]:
    """Every ending that is right; more than one only where the blow races with the run's own progress."""
    endings = _of_the_blow(scenario)
    if scenario.moment is Moment.AT_END:
        return (*endings, _undisturbed(scenario), *_in_the_last_moment(scenario))
    return endings


def _in_the_last_moment(scenario: Scenario) -> tuple[Ending, ...]:
    """An interpreter that ends takes the script's handlers away before it is gone: then the signal kills it."""
    strikes_workers = scenario.victim in {Victim.WORKER, Victim.ALL_WORKERS}
    if not strikes_workers or scenario.behaviour not in {"ends-well-at-term", "stops-slowly", "handles-usr1"}:
        return ()
    why = "the interpreter had taken the handler away"
    return (_after_a_failure(scenario, 128 + scenario.signal, "any rank", why),)


def is_lethal(scenario: Scenario) -> bool:
    """Whether the victim must die of the blow."""
    if scenario.signal in (*_KILLERS, S.SIGSTOP):
        return scenario.signal is not S.SIGSTOP
    match scenario.victim:
        case Victim.WORKER | Victim.ALL_WORKERS:
            return _ends_a_worker(scenario)
        case Victim.STARTER | Victim.GUARD:
            return scenario.signal is S.SIGTERM
        case Victim.CHILD:
            return scenario.signal is S.SIGTERM and scenario.behaviour != "stubborn-child"
        case _:
            return scenario.signal in _ENDING


def _of_the_blow(scenario: Scenario) -> tuple[Ending, ...]:
    if scenario.signal is S.SIGSTOP:
        return (_of_a_stop(scenario),)
    match scenario.victim:
        case Victim.AGENT:
            return _of_a_blow_to_the_agent(scenario)
        case Victim.AGENT_AND_STARTER:
            return _agent_killed(scenario)
        case Victim.WORKER | Victim.ALL_WORKERS:
            return (_of_a_blow_to_workers(scenario),)
        case Victim.CHILD:
            return (_undisturbed(scenario),)
        case Victim.STARTER | Victim.GUARD | Victim.STORE:
            return _of_a_blow_to_our_own(scenario)


def _undisturbed(scenario: Scenario) -> Ending:
    """What the trigger alone comes to."""
    match scenario.trigger:
        case Trigger.NONE:
            return Ending(0, "succeeded", 0, "nothing that matters was struck")
        case Trigger.SCRIPT_FAILS:
            return _after_a_failure(scenario, SCRIPT_CODE, "rank 0", "the script fails once")
        case Trigger.TERM_TO_AGENT:
            return _interrupted(S.SIGTERM)


def _after_a_failure(scenario: Scenario, code: int, cause: str, why: str, earlier: int = 0) -> Ending:
    if scenario.max_restarts > earlier:
        return Ending(0, "succeeded", earlier + 1, f"{why}, and a restart is left", cause)
    return Ending(code, "failed", earlier, f"{why}, and no restart is left", cause)


def _interrupted(signum: signal.Signals, restarts: int = 0) -> Ending:
    return Ending(128 + signum, "interrupted", restarts, f"the agent got {signum.name}")


def _agent_killed(scenario: Scenario) -> tuple[Ending, ...]:
    died = Ending(-scenario.signal, None, 0, "the agent was killed")
    if scenario.moment is Moment.AT_END:  # after it had written how the run ended
        return (died, Ending(-scenario.signal, "succeeded", 0, "the agent was killed on its way out"))
    return (died,)


def _of_a_stop(scenario: Scenario) -> Ending:
    if scenario.continued:
        return _undisturbed(scenario)
    if scenario.victim is Victim.AGENT:
        return Ending(-S.SIGKILL, None, 0, "the stopped agent was killed")
    if ends_by_itself(scenario):
        return _undisturbed(scenario)
    return _interrupted(S.SIGTERM)


def ends_by_itself(scenario: Scenario) -> bool:
    """Whether the job can end with its victim stopped for ever."""
    return scenario.victim is Victim.CHILD or (scenario.victim is Victim.GUARD and scenario.moment is Moment.RUNNING)


def strikes_the_first_that_appears(scenario: Scenario) -> bool:
    """Whether a worker is struck so early that it has not said yet which rank it is."""
    early = scenario.moment in (Moment.AT_START, Moment.RESTARTING)
    return early and scenario.victim is Victim.WORKER and scenario.start is not Start.WARM


def _of_a_blow_to_the_agent(scenario: Scenario) -> tuple[Ending, ...]:
    if scenario.signal in _KILLERS:
        return _agent_killed(scenario)
    if scenario.signal not in _ENDING or scenario.trigger is Trigger.TERM_TO_AGENT:
        return (_undisturbed(scenario),)
    if scenario.moment is Moment.LAUNCHING:
        too_early = Ending(-scenario.signal, None, 0, "the agent did not listen to signals yet")
        return (_interrupted(scenario.signal), too_early)
    announced = 1 if scenario.moment is Moment.RESTARTING else 0  # counts from when it is decided
    return (_interrupted(scenario.signal, announced),)


def _of_a_blow_to_workers(scenario: Scenario) -> Ending:
    if not _ends_a_worker(scenario) or scenario.moment is Moment.STOPPING:
        return _undisturbed(scenario)
    by_rank = scenario.victim is Victim.WORKER and not strikes_the_first_that_appears(scenario)
    cause = f"rank {scenario.rank}" if by_rank else "any rank"
    earlier = 1 if scenario.moment is Moment.RESTARTING else 0
    return _after_a_failure(scenario, 128 + scenario.signal, cause, "a worker was killed", earlier)


def _ends_a_worker(scenario: Scenario) -> bool:
    """Whether the signal makes a worker fail; some behaviours handle it, and go on or end well."""
    match scenario.signal:
        case S.SIGTERM:
            return scenario.behaviour not in ("ignores-term", "ends-well-at-term", "stops-slowly")
        case S.SIGINT:
            return scenario.behaviour != "ignores-term"
        case S.SIGUSR1:
            return scenario.behaviour != "handles-usr1"
        case _:
            return True


def _of_a_blow_to_our_own(scenario: Scenario) -> tuple[Ending, ...]:
    if not is_lethal(scenario) or scenario.moment in (Moment.STOPPING, Moment.RESTARTING):
        return (_undisturbed(scenario),)
    guard_was_asked = scenario.victim is Victim.GUARD and scenario.signal is S.SIGTERM
    code = 128 + (S.SIGKILL if guard_was_asked else scenario.signal)  # a guard that is asked to end kills the starter
    failed = _after_a_failure(scenario, code, "infrastructure", f"{scenario.victim.value} died")
    if scenario.moment is not Moment.PREPARING:
        return (failed,)
    again = Ending(0, "succeeded", 0, "before the workers start, another starter costs nothing")
    at_once_ready = scenario.start is not Start.WARM
    return (again, failed) if at_once_ready else (again,)
