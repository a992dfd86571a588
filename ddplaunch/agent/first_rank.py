"""Rank 0's ties: the socket that its store listens on, and the hold that keeps it, and so the store, for the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from ddplaunch.control.port import Port
from ddplaunch.loop import Loop


class FirstRank:
    """One attempt's rank 0: when its program has ended it says so, and its process waits until it is released."""

    def __init__(self, loop: Loop, finished: Callable[[], None]) -> None:
        """``finished`` is called once when its program has ended well."""
        self._loop = loop
        self._finished = finished
        self._hold: socket.socket | None = None

    def descriptors(self, port: Port, *, peers: bool) -> dict[str, int]:
        """What its process is given; without ``peers`` nobody else needs the store."""
        fds = {}
        if peers:
            self._hold, theirs = socket.socketpair()
            fds["hold"] = theirs.detach()
        try:
            fds["store"] = port.listen().detach()
        except BaseException:
            for fd in fds.values():
                os.close(fd)
            raise
        return fds

    @property
    def held(self) -> bool:
        return self._hold is not None

    def watch(self) -> None:
        """Its process is there."""
        if self._hold is not None:
            self._loop.watch(self._hold.fileno(), self._heard)

    def _heard(self) -> None:
        """It says that it is done, or has gone."""
        assert self._hold is not None
        self._loop.forget(self._hold.fileno())
        if self._hold.recv(16):
            self._finished()

    def release(self) -> None:
        """Let its process end."""
        if self._hold is not None:
            self._loop.forget(self._hold.fileno())
            self._hold.close()
            self._hold = None
