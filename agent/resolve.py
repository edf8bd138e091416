"""How many workers this node runs: the wish of ``--nproc-per-node`` becomes a fact, once.

torch is asked, in the user's own interpreter, only where the kernel shows a device that it could drive; so a machine
without an accelerator answers at once. The counts are those of torch 2.13 ``determine_local_world_size``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dlaunch.errors import ConfigurationError, TemporaryFailure

# NVIDIA, AMD (kfd), NVIDIA under WSL (dxg), Intel and others (render nodes, accel)
_NVIDIA_OR_AMD = ("nvidia[0-9]*", "kfd", "dxg")
_ANY_ACCELERATOR = (*_NVIDIA_OR_AMD, "dri/renderD*", "accel/*")
_DEVICE_NODES = {"gpu": _NVIDIA_OR_AMD, "xpu": ("dri/renderD*",), "auto": _ANY_ACCELERATOR}
_ASK_TIMEOUT_S = 300.0  # importing torch from a cold network disk can take minutes

_COUNTS = {
    "gpu": "torch.cuda.device_count() if torch.cuda.is_available() else 0",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else 0"
    " if hasattr(torch, 'accelerator') else torch.cuda.device_count() if torch.cuda.is_available() else 0",
}
# The current folder leaves the path, where a file called torch.py would be taken for torch; the answer is marked,
# because an import may print.
_PROGRAM = "import sys; sys.path[:] = [p for p in sys.path if p]; import torch; print('\\ndevices:', {count})"


def resolve_local_world_size(
    wish: str, interpreter: str, environ: Mapping[str, str], devices: Path = Path("/dev")
) -> int:
    """The number of workers for ``wish``: digits, "auto", "cpu", "gpu" or "xpu".

    ``interpreter`` is the Python that holds torch, ``environ`` what it runs with, ``devices`` the folder of the
    kernel's device nodes. Raises ConfigurationError where there is no such device or torch cannot tell, and
    TemporaryFailure where torch did not answer in time.
    """
    if wish.isdigit():
        return int(wish)
    if wish == "cpu":
        return cpu_count()
    count = 0
    if has_device_node(wish, devices):
        count = _ask_torch(wish, interpreter, environ)
    if count == 0 and wish != "auto":
        raise ConfigurationError(f"--nproc-per-node is {wish!r}, but no such device was found here.", _fix())
    return count or cpu_count()


def cpu_count() -> int:
    """The CPUs that this process may use, as torch counts them."""
    return len(os.sched_getaffinity(0))


def has_device_node(wish: str, devices: Path) -> bool:
    """Whether the kernel shows any device of the wished kind."""
    return any(next(devices.glob(pattern), None) is not None for pattern in _DEVICE_NODES[wish])


def _ask_torch(wish: str, interpreter: str, environ: Mapping[str, str]) -> int:
    command = [interpreter, "-c", _PROGRAM.format(count=_COUNTS[wish])]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
            env=dict(environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemporaryFailure(f"torch did not count its devices within {_ASK_TIMEOUT_S:g} s.", _fix()) from None
    except OSError as error:
        raise ConfigurationError(f"{interpreter} could not be asked for devices: {error.strerror}.", _fix()) from None
    return _count_in(answer, interpreter)


def _count_in(answer: subprocess.CompletedProcess[bytes], interpreter: str) -> int:
    _, _, count = answer.stdout.rpartition(b"\ndevices: ")
    if answer.returncode == 0 and count.strip().isdigit():
        return int(count)
    said = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise ConfigurationError(f"{interpreter} could not count the devices: {said or 'no answer'}.", _fix())


def _fix() -> str:
    return "Give --nproc-per-node cpu, or a number."
