"""Says when it runs, in seconds on CLOCK_BOOTTIME, and ends."""

import time

print(f"at {time.clock_gettime(time.CLOCK_BOOTTIME):.6f}", flush=True)
