"""One sentence of advice for a failure, by its kind: a pure function."""

from __future__ import annotations

import re
import signal

from dlaunch.outcome import ExceptionInfo, Failure, FailureKind
from dlaunch.spec import ProgramKind

_BY_SIGNAL = {
    signal.SIGSEGV: "A crash in native code: set PYTHONFAULTHANDLER=1 to see where Python was.",
    signal.SIGBUS: "Often shared memory ran out: see df -h /dev/shm, and give the container more or use fewer workers.",
    signal.SIGKILL: "Somebody killed it, or its container's memory limit did: see dmesg and the container's events.",
    signal.SIGABRT: "Native code gave up (an assertion, a C++ exception, a watchdog): its last lines say why.",
    signal.SIGTERM: "Somebody asked this process to end, for instance a scheduler, not dlaunch.",
    signal.SIGINT: "Somebody interrupted this process alone, not dlaunch.",
    signal.SIGILL: "An instruction that this CPU lacks: a library was built for a newer one.",
    signal.SIGFPE: "An integer division by zero in native code: set PYTHONFAULTHANDLER=1 to see where Python was.",
    signal.SIGPIPE: "It wrote to a pipe or socket whose reader was gone.",
    signal.SIGXCPU: "It used up its limit of CPU time: see ulimit -t.",
    signal.SIGXFSZ: "A file grew beyond the limit: see ulimit -f.",
}

# The first that matches "Type: message" counts, so the special ones stand before the general ones.
_BY_EXCEPTION = (
    (
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "The GPU ran out of memory: use a smaller batch, activation checkpointing or sharding, and look with nvidia-smi"
        " for other processes on it.",
    ),
    (
        r"invalid device ordinal|device >= 0 && device < num_gpus",
        "There are more workers than visible GPUs: lower --nproc-per-node, or check CUDA_VISIBLE_DEVICES.",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "Another process has that port: leave --master-port out and dlaunch takes a free one.",
    ),
    (
        r"DataLoader worker .*(exited unexpectedly|is killed)|unable to .*shared memory|No space left .*shm",
        "A data loading process died, often for lack of shared memory or memory: see df -h /dev/shm, or lower"
        " num_workers.",
    ),
    (
        r"Connection (closed|reset) by peer|Socket Timeout|NCCL (error|communicator|timeout)|DistBackendError"
        r"|Broken pipe|Timed out waiting|heartbeat|DistNetworkError|DistStoreError",
        "It lost a peer or waited for one too long: see whether another rank failed or was stuck before it.",
    ),
    (r"^(ModuleNotFoundError|ImportError)", ""),  # told by _import_hint
    (r"^FileNotFoundError", "Relative paths start in the folder in which dlaunch was started."),
    (r"^PermissionError", "The user who runs dlaunch may not do that: check owner and permissions."),
    (r"No space left on device", "A disk is full: see df -h."),
    (r"Too many open files", "Raise the limit with ulimit -n, or lower the number of data loading processes."),
    (r"^MemoryError", "The host ran out of memory, or a ulimit is set: use less per worker, or fewer workers."),
    (
        r"Default process group has not been initialized",
        "Call torch.distributed.init_process_group() before collectives and before wrapping the model.",
    ),
    (
        r"^KeyError: '(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
        "dlaunch sets this variable; the script or something it started must have removed it.",
    ),
)


def hint(failure: Failure, program: ProgramKind = ProgramKind.SCRIPT) -> str:
    """What to look at or to change, in one sentence; empty where the failure says it all."""
    match failure.kind:
        case FailureKind.EXCEPTION:
            return _exception_hint(failure.exception) if failure.exception else ""
        case FailureKind.EXIT:
            return _exit_hint(failure, program)
        case FailureKind.SIGNAL:
            return _signal_hint(failure)
        case FailureKind.OOM_KILL:
            return "The kernel killed it for lack of memory: use less per worker or fewer workers, or raise the limit."
        case FailureKind.NOT_STARTED:
            return "Check that the program exists, is executable and is built for this machine."
        case FailureKind.INFRASTRUCTURE:
            return "A process of dlaunch's own ended: if nobody killed it, please report it."


def _exception_hint(exception: ExceptionInfo) -> str:
    told = f"{exception.type.rpartition('.')[2]}: {exception.message}"
    for pattern, sentence in _BY_EXCEPTION:
        if re.search(pattern, told):
            return sentence or _import_hint(exception)
    return ""


def _import_hint(exception: ExceptionInfo) -> str:
    missing = re.search(r"No module named '([^']+)'", exception.message)
    if missing:
        return f"Install {missing[1].partition('.')[0]} for the Python that runs the workers, or check PYTHONPATH."
    return "The module was found but could not be loaded: check its version, and for a file of yours that hides it."


def _exit_hint(failure: Failure, program: ProgramKind) -> str:
    code = failure.status.code if failure.status else None
    if program is ProgramKind.EXECUTABLE:
        return "The program ended by itself with this exit code: its last lines may say why."
    if not failure.finalized:
        return "It ended without Python's normal end (os._exit, or exit() in native code): its last lines may say why."
    if code == 2:
        return "sys.exit(2) is how argparse refuses arguments: check what stands after the script."
    return "The script ended itself (sys.exit): its last lines may say why."


def _signal_hint(failure: Failure) -> str:
    number = failure.status.signal if failure.status else None
    return next((sentence for known, sentence in _BY_SIGNAL.items() if known == number), "")
