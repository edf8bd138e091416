"""Whether the kernel's out-of-memory killer has struck: told from the counters that it keeps."""

from __future__ import annotations

from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes the kernel has killed for lack of memory, in our cgroup or else on this host.

    A difference between two readings around a SIGKILL that nobody here sent tells its cause. None where neither
    can be read. Source: Documentation/admin-guide/cgroup-v2.rst (memory.events), cgroup-v1/memory.rst, vmstat.
    """
    for path in _counter_files(proc, cgroups):
        count = _count(path)
        if count is not None:
            return count
    return _count(proc / "vmstat")


def _counter_files(proc: Path, cgroups: Path) -> list[Path]:
    files = []
    for line in _lines(proc / "self" / "cgroup"):
        _number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            files.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _count(path: Path) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
