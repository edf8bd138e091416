"""The figures of a benchmark as a JSON file in bench-results/, with the machine and the versions that they are of."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "bench-results"


def begin(schema: str) -> dict[str, Any]:
    """A document that names its schema, the machine and its load now, and the versions; the figures go into it."""
    return {
        "schema": schema,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "dlaunch": version("dlaunch"),
        "load_before": os.getloadavg(),
    }


def end(document: dict[str, Any], name: str) -> Path:
    """Note the load at the end, and write the document to ``<name>-<time>.json``; returns its path, to be shown."""
    document["load_after"] = os.getloadavg()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
