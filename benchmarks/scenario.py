"""One chaos scenario: who is struck with which signal at which moment, all drawn from one integer. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

S = signal.Signals
LONG_GRACE_S = 60.0


class Start(Enum):
    """How the workers are started."""

    EXEC = "exec"
    WARM_BARE = "warm-bare"  # the warm starter of a Python that has no torch: ready at once
    WARM = "warm"  # with torch


class Victim(Enum):
    """Who is struck."""

    WORKER = "a worker"
    ALL_WORKERS = "all workers"
    CHILD = "a worker's child"
    STORE = "the workers' store"
    STARTER = "the starter"
    GUARD = "the guard"
    AGENT = "the agent"
    AGENT_AND_STARTER = "agent and starter at once"


class Moment(Enum):
    """When."""

    LAUNCHING = "launching"  # the agent may not have started anything yet
    PREPARING = "preparing"  # guard and starter are being started
    AT_START = "at start"  # a worker process has just appeared
    RUNNING = "running"
    STOPPING = "stopping"  # workers were asked to end, and take their time
    RESTARTING = "restarting"  # between two attempts, or at the start of the second
    AT_END = "at the end"  # the workers have just been told to finish


class Trigger(Enum):
    """What brings the run to its moment, where it does not come there by itself."""

    NONE = ""
    SCRIPT_FAILS = "rank 0 exits with 7"
    TERM_TO_AGENT = "SIGTERM to the agent"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a scenario does; what it must come to is in expectation.py."""

    seed: int
    start: Start
    behaviour: str
    nproc: int
    max_restarts: int
    drawn_grace_s: float
    victim: Victim
    rank: int  # of the worker, where one is struck
    signal: signal.Signals
    moment: Moment
    trigger: Trigger
    delay_s: float  # from the moment to the blow
    coin: bool

    @property
    def continued(self) -> bool:
        """Whether a stopped victim goes on after a while; otherwise it never does."""
        return self.signal is S.SIGSTOP and self.coin

    @property
    def impatient(self) -> bool:
        """Whether the signal comes a second time: a second Ctrl-C must kill at once."""
        return _is_ctrl_c(self) and self.behaviour == "ignores-term" and self.coin

    @property
    def grace_s(self) -> float:
        """Longer than the run may take where the workers are to be killed before it is over."""
        return LONG_GRACE_S if self.impatient else self.drawn_grace_s

    @property
    def backoff_s(self) -> float:
        """Long enough to strike into, where that is the plan."""
        return 1.5 if self.moment is Moment.RESTARTING and self.victim is not Victim.WORKER else 0.0

    @property
    def stops_for_ever(self) -> bool:
        """Whether the victim is stopped and never continued."""
        return self.signal is S.SIGSTOP and not self.continued

    def __str__(self) -> str:
        what = f"{self.signal.name} to {self.victim.value}"
        if self.victim is Victim.WORKER:
            what += f" (rank {self.rank})"
        if self.signal is S.SIGSTOP:
            what += " and SIGCONT later" if self.continued else " for ever"
        if self.impatient:
            what += ", twice"
        after = f" after {self.trigger.value}" if self.trigger is not Trigger.NONE else ""
        how = f"{self.start.value}, {self.nproc} x {self.behaviour}, restarts {self.max_restarts}, grace {self.grace_s}"
        return f"{what}, {self.moment.value}{after} [{how}]"


WITH_CHILD = ("child", "grandchildren", "stubborn-child", "daemon")
BEHAVIOURS = (
    "idle",
    "prints",
    "ignores-term",
    "ends-well-at-term",
    "stops-slowly",
    "handles-usr1",
    *WITH_CHILD,
    "trains",
)
_KILLERS = (S.SIGKILL, S.SIGSEGV, S.SIGABRT)
_OWN = (*_KILLERS, S.SIGTERM, S.SIGINT, S.SIGHUP, S.SIGUSR1, S.SIGSTOP)  # for processes of dlaunch's own
SIGNALS = {
    Victim.WORKER: (*_KILLERS, S.SIGTERM, S.SIGINT, S.SIGHUP, S.SIGUSR1, S.SIGSTOP),
    Victim.ALL_WORKERS: (S.SIGKILL, S.SIGTERM, S.SIGSTOP),
    Victim.CHILD: (S.SIGKILL, S.SIGTERM, S.SIGSTOP),
    Victim.STORE: (S.SIGKILL,),
    Victim.STARTER: _OWN,
    Victim.GUARD: _OWN,
    Victim.AGENT: (*_OWN, S.SIGQUIT),
    Victim.AGENT_AND_STARTER: (S.SIGKILL,),
}
_OURS = (Victim.STARTER, Victim.GUARD, Victim.AGENT, Victim.AGENT_AND_STARTER)
VICTIMS = {
    Moment.LAUNCHING: (Victim.AGENT,),
    Moment.PREPARING: _OURS,
    Moment.AT_START: (Victim.WORKER,),
    Moment.RUNNING: tuple(Victim),
    Moment.STOPPING: (*_OURS, Victim.WORKER),
    Moment.RESTARTING: (*_OURS, Victim.WORKER),
    Moment.AT_END: (*_OURS, Victim.WORKER, Victim.ALL_WORKERS),
}
_BLOWS = tuple((moment, victim) for moment, victims in VICTIMS.items() for victim in victims)
_OFTEN = tuple(blow for blow in _BLOWS if blow[0] is Moment.RUNNING or blow[1] is Victim.WORKER)
_STARTS = (Start.EXEC,) * 6 + (Start.WARM_BARE,) * 6 + (Start.WARM,)


def draw(seed: int) -> Scenario:
    """The scenario of a seed: moment and victim, then the rest again and again until all of it fits together."""
    random = Random(seed)
    moment, victim = random.choice(_BLOWS + _OFTEN)
    while True:
        scenario = _candidate(seed, moment, victim, random)
        if is_possible(scenario):
            return replace(scenario, behaviour="ignores-term") if _is_ctrl_c(scenario) and scenario.coin else scenario


def _candidate(seed: int, moment: Moment, victim: Victim, random: Random) -> Scenario:
    nproc = random.choice((1, 2, 2, 3))
    start = random.choice(_STARTS)
    return Scenario(
        seed=seed,
        start=start,
        behaviour=_behaviour(start, moment, random),
        nproc=nproc,
        max_restarts=random.choice((0, 1, 1, 2)),
        drawn_grace_s=random.choice((0.5, 1.0, 2.5)),
        victim=victim,
        rank=random.randrange(nproc),
        signal=random.choice(SIGNALS[victim]),
        moment=moment,
        trigger=_trigger(moment, random),
        delay_s=random.uniform(0.0, _longest_delay_s(moment, start)),
        coin=random.random() < 0.5,
    )


def _behaviour(start: Start, moment: Moment, random: Random) -> str:
    if start is Start.WARM and moment is Moment.RUNNING and random.random() < 0.5:
        return "trains"
    return random.choice(BEHAVIOURS[:-1])


def _longest_delay_s(moment: Moment, start: Start) -> float:
    if moment is Moment.LAUNCHING:
        return 0.3
    return 0.8 if moment is Moment.PREPARING and start is Start.WARM else 0.05


def _is_ctrl_c(scenario: Scenario) -> bool:
    struck = scenario.victim is Victim.AGENT and scenario.moment is Moment.RUNNING
    return struck and scenario.signal is S.SIGINT


def _trigger(moment: Moment, random: Random) -> Trigger:
    if moment is Moment.STOPPING:
        return random.choice((Trigger.SCRIPT_FAILS, Trigger.TERM_TO_AGENT))
    return Trigger.SCRIPT_FAILS if moment is Moment.RESTARTING else Trigger.NONE


def is_possible(scenario: Scenario) -> bool:
    """Whether the parts of a candidate fit together, so that its outcome is defined."""
    return _fits_the_moment(scenario) and _fits_the_behaviour(scenario)


def _fits_the_moment(scenario: Scenario) -> bool:
    lethal_for_all = scenario.signal in _KILLERS
    match scenario.moment:
        case Moment.LAUNCHING:  # a SIGINT that early meets Python's own start
            return scenario.signal in (S.SIGKILL, S.SIGTERM, S.SIGHUP)
        case Moment.AT_START:  # before the script has set up its handlers, if any
            return lethal_for_all or scenario.signal is S.SIGSTOP or _dies_at_term_anyway(scenario)
        case Moment.STOPPING:
            return _fits_stopping(scenario)
        case Moment.RESTARTING:
            striking_a_worker = scenario.victim is Victim.WORKER
            return scenario.max_restarts > 0 and scenario.signal != S.SIGSTOP and lethal_for_all >= striking_a_worker
        case Moment.AT_END:
            return scenario.signal != S.SIGSTOP or scenario.continued
        case _:
            return True


def _fits_stopping(scenario: Scenario) -> bool:
    if scenario.behaviour != "stops-slowly" or scenario.grace_s < 2.0 or scenario.signal is S.SIGSTOP:
        return False
    if scenario.victim is Victim.WORKER and scenario.signal not in _KILLERS:
        return False
    if scenario.trigger is Trigger.TERM_TO_AGENT:
        return True
    return scenario.nproc > 1 and not (scenario.victim is Victim.WORKER and scenario.rank == 0)


def _fits_the_behaviour(scenario: Scenario) -> bool:
    if (scenario.victim is Victim.CHILD) > (scenario.behaviour in WITH_CHILD):
        return False
    if scenario.victim is Victim.STORE and scenario.start is not Start.WARM:
        return False
    if scenario.behaviour != "trains":
        return True
    several_with_torch = scenario.start is Start.WARM and scenario.nproc > 1
    struck_before_handlers_matter = scenario.signal in (*_KILLERS, S.SIGTERM, S.SIGSTOP)
    return several_with_torch and struck_before_handlers_matter and scenario.moment is Moment.RUNNING


def _dies_at_term_anyway(scenario: Scenario) -> bool:
    handles_it = scenario.behaviour in ("ignores-term", "ends-well-at-term", "stops-slowly")
    return scenario.signal is S.SIGTERM and not handles_it
