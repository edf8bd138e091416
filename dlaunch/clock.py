"""The clock that every duration and deadline of a run is measured with."""

import time


def now() -> float:
    """Seconds on CLOCK_BOOTTIME: one clock for all processes of a host, and it runs through a suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
