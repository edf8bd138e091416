"""Running a script of the tests as users do: a process for each rank, with the launcher's variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(
    script: str, folder: Path, world_size: int = 1, *, variables: dict[str, str] | None = None, launched: bool = True
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``script`` once for each rank and wait for all; without ``launched`` as a plain script."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DLAUNCH_")}
    common = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
    if launched:
        common |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if launched else {} for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            cwd=folder,
            env=common | place,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for place in places
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
