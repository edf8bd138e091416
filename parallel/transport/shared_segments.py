"""Memory that all ranks of one host map, without a name that a crash could leave behind.

Each rank makes an anonymous file (``memfd_create``) and the others open it through ``/proc/<pid>/fd``. It is gone with
the last process that maps it, however that ends, and does not count against the size of /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .byte_gather import all_gather_bytes

_TOKEN_BYTES = 16
_CPU = torch.device("cpu")


def host_identity() -> bytes:
    """The same for two processes if, and only if, they can open each other's files under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}".encode()


@dataclass(frozen=True)
class Segments:
    """One mapping for each rank of a group, in order of ranks, and the ranks' process ids."""

    maps: tuple[mmap.mmap, ...]
    pids: tuple[int, ...]


def map_segments(size: int, group: dist.ProcessGroup) -> Segments | None:
    """Make a segment of ``size`` bytes on each rank and map those of all; all ranks of the group call this together.

    Returns:
        The segments, or ``None`` on every rank if any rank could not map one (a sandbox may hide /proc).
    """
    own = os.memfd_create("dlaunch-ddp", os.MFD_CLOEXEC)
    try:
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.ftruncate(own, size)
        os.pwrite(own, token, 0)
        told = all_gather_bytes(f"{os.getpid()} {own} ".encode() + token, _CPU, group)
        maps, pids = [], []
        for answer in told:
            pid, descriptor, its_token = answer.split(b" ", 2)
            pids.append(int(pid))
            maps.append(_open_segment(int(pid), int(descriptor), size, its_token))
        # Every rank has opened every file once this returns: the descriptors may go.
        everyone_has_all = all_gather_bytes(b"1" if None not in maps else b"0", _CPU, group)
    finally:
        os.close(own)
    if set(everyone_has_all) != {b"1"}:
        return None
    return Segments(tuple(segment for segment in maps if segment is not None), tuple(pids))


def _open_segment(pid: int, descriptor: int, size: int, token: bytes) -> mmap.mmap | None:
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(opened, _TOKEN_BYTES, 0) != token:
            return None
        return mmap.mmap(opened, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
