"""The socket on which a rank's faulthandler writes its stacks when native code has failed.

The socket has room for the first words only, so the process waits in its handler of the fatal signal until the
launcher reads. Meanwhile the other threads of the process answer an inspection: later, nobody knows its collectives.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from ddplaunch.base.event_loop import EventLoop

_CHUNK = 1 << 16


class CrashSocket:
    """The launcher's end of a rank's crash socket, open from before the rank starts until it has ended."""

    def __init__(self, loop: EventLoop, on_crash: Callable[[], None], on_output: Callable[[bytes], None]) -> None:
        """Open the socket; OSError: too many files are open.

        ``on_crash`` is called once, when the process, or a child that it has forked, has begun to write. The writer
        then waits until ``release`` is called. ``on_output`` gets what is written.
        """
        self._loop, self._on_crash, self._on_output = loop, on_crash, on_output
        self._socket, rank_socket = socket.socketpair()
        rank_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: some five short writes
        self.rank_fd = rank_socket.detach()  # the rank's end, to be sent to the zygote
        self._socket.setblocking(False)
        loop.watch_fd(self._socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        self._unwatch()
        try:
            has_begun = bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            has_begun = False
        if has_begun:
            self._on_crash()
        else:
            self.close()

    def release(self) -> None:
        """Read the socket from now on, so that the crashed process, which waits for this, can end."""
        if self._socket.fileno() >= 0:
            self._loop.watch_fd(self._socket.fileno(), self.read_pending)

    def read_pending(self) -> None:
        """Read all that has arrived."""
        try:
            while self._socket.fileno() >= 0 and (data := self._socket.recv(_CHUNK)):
                self._on_output(data)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        self._unwatch()
        self._socket.close()

    def _unwatch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.unwatch_fd(self._socket.fileno())
