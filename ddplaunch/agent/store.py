"""What this node has of the job's store: its port and rank 0, in which it is, or the file of ``--init-method file://``."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from ddplaunch.control.port import Port
from ddplaunch.loop import Callback, Loop
from ddplaunch.plan.plan import Plan


class Store:
    """The port is ours until the end, and each attempt's rank 0 listens there; on other nodes there is nothing."""

    def __init__(self, plan: Plan, *, fresh: bool) -> None:
        """``fresh``: whether nobody else begins an attempt before us, so that each may have a new file.

        Raises:
            UsageError: the port is taken, or there is no such interface.
        """
        here = plan.hosts_store
        self.port = Port(plan.master_addr, plan.master_port, nnodes=plan.nnodes) if here else None
        method = plan.init_method or ""
        # torch makes the file, and nobody else removes it
        self.path = method.removeprefix("file://") if here and method.startswith("file://") else None
        self._fresh = fresh

    def begin(self) -> None:
        """An attempt begins: what an earlier one wrote would mislead it."""
        if self._fresh:
            self._remove()

    def close(self) -> None:
        self._remove()
        if self.port:
            self.port.close()

    def _remove(self) -> None:
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)


class FirstRank:
    """Rank 0's ties: the socket that its store listens on, and the hold that keeps its process until it is released."""

    def __init__(self, loop: Loop, finished: Callback) -> None:
        self._loop = loop
        self._finished = finished
        self._hold: socket.socket | None = None

    def descriptors(self, port: Port, *, peers: bool) -> dict[str, int]:
        """What its process is given; without ``peers`` nobody else needs the store."""
        if not peers:
            return {"store": port.listen().detach()}
        self._hold, theirs = socket.socketpair()
        with theirs:
            return {"store": port.listen().detach(), "hold": theirs.detach()}

    @property
    def held(self) -> bool:
        return self._hold is not None

    def watch(self) -> None:
        if self._hold is not None:
            self._loop.watch(self._hold.fileno(), self._heard)

    def _heard(self) -> None:
        """It says that it is done, or has gone."""
        if self._hold is not None:
            self._loop.forget(self._hold.fileno())
            if self._hold.recv(16):
                self._finished()

    def release(self) -> None:
        if self._hold is not None:
            self._loop.forget(self._hold.fileno())
            self._hold.close()
            self._hold = None
