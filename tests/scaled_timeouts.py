"""Timeouts of tests, scaled by the current speed and load of the machine."""

import os
import time

_WORK = 2_000_000
QUIET = 0.065
"""CPU seconds of a probe on a core of 2024."""

_FRESH = 60.0
"""Seconds after which the speed is measured again."""

_probed_at, _slowness = float("-inf"), 1.0


def machine_slowness() -> float:
    """Return how many times slower this machine is than an idle one of 2024, at least 1; measured every minute."""
    global _probed_at, _slowness
    if time.monotonic() - _probed_at > _FRESH:
        began = time.thread_time()  # CPU time: ``processes_per_core`` accounts for other processes
        for _ in range(_WORK):
            pass
        _slowness = max(1.0, (time.thread_time() - began) / QUIET)
        _probed_at = time.monotonic()
    return _slowness


def processes_per_core() -> float:
    """Return the load per core, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def scaled_timeout(seconds: float) -> float:
    """Scale a timeout by the slowness and the load of this machine."""
    return seconds * machine_slowness() * processes_per_core()
