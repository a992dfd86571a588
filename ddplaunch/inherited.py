"""The signals as this process inherited them: reset where it relies on them itself, kept for its ranks."""

from __future__ import annotations

import signal


class SignalState:
    """What is ignored and blocked in a process when it begins."""

    def __init__(self) -> None:
        self.ignores_children = False  # SIGCHLD: the kernel then reaps children, and no exit status is left
        self.blocked: frozenset[int] = frozenset()

    def take(self) -> None:
        """Note the state of this process, and have children reported to it.

        The event loop unblocks each signal once it has a handler: until then a warning may wait.
        """
        self.ignores_children = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.blocked = frozenset(map(int, signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))))


AT_START = SignalState()
"""Of this process; ``take`` is called before it starts any other."""
