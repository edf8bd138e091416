"""Every option of ``dlaunch run``, once: the parser, the variables, the help and the docs read this table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Group(Enum):
    """The headings of the help, in its order."""

    JOB = "Job"
    PROGRAM = "Program"
    RESTARTS = "Restarts and stopping"
    OUTPUT = "Output"
    MEETING = "Nodes and meeting"
    CHANGES = "Nodes that come and go"
    ACCESS = "Access to etcd"
    OTHER = "Other torchrun flags"
    LATER = "Refused by this version"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how it is spelled, which variables set it, what it means."""

    name: str
    group: Group
    help: str  # one line
    metavar: str = ""  # empty: a flag without a value
    default: str = ""  # as one would type it; empty: no value
    short: str = ""
    synonym: str = ""
    negative: str = ""  # the spelling that turns a flag off
    pet: bool = True  # torchrun reads PET_<DEST>, so it counts here too
    more_variables: tuple[str, ...] = ()  # read last

    @property
    def dest(self) -> str:
        """The name in code, and (in capitals) in the variables."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether it stands alone, without a value."""
        return not self.metavar

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every dashed spelling on the command line."""
        return tuple(filter(None, (self.short, self.name, self.synonym, self.negative)))

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it, the strongest first."""
        names = [self.name, self.synonym] if self.synonym else [self.name]
        ours = tuple("DLAUNCH_" + name.removeprefix("--").replace("-", "_").upper() for name in names)
        theirs = (f"PET_{self.dest.upper()}",) if self.pet else ()
        return (*ours, *theirs, *self.more_variables)


OPTIONS: tuple[Option, ...] = (
    Option("--nproc-per-node", Group.JOB, "Workers: a number, auto, cpu, gpu or xpu.", "N|KIND", "1"),
    Option("--start-method", Group.JOB, "warm: fork workers that hold torch; exec: plain ones.", "METHOD", "warm"),
    Option("--preload", Group.JOB, "Modules to import once, before the workers.", "A,B", pet=False),
    Option("--parallel", Group.JOB, "Put the script's model into ours: dp, ddp, fsdp, none.", "WAY", pet=False),
    Option("--role", Group.JOB, "A name for the workers; shown before their lines.", "NAME", "default"),
    Option("--rdzv-id", Group.JOB, "The run's id; a random one if not given.", "ID"),
    Option("--virtual-local-rank", Group.JOB, "Show each worker one GPU, as local rank 0."),
    Option("--module", Group.PROGRAM, "SCRIPT is a module, run like python -m.", short="-m"),
    Option("--no-python", Group.PROGRAM, "SCRIPT is a program, run as it is."),
    Option("--run-path", Group.PROGRAM, "SCRIPT is a path, run by Python (beats --no-python)."),
    Option(
        "--use-env",
        Group.PROGRAM,
        "Hand --local-rank=N to the script, or leave it to LOCAL_RANK.",
        default="--use-env",
        negative="--no-use-env",
        pet=False,
    ),
    Option("--max-restarts", Group.RESTARTS, "Restarts of the whole job before it fails.", "N", "0"),
    Option("--restart-window", Group.RESTARTS, "Older failures no longer count.", "SECONDS", pet=False),
    Option("--backoff", Group.RESTARTS, "Wait before a restart, doubling up to MAX.", "FIRST[:MAX]", "0:60", pet=False),
    Option(
        "--early-stop",
        Group.RESTARTS,
        "Give up early when every attempt fails at once alike.",
        default="--early-stop",
        negative="--no-early-stop",
        pet=False,
    ),
    Option(
        "--shutdown-timeout",
        Group.RESTARTS,
        "From the first signal to SIGKILL, on every path.",
        "SECONDS",
        "30",
        synonym="--grace",
        more_variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    Option(
        "--signals-to-handle",
        Group.RESTARTS,
        "Signals that end the job.",
        "A,B",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Option("--log-dir", Group.OUTPUT, "Where log files go; /dev/null: nowhere.", "DIR"),
    Option("--redirects", Group.OUTPUT, "To files only: 0 none, 1 out, 2 err, 3 both; or RANK:V,...", "MAP", "0", "-r"),
    Option("--tee", Group.OUTPUT, "To files and, with a prefix, to the console.", "MAP", "0", "-t"),
    Option("--local-ranks-filter", Group.OUTPUT, "Show only these local ranks on the console.", "A,B"),
    Option("--duplicate-stdout-filters", Group.OUTPUT, "Copy lines with one of these texts to a file.", "A,B"),
    Option("--duplicate-stderr-filters", Group.OUTPUT, "The same for stderr; ',,' is a literal comma.", "A,B"),
    Option("--summary-json", Group.OUTPUT, "Write how the run ended, for programs.", "FILE", pet=False),
    Option("--nnodes", Group.MEETING, "Nodes: N, or the least and the most.", "N|MIN:MAX", "1:1"),
    Option("--standalone", Group.MEETING, "One node, alone; as without it on one node."),
    Option("--rdzv-backend", Group.MEETING, "etcd: yours; c10d or static: a private one.", "NAME", "static"),
    Option("--rdzv-endpoint", Group.MEETING, "HOST[:PORT],... of etcd; or of one of the nodes.", "ENDPOINTS"),
    Option("--rdzv-timeout", Group.MEETING, "How long to wait for enough nodes.", "SECONDS", "600", pet=False),
    Option("--rdzv-conf", Group.MEETING, "KEY=VALUE,... with torchrun's keys.", "CONF"),
    Option("--local-addr", Group.MEETING, "This node's address for its peers.", "HOST"),
    Option("--node-rank", Group.MEETING, "This node's rank, where that matters.", "N", "0"),
    Option("--master-addr", Group.MEETING, "The node with rank 0 in a static run.", "HOST", "127.0.0.1"),
    Option("--master-port", Group.MEETING, "The port there; on one node MASTER_PORT.", "PORT"),
    Option("--join", Group.CHANGES, "When to grow: now, at-restart, or a lull of SECONDS.", "WHEN", "now", pet=False),
    Option("--outage-limit", Group.CHANGES, "How long to train on without etcd.", "SECONDS", "120", pet=False),
    Option("--lease-ttl", Group.CHANGES, "A silent node is lost after this, 2 or more.", "SECONDS", "5", pet=False),
    Option("--max-node-failures", Group.CHANGES, "Failures until a host is set aside.", "N", pet=False),
    Option("--cool-down", Group.CHANGES, "How long it stays aside.", "SECONDS", "600", pet=False),
    Option("--rdzv-user", Group.ACCESS, "A user of etcd; DLAUNCH_RDZV_PASSWORD is read.", "NAME", pet=False),
    Option("--rdzv-password-file", Group.ACCESS, "A file that only you can read.", "FILE", pet=False),
    Option("--rdzv-ca", Group.ACCESS, "The authority that signed etcd's certificate.", "FILE", pet=False),
    Option("--rdzv-cert", Group.ACCESS, "Our certificate for etcd.", "FILE", pet=False),
    Option("--rdzv-key", Group.ACCESS, "The key of --rdzv-cert.", "FILE", pet=False),
    Option("--monitor-interval", Group.OTHER, "Checked, without effect: nothing is polled.", "SECONDS", "0.1"),
    Option("--event-log-handler", Group.OTHER, "Only null.", "NAME", "null"),
    Option("--logs-specs", Group.OTHER, "Only default.", "NAME", pet=False),
    Option("--numa-binding", Group.LATER, "Bind workers to the CPUs near their GPU.", "MODE", pet=False),
    Option("--hosts", Group.LATER, "Start on several hosts over ssh.", "A,B", pet=False),
    Option("--detach", Group.LATER, "Run in the background.", pet=False),
)

BY_DEST = {option.dest: option for option in OPTIONS}
BY_SPELLING = {spelling: option for option in OPTIONS for spelling in option.spellings}


def normalize(token: str) -> str:
    """The dashed spelling of an option that may be written with underscores."""
    return token.replace("_", "-") if token.startswith("--") else token
