"""The zygote as a process to start, kill and wait for: a child of the launcher, or a fork of a warm zygote."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.core.job.signal_forwarding import FORWARDED_SIGNALS
from ddplaunch.core.node import process_limits
from ddplaunch.core.node.child_processes import ChildProcess
from ddplaunch.core.rank import proc_utils
from ddplaunch.core.rank.zygote_messages import GuardianExited, ZygoteConfig

ZYGOTE_SCRIPT = os.path.join(PACKAGE_DIR, "core", "rank", "zygote.py")

_EXIT_TIMEOUT_S = 6.0  # for a zygote to kill its descendants, before it is killed itself (more than KILL_TIMEOUT_S)


class ZygoteProcess(Protocol):
    @property
    def pid(self) -> int: ...
    @property
    def unkillable(self) -> Sequence[str]: ...  # after ``wait``: its descendants that cannot be killed
    def on_ready(self, pid: int, pidfd: int | None) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int | None: ...  # the wait status, None if unknown; kills it after _EXIT_TIMEOUT_S


def spawn_zygote(
    config: ZygoteConfig,
    child_socket: socket.socket,
    environment: Mapping[str, str],
    title_bytes: int,
    fds: Sequence[int],
) -> int:
    """Start a zygote as a child process that inherits ``child_socket``; return its pid.

    ``fds`` become its stdin, stdout and stderr. ``title_bytes``: bytes of its command line that ranks overwrite with
    theirs.

    Raises:
        OSError: the limit of processes or memory is reached.
    """
    child_socket.set_inheritable(True)
    with process_limits.original_nofile_limit():
        # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which passes it on.
        return os.posix_spawn(
            sys.executable,
            [sys.executable, ZYGOTE_SCRIPT, str(child_socket.fileno()), json.dumps(config), "-" * title_bytes],
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
            setsid=True,
            setsigmask={*config["shielded_signals"], *FORWARDED_SIGNALS},  # until it ignores or handles them
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these, and a program should not inherit that
        )


class OwnZygote:
    """A zygote that is a child of the launcher, for this run alone."""

    unkillable: Sequence[str] = ()  # the launcher adopts its descendants, and kills them itself

    def __init__(
        self, config: ZygoteConfig, child_socket: socket.socket, environment: Mapping[str, str], title_bytes: int
    ) -> None:
        """Start it; see ``spawn_zygote``."""
        self._child = ChildProcess(spawn_zygote(config, child_socket, environment, title_bytes, ()))

    @property
    def pid(self) -> int:
        return self._child.pid

    def on_ready(self, pid: int, pidfd: int | None) -> None:
        pass

    def kill(self) -> None:
        self._child.kill()

    def wait(self) -> int | None:
        return self._child.wait(_EXIT_TIMEOUT_S)


class WarmZygote:
    """A fork of a warm zygote; its parent is a guardian, which reports its exit."""

    def __init__(self, guardian_socket: socket.socket, warm_start: WarmStart | None) -> None:
        """``guardian_socket`` leads to the guardian; ``warm_start``: the warm zygote, if it is still importing."""
        self._guardian_socket, self._warm_start = guardian_socket, warm_start
        self._pidfd: int | None = None
        self.pid = warm_start.pid if warm_start else 0
        self.unkillable: Sequence[str] = ()

    def on_ready(self, pid: int, pidfd: int | None) -> None:
        self.pid, self._pidfd = pid, pidfd
        if self._warm_start:
            self._warm_start.close()
            self._warm_start = None

    def kill(self) -> None:
        if self._warm_start:
            self._warm_start.kill()
        elif self.pid:
            proc_utils.send_signal(self.pid, signal.SIGKILL, self._pidfd)

    def wait(self) -> int | None:
        from ddplaunch.features.warm.warm_client import receive_reply

        exit_message: GuardianExited | None = receive_reply(self._guardian_socket, _EXIT_TIMEOUT_S)
        if exit_message is None:
            self.kill()
            exit_message = receive_reply(self._guardian_socket, _EXIT_TIMEOUT_S)
        self._guardian_socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._warm_start:
            self._warm_start.close()
            self._warm_start = None
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
