"""Which processes below us came of us: the shell that became us by ``exec`` may have left us children of its own.

While a zygote lives, all that came of its ranks is below it. Where it is killed, that falls to us, among whatever
strangers lose their parents, as we adopt orphans.
"""

from __future__ import annotations

import os

from ddplaunch.agent.temporary import Temporary
from ddplaunch.rank import processes


class Kin:
    """Tells ours from strangers; without strangers at the start, all that is below us is ours."""

    def __init__(self, temporary: Temporary) -> None:
        """Look who is there already; the path of ``temporary`` is in the environment of whatever a rank starts."""
        self._strangers = frozenset(processes.children())
        self._temporary = temporary
        self._sessions: set[int] = set()
        self.guard: int | None = None
        """The process that all sidecars hang below, which looks after them itself."""

    def lead(self, pid: int) -> None:
        """This process of ours leads a session, which its children are in unless they leave it."""
        self._sessions.add(pid)

    def spares(self, pid: int) -> bool:
        """Whether a child of this process, born or adopted, did not come of the ranks; in doubt it did not."""
        if pid == self.guard or not self._strangers:
            return pid == self.guard
        return pid in self._strangers or not (self._session(pid) in self._sessions or self._has_mark(pid))

    def _session(self, pid: int) -> int:
        try:
            return os.getsid(pid)
        except OSError:
            return 0

    def _has_mark(self, pid: int) -> bool:
        if self._temporary.path is None:
            return False
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return os.fsencode(self._temporary.path) in file.read()
        except OSError:
            return False
