"""The terminal: whether a person is there; and its settings, which a program killed at a prompt leaves changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def watched(fd: int) -> bool:
    """Whether a descriptor is a terminal that a person looks at.

    It is if our session is led from it, or if another of our standard streams is on it too. ``srun -u`` and Open MPI's
    ``mpirun`` make one for stdout alone, so that programs print by lines, and read it themselves.
    """
    if not os.isatty(fd):
        return False
    try:
        os.tcgetpgrp(fd)
    except OSError:  # ENOTTY: another session's, or nobody's
        here = os.fstat(fd).st_rdev
        return any(os.isatty(other) and os.fstat(other).st_rdev == here for other in {0, 1, 2} - {fd})
    return True


def can_draw() -> bool:
    """Whether the terminal moves its cursor on demand."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "")


@contextmanager
def restored() -> Iterator[None]:
    """Give the terminal on standard input back as it was; does nothing where there is none."""
    if not os.isatty(0):
        yield
        return
    import termios

    before = termios.tcgetattr(0)
    try:
        yield
    finally:
        # A job in the background may not set them, and would be stopped for trying (SIGTTOU).
        previous = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            if termios.tcgetattr(0) != before:
                termios.tcsetattr(0, termios.TCSADRAIN, before)
        except termios.error:
            pass
        signal.signal(signal.SIGTTOU, previous)
