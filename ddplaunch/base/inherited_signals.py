"""The signal state that this process inherited; the launcher resets SIGCHLD, and keeps the state for its ranks."""

from __future__ import annotations

import signal


class SignalState:
    """Whether SIGCHLD was ignored, and which signals were blocked, when this process started."""

    def __init__(self) -> None:
        self.ignores_children = False  # SIGCHLD: the kernel then reaps children, and no exit status is left
        self.blocked: frozenset[int] = frozenset()

    def take(self) -> None:
        """Save the state, and reset SIGCHLD so that exit statuses are available.

        The event loop unblocks each signal once it has a handler: until then a preemption signal stays pending.
        """
        self.ignores_children = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.blocked = frozenset(map(int, signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))))


AT_START = SignalState()
"""The signal state of this process; ``take`` is called before this process starts another one."""
