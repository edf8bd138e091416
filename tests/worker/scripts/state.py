# ruff: noqa: E402, PTH109, PTH123, PTH208 -- what is imported is part of what is looked at
"""Prints, as JSON, all that a script can see of the process that it finds itself in."""

import sys

modules = sorted(sys.modules)  # before anything that this script imports
main_names = sorted(globals())
importer_cache = sorted(str(folder) for folder, finder in sys.path_importer_cache.items() if finder)

import _imp
import builtins
import faulthandler
import gc
import json
import locale
import multiprocessing
import os
import resource
import signal
import site
import stat
import threading
import time
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

SYS = """argv orig_argv path flags executable _base_executable prefix base_prefix exec_prefix warnoptions _xoptions
    dont_write_bytecode pycache_prefix platlibdir version excepthook unraisablehook displayhook breakpointhook
    ps1 tracebacklimit last_value last_type last_exc"""


def stream(name: str) -> Any:
    file = getattr(sys, name)
    if file is None:
        return None
    assert file is getattr(sys, f"__{name}__")
    names = ("encoding", "errors", "line_buffering", "write_through", "newlines", "name", "mode", "closed")
    found = {attribute: getattr(file, attribute) for attribute in names}
    buffer = file.buffer
    raw = getattr(buffer, "raw", buffer)
    calls = {f"{call}()": getattr(file, call)() for call in ("seekable", "readable", "writable", "isatty", "fileno")}
    lower = {
        "name": raw.name,
        "mode": raw.mode,
        "closefd": raw.closefd,
        "type": str(type(buffer)),
        "raw": str(type(raw)),
    }
    return {
        **found,
        **calls,
        **lower,
        "seekable": buffer.seekable(),
        "type": str(type(file)),
        "dict": sorted(vars(file)),
    }


def descriptors() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found[fd] = stat.filemode(os.fstat(fd).st_mode)[0] + str(os.get_inheritable(fd))
        except OSError:
            continue
    return found


def depth() -> int:
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame:
        frame, count = frame.f_back, count + 1
    return count


def attributes(names: Sequence[str], of: object = sys) -> dict[str, str]:
    return {name: repr(getattr(of, name, "absent")) for name in names}


def status(*fields: str) -> dict[str, str]:
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {field: lines[field].strip() for field in fields}


main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "modules": modules,
            "main": main_names,
            "main attributes": attributes(
                ["__name__", "__file__", "__package__", "__doc__", "__cached__", "__annotations__"], main
            ),
            "spec": [getattr(__spec__, name, None) for name in ("name", "origin", "cached", "parent", "has_location")],
            "loader": str(type(globals()["__loader__"])),
            "builtins is module": __builtins__ is builtins,
            "builtins": sorted(vars(builtins)),
            "sys": attributes(SYS.split()),
            "importer cache": importer_cache,
            "meta path": [str(getattr(finder, "__name__", type(finder))) for finder in sys.meta_path],
            "path hooks": len(sys.path_hooks),
            "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()],
            "hooks": [threading.gettrace(), repr(threading.excepthook)],
            "depth": depth(),
            "import lock": _imp.lock_held(),
            "site": [site.ENABLE_USER_SITE, site.USER_SITE, site.PREFIXES],
            "environment": dict(os.environ),
            "streams": {name: stream(name) for name in ("stdin", "stdout", "stderr")},
            "descriptors": descriptors(),
            "signals": {int(number): repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
            "kernel's signals": status("SigBlk", "SigIgn", "SigCgt", "ShdPnd"),
            "wakeup": signal.set_wakeup_fd(-1),
            "timers": [
                signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
            ],
            "umask": os.umask(0o22),
            "cwd": os.getcwd(),
            "ids": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getuid(), os.getgid(), os.getgroups()],
            "nice": [os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
            "rlimits": {
                name: resource.getrlimit(getattr(resource, name))
                for name in dir(resource)
                if name.startswith("RLIMIT_")
            },
            "locale": [
                locale.setlocale(locale.LC_ALL),
                locale.getpreferredencoding(False),
                sys.getfilesystemencoding(),
            ],
            "errors": [sys.getfilesystemencodeerrors(), sys.getdefaultencoding()],
            "threads": [repr(thread.name) for thread in threading.enumerate()],
            "native id": threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
            "tasks": len(os.listdir("/proc/self/task")),
            "multiprocessing": [
                multiprocessing.current_process().name,
                multiprocessing.current_process().pid == os.getpid(),
                multiprocessing.parent_process() is None,
                multiprocessing.active_children(),
                multiprocessing.get_start_method(),
                vars(multiprocessing.process)["ORIGINAL_DIR"],
            ],
            "warnings": list(map(repr, warnings.filters)),
            "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
            "faulthandler": faulthandler.is_enabled(),
            "zone": time.tzname,
            "comm": status("Name", "Umask", "NoNewPrivs", "Seccomp", "CapEff"),
        },
        default=str,
        indent=1,
    )
)
