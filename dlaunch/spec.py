"""What the user asked for, as frozen values: checked once, at birth, with an error that names the field."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import UsageError
from .ways import Way

if TYPE_CHECKING:
    from .rendezvous_spec import JoinPolicy as JoinPolicy  # noqa: PLC0414  -- to be found here
    from .rendezvous_spec import RendezvousSpec as RendezvousSpec  # noqa: PLC0414


def __getattr__(name: str) -> Any:
    """The part for several nodes is loaded when it is asked for: a run on one node starts without its milliseconds."""
    if name in ("JoinPolicy", "RendezvousSpec"):
        from . import rendezvous_spec  # noqa: PLC0415

        return getattr(rendezvous_spec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class StartMethod(Enum):
    """How worker processes come into being."""

    WARM = "warm"  # forked from a process that already holds torch
    EXEC = "exec"  # a plain interpreter each


class ProgramKind(Enum):
    """What the positional argument of the command line names."""

    SCRIPT = "script"  # python -u path args
    MODULE = "module"  # python -u -m name args
    EXECUTABLE = "executable"  # --no-python: the program itself


class Program(NamedTuple):
    """What every worker runs."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()
    interpreter: str = ""  # absolute path of the Python that runs it; empty for an executable

    def command(self, local_rank: int | None = None) -> list[str]:
        """The full argument vector; with a local rank, ``${local_rank}`` is expanded as torchrun does."""
        args = list(self.args) if local_rank is None else expand_local_rank(self.args, local_rank)
        if self.kind is ProgramKind.EXECUTABLE:
            return [self.target, *args]
        middle = ["-m", self.target] if self.kind is ProgramKind.MODULE else [self.target]
        return [self.interpreter, "-u", *middle, *args]


def expand_local_rank(args: tuple[str, ...], local_rank: int) -> list[str]:
    """Substitute ``${local_rank}`` (and collapse ``$$``) in arguments, as torchrun's string.Template does."""
    if not any("$" in arg for arg in args):
        return list(args)
    from string import Template  # noqa: PLC0415  -- costs 10 ms at start-up, and few need it

    return [Template(arg).safe_substitute(local_rank=str(local_rank)) for arg in args]


def at_least(name: str, value: float, least: float) -> None:
    """Refuse the value of a flag that is below ``least``, or no number."""
    if not value >= least:  # also refuses NaN
        raise UsageError(f"--{name} is {value:g}.", f"Give {least:g} or more.")


def above(name: str, value: float, bound: float) -> None:
    """Refuse the value of a flag that is not above ``bound``."""
    if not value > bound:
        raise UsageError(f"--{name} is {value:g}.", f"Give more than {bound:g}.")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a failed worker group is started again."""

    max_restarts: int = 0  # of the whole job, not of a node
    window_s: float | None = None  # a failure older than this no longer counts against the budget
    backoff_s: float = 0.0  # wait before the first restart; doubles with each
    backoff_max_s: float = 60.0
    early_stop: bool = True  # the same failure at the same place, at once, each time: do not try again

    def __post_init__(self) -> None:
        at_least("max-restarts", self.max_restarts, 0)
        if self.window_s is not None:
            above("restart-window", self.window_s, 0)
        at_least("backoff", self.backoff_s, 0)
        at_least("backoff maximum", self.backoff_max_s, self.backoff_s)


class Streams(Enum):
    """A choice among a worker's two output streams; the values are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3

    def includes(self, stream: str) -> bool:
        """Whether ``stream`` ("stdout" or "stderr") is chosen."""
        return bool(self.value & (1 if stream == "stdout" else 2))


class StreamMap(NamedTuple):
    """``0|1|2|3`` for all local ranks, or ``local_rank:value`` for some."""

    default: Streams = Streams.NONE
    by_local_rank: tuple[tuple[int, Streams], ...] = ()

    def of(self, local_rank: int) -> Streams:
        """The streams chosen for a local rank."""
        return dict(self.by_local_rank).get(local_rank, self.default)


_NO_STREAMS = StreamMap()


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Where the workers' output goes."""

    log_dir: Path | None = None  # None: a private directory of the user's below the temporary one
    keep_files: bool = True  # False for --log-dir /dev/null
    redirects: StreamMap = _NO_STREAMS  # to files only
    tee: StreamMap = _NO_STREAMS  # to files, and to the console with torchrun's prefix
    local_ranks_filter: frozenset[int] | None = None  # which local ranks show on the console; None: all
    stdout_filters: tuple[str, ...] = ()  # lines that contain one of these go to filtered_stdout.log too
    stderr_filters: tuple[str, ...] = ()
    line_prefix_template: str | None = None  # ${role_name} ${local_rank} ${rank}


DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One run, as the command line, the environment and the defaults add up to."""

    program: Program
    nproc_per_node: str = "1"  # a wish: a number, "auto", "cpu", "gpu" or "xpu"; the node resolves it once
    run_id: str = "none"
    role: str = "default"
    start_method: StartMethod = StartMethod.WARM
    preload: tuple[str, ...] = ()  # modules to import in the starter beside torch
    parallel: Way | None = None  # what the script's model is put into; None: the user did not say
    restart: RestartPolicy = RestartPolicy()
    grace_s: float = 30.0  # from the first signal to SIGKILL, on every path
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS  # those that end the job
    output: OutputSpec = OutputSpec()
    rendezvous: RendezvousSpec | None = None  # None: one node, which needs no store
    master_addr: str = "127.0.0.1"  # on one node only: several agree on an address and a port for every round
    master_port: int = 0  # 0: a free one, new for every round
    virtual_local_rank: bool = False
    local_rank_argument: bool = False  # torch.distributed.launch without --use-env: --local-rank=N before the args
    summary_json: Path | None = None

    @property
    def min_nodes(self) -> int:
        """The least number of nodes that the job runs on."""
        return self.rendezvous.min_nodes if self.rendezvous else 1

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes that the job runs on; further ones wait as spares."""
        return self.rendezvous.max_nodes if self.rendezvous else 1

    def __post_init__(self) -> None:
        at_least("grace", self.grace_s, 0)
        if self.program.kind is ProgramKind.EXECUTABLE and self.start_method is StartMethod.WARM:
            raise UsageError("--start-method warm needs Python.", "Leave it out with --no-python.")
        if not 0 <= self.master_port <= 65535:
            raise UsageError(f"--master-port is {self.master_port}.", "Give a port from 0 to 65535.")
