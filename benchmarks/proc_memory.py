"""The memory of a process, from /proc."""

from __future__ import annotations

import re
from pathlib import Path


def memory_mb(pid: int, kind: str) -> float:
    """RSS or PSS of a process in MB (10^6 bytes); 0 for one that has just ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0
