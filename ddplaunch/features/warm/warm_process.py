"""Handles of two processes: a run's zygote that a warm zygote has forked; a warm zygote that is still starting."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from ddplaunch.features.warm.rank.warm_messages import GuardianExited
from ddplaunch.features.warm.warm_client import receive_reply
from ddplaunch.system.processes import proc_utils


class WarmZygote:
    """Handle of a run's zygote that a warm zygote has forked; its parent is a guardian, which reports its exit."""

    def __init__(self, guardian_socket: socket.socket, warm_start: WarmStart | None) -> None:
        """``guardian_socket`` leads to the guardian; ``warm_start``: the warm zygote, if it is still importing."""
        self._guardian_socket, self._warm_start = guardian_socket, warm_start
        self._pidfd: int | None = None
        self.pid = warm_start.pid if warm_start else 0
        self.unkillable: Sequence[str] = ()

    def on_ready(self, pid: int, pidfd: int | None) -> None:
        self.pid, self._pidfd = pid, pidfd
        self._close_warm_start()

    def _close_warm_start(self) -> None:
        if self._warm_start:
            self._warm_start.close()
            self._warm_start = None

    def kill(self) -> None:
        if self._warm_start:
            self._warm_start.kill()
        elif self.pid:
            proc_utils.send_signal(self.pid, signal.SIGKILL, self._pidfd)

    def wait(self, timeout_s: float) -> int | None:
        exit_message: GuardianExited | None = receive_reply(self._guardian_socket, timeout_s)
        if exit_message is None:
            self.kill()
            exit_message = receive_reply(self._guardian_socket, timeout_s)
        self._guardian_socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._close_warm_start()
        self.unkillable = exit_message["stuck"] if exit_message else ()
        return exit_message["status"] if exit_message else None


class WarmStart:
    """A warm zygote that this launcher has started and that is still importing: it ends if the launcher ends."""

    def __init__(self, pid: int, pidfd: int | None, lifeline: socket.socket, path: str) -> None:
        self.pid = pid
        self._pidfd, self._lifeline, self._path = pidfd, lifeline, path

    def kill(self) -> None:
        proc_utils.send_signal(self.pid, signal.SIGKILL, self._pidfd)
        with suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))  # unless other warm zygotes have sockets in it

    def close(self) -> None:
        self._lifeline.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
