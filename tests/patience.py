"""How long to wait on this machine, at this minute: deadlines of tests are those of a quiet one, times its slowness."""

import os
import time

_WORK = 2_000_000
QUIET = 0.065
"""Seconds of CPU time that the work of a probe takes on a core of 2024."""

_FRESH = 60.0
"""Seconds for which a probe counts."""

_probed_at, _slowness = float("-inf"), 1.0


def machine_slowness() -> float:
    """How much longer this machine takes now than a quiet one: at least 1, found out anew every minute."""
    global _probed_at, _slowness
    if time.monotonic() - _probed_at > _FRESH:
        began = time.thread_time()  # others that run meanwhile are counted by ``processes_per_core``
        for _ in range(_WORK):
            pass
        _slowness = max(1.0, (time.thread_time() - began) / QUIET)
        _probed_at = time.monotonic()
    return _slowness


def processes_per_core() -> float:
    """How many share a core, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def scaled_timeout(seconds: float) -> float:
    """So many seconds of a quiet machine."""
    return seconds * machine_slowness() * processes_per_core()
