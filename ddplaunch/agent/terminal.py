"""The terminal's settings, which a program that is killed at a prompt (pdb, readline) leaves changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
