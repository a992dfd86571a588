"""The supervisor's end of the zygote: starts it, asks it for ranks, hears how they end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddplaunch.agent import channel
from ddplaunch.loop import Loop

_ZYGOTE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote.py")

OWN_ACCORD = 0.5
"""Seconds in which what a program left behind may end by itself before it is told to."""

LEFTOVER_GRACE = 5.0
"""Seconds at most that processes left behind by ranks that succeeded have for their own end."""

_LEAVE_PATIENCE = 6.0
"""Seconds that a zygote may take to end what is below it before it is killed (a little over KILL_PATIENCE)."""


class Nursery:
    """One zygote process, alive from construction to ``close``."""

    def __init__(
        self,
        loop: Loop,
        *,
        environment: Mapping[str, str],
        modules: Sequence[str],
        asked: Sequence[str],
        first: str,
        temporary: str | None,
        remove: Sequence[str],
        title: str,
        shielded: Sequence[int],
        hear: Callable[[dict[str, Any], list[int]], None],
        lost: Callable[[], None],
    ) -> None:
        """Start the zygote.

        Args:
            modules: what to import before forking; empty, and every rank is a fresh interpreter.
            asked: those of them that the user named, which must not fail.
            first: the folder that ranks have in front of ``sys.path``.
            temporary: a folder that it makes for the ranks' error files.
            remove: paths that it removes should we be killed.
            title: the longest command line that ``ps`` is to show for a rank.
            shielded: signals that are for us alone, though everything below gets them too; a rank may yet handle them.
            hear: called with each message; lost: called when it has ended unasked.
        """
        self._loop = loop
        self._hear, self._lost = hear, lost
        self.ready = self.killed = False
        ours, theirs = socket.socketpair()
        config = {
            "supervisor": os.getpid(),
            "modules": list(modules),
            "asked": list(asked),
            "first": first,
            "temporary": temporary,
            "remove": list(remove),
            "shielded": list(shielded),
            "unsafe": None,
        }
        theirs.set_inheritable(True)
        # A session of its own: Ctrl-C in the terminal is for us to pass on.
        self.pid = os.posix_spawn(
            sys.executable,
            [
                sys.executable,
                _ZYGOTE,
                str(theirs.fileno()),
                json.dumps(config),
                "-" * len(title.encode(errors="replace")),
            ],
            dict(environment),
            setsid=True,
            setsigmask=list(shielded),  # until it ignores them
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores, and a program should not inherit so
        )
        theirs.close()
        self._socket = ours
        loop.watch(ours.fileno(), self._readable)

    def spawn(self, rank: int, job: Mapping[str, Any], fds: Mapping[str, int]) -> None:
        """Ask for a rank; ``fds`` are duplicated to it by purpose ("stdin", "stdout", "stderr", "store", "hold")."""
        self._send({"op": "spawn", "rank": rank, "job": dict(job), "fds": list(fds)}, list(fds.values()))

    def sweep(self, grace: float, *, patience: float = OWN_ACCORD) -> None:
        """Ask for the end of all that is left below; answered by "swept".

        Args:
            grace: seconds between SIGTERM and SIGKILL. patience: seconds before SIGTERM, if there is any grace.
        """
        self._send({"op": "sweep", "grace": grace, "patience": patience})

    def kill(self) -> None:
        """End the zygote at once, and with it, by their parent-death signal, its ranks."""
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> int | None:
        """Let the zygote end whatever it still has and leave; return its wait status, None if it was closed before."""
        if self._socket.fileno() < 0:
            return None
        if not self.ready:
            self.kill()  # it has nothing to end yet, and may import for long
        self._loop.forget(self._socket.fileno())
        self._socket.close()
        if hasattr(os, "pidfd_open"):
            pidfd = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(_LEAVE_PATIENCE * 1000):
                self.kill()
            os.close(pidfd)
        return os.waitpid(self.pid, 0)[1]

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            channel.send(self._socket, message, fds)
        except OSError:
            pass  # it has gone; the end of file says so too

    def _readable(self) -> None:
        try:
            message, fds = channel.receive(self._socket)
        except (EOFError, OSError):
            self._loop.forget(self._socket.fileno())
            self._lost()
            return
        self.ready = self.ready or message["op"] == "ready"
        self._hear(message, fds)
