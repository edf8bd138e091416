"""From what was written to the `JobSpec`: a pure function, which refuses what this version cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlaunch.errors import ConfigurationError, UsageError
from dlaunch.spec import JobSpec, OutputSpec, Program, ProgramKind, RestartPolicy, StartMethod
from dlaunch.ways import Way, way_named

from . import grammar
from .options import OPTIONS, Group
from .settings import Given, Setting, gather, gather_flags

if TYPE_CHECKING:
    from dlaunch.spec import RendezvousSpec

Settings = Mapping[str, Setting]
Flags = Mapping[str, bool]

_ABOUT_NODES = [o.dest for o in OPTIONS if o.group in (Group.MEETING, Group.CHANGES) and not o.is_flag]
_NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
_NO_FILES = "/dev/null"
# torchrun's words beside ours: its fork and forkserver share what is imported, its spawn starts anew
_START_METHODS = {
    "warm": StartMethod.WARM,
    "exec": StartMethod.EXEC,
    "fork": StartMethod.WARM,
    "forkserver": StartMethod.WARM,
    "spawn": StartMethod.EXEC,
}


def specify(
    given: Given, command: Sequence[str], environ: Mapping[str, str], *, interpreter: str, new_run_id: str
) -> JobSpec:
    """The job that a command line and an environment ask for.

    ``given`` holds the options by dest, ``command`` the script and its arguments; ``interpreter`` is the Python that
    runs it and ``new_run_id`` the id of a run that was given none. Raises UsageError for what is not well-formed and
    ConfigurationError for what this version cannot do. Reads no file.
    """
    settings, flags = gather(given, environ), gather_flags(given, environ)
    _refuse_what_is_to_come(settings, flags)
    grammar.seconds(settings["monitor_interval"])
    program = _program(command, flags, interpreter)
    start_method = _start_method(settings["start_method"], program.kind)
    run_id, rendezvous = _nodes(settings, flags, environ, new_run_id)
    master_addr, master_port = _meeting(settings, standalone=flags["standalone"]) if rendezvous is None else ("", 0)
    return JobSpec(
        program=program,
        nproc_per_node=grammar.workers_wish(settings["nproc_per_node"]),
        run_id=run_id,
        role=settings["role"].value,
        start_method=start_method,
        preload=_preload(settings["preload"], start_method),
        parallel=_parallel(settings["parallel"], program.kind),
        restart=_restart_policy(settings, flags),
        grace_s=grammar.seconds(settings["shutdown_timeout"]),
        signals=grammar.signals(settings["signals_to_handle"]),
        output=_output(settings, environ),
        rendezvous=rendezvous,
        master_addr=master_addr,
        master_port=master_port,
        virtual_local_rank=flags["virtual_local_rank"],
        local_rank_argument=not flags["use_env"],
        summary_json=_path(settings["summary_json"]),
    )


def _refuse_what_is_to_come(settings: Settings, flags: Flags) -> None:
    """Flags whose feature is not there yet are told apart from mistakes, and never ignored."""
    if settings["hosts"].value:
        raise _not_yet(settings["hosts"], "start other hosts", "Leave it out and start dlaunch there.")
    if flags["detach"]:
        raise ConfigurationError("This version does not run in the background yet.", "Leave --detach out, or use tmux.")
    if settings["numa_binding"].value:
        grammar.choice(settings["numa_binding"], _NUMA_MODES)
        raise _not_yet(settings["numa_binding"], "bind workers to CPUs", "Leave it out, or use numactl in the script.")
    for dest, only in (("logs_specs", "default"), ("event_log_handler", "null")):
        if settings[dest].value not in ("", only):
            raise _not_yet(settings[dest], "load plug-ins of torchrun", f"Leave it out, or give {only}.")


def _not_yet(setting: Setting, feature: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"{setting.origin} is {setting.value!r}, but this version does not {feature} yet.", fix)


def _program(command: Sequence[str], flags: Flags, interpreter: str) -> Program:
    if not command:
        raise UsageError("No script was given.", "Say: dlaunch [FLAGS] SCRIPT [ARGS...], or dlaunch --help.")
    kind = _program_kind(flags)
    if kind is ProgramKind.EXECUTABLE and not flags["use_env"]:
        raise UsageError("--no-use-env cannot stand with --no-python.", "Leave one of them out.")
    return Program(
        kind=kind,
        target=command[0],
        args=tuple(command[1:]),
        interpreter="" if kind is ProgramKind.EXECUTABLE else interpreter,
    )


def _program_kind(flags: Flags) -> ProgramKind:
    if flags["module"] and (flags["no_python"] or flags["run_path"]):
        other = "--run-path" if flags["run_path"] else "--no-python"
        raise UsageError(f"-m/--module cannot stand with {other}.", "Leave one of them out.")
    if flags["module"]:
        return ProgramKind.MODULE
    if flags["no_python"] and not flags["run_path"]:
        return ProgramKind.EXECUTABLE
    return ProgramKind.SCRIPT


def _start_method(setting: Setting, kind: ProgramKind) -> StartMethod:
    """``--no-python`` always means exec; only a plain ``warm`` beside it is a contradiction."""
    method = _START_METHODS[grammar.choice(setting, tuple(_START_METHODS))]
    if kind is not ProgramKind.EXECUTABLE:
        return method
    if setting.value == "warm" and not setting.is_default:
        raise setting.wrong("It needs Python: leave it out with --no-python.")
    return StartMethod.EXEC


def _preload(setting: Setting, start_method: StartMethod) -> tuple[str, ...]:
    modules = grammar.modules(setting)
    if modules and start_method is StartMethod.EXEC:
        raise setting.wrong("Only --start-method warm imports modules before the workers: leave one of them out.")
    return modules


def _parallel(setting: Setting, kind: ProgramKind) -> Way | None:
    if not setting.value:
        return None
    way = way_named(setting.value)
    if kind is ProgramKind.EXECUTABLE:
        raise setting.wrong("It needs Python: leave it out with --no-python.")
    return way


def _restart_policy(settings: Settings, flags: Flags) -> RestartPolicy:
    first, most = grammar.backoff(settings["backoff"])
    return RestartPolicy(
        max_restarts=grammar.whole_number(settings["max_restarts"]),
        window_s=grammar.positive_seconds(settings["restart_window"]),
        backoff_s=first,
        backoff_max_s=most,
        early_stop=flags["early_stop"],
    )


def _output(settings: Settings, environ: Mapping[str, str]) -> OutputSpec:
    keep_files = settings["log_dir"].value != _NO_FILES
    filters = [settings["duplicate_stdout_filters"], settings["duplicate_stderr_filters"]]
    for setting in filters:
        if setting.value and not keep_files:
            raise setting.wrong(f"It writes a log file: leave it out, or leave --log-dir {_NO_FILES} out.")
    return OutputSpec(
        log_dir=_path(settings["log_dir"]) if keep_files else None,
        keep_files=keep_files,
        redirects=grammar.streams(settings["redirects"]),
        tee=grammar.streams(settings["tee"]),
        local_ranks_filter=grammar.local_ranks(settings["local_ranks_filter"]),
        stdout_filters=grammar.texts(filters[0]),
        stderr_filters=grammar.texts(filters[1]),
        line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    )


def _nodes(
    settings: Settings, flags: Flags, environ: Mapping[str, str], new_run_id: str
) -> tuple[str, RendezvousSpec | None]:
    """The run's id, and how its nodes meet. A run that says nothing of nodes does not load what understands it."""
    if all(settings[dest].is_default for dest in _ABOUT_NODES):
        return settings["rdzv_id"].value or new_run_id, None
    from .nodes import rendezvous_spec, run_id  # noqa: PLC0415

    rendezvous = rendezvous_spec(settings, environ, standalone=flags["standalone"])
    return run_id(settings["rdzv_id"], rendezvous, new_run_id), rendezvous


def _meeting(settings: Settings, *, standalone: bool) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT (0: a free one) on one node: given ones count for a static run, as in torchrun."""
    local = grammar.host(settings["local_addr"]) or "127.0.0.1"
    address, port = grammar.host(settings["master_addr"]), grammar.port(settings["master_port"])
    if standalone or settings["rdzv_backend"].value != "static":
        return local, 0
    if settings["rdzv_endpoint"].value:
        from .endpoints import static_endpoint  # noqa: PLC0415  -- few runs on one node have one

        if endpoint := static_endpoint(settings):
            return endpoint.host, (port or 0) if endpoint.port is None else endpoint.port
    return (local if settings["master_addr"].is_default else address or local), port or 0


def _path(setting: Setting) -> Path | None:
    return Path(setting.value) if setting.value.strip() else None
