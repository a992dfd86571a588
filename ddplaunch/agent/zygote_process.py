"""A zygote as a process, started, killed and waited for: either a child of ours, or forked from a warm one."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent import limits
from ddplaunch.agent.children import ChildProcess
from ddplaunch.control.relay import FORWARDED_SIGNALS
from ddplaunch.rank import processes

if TYPE_CHECKING:
    from typing import Protocol

    from ddplaunch.rank.messages import GuardianExited, ZygoteConfig
else:
    Protocol = object

ZYGOTE_SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "zygote.py")

_EXIT_TIMEOUT_S = 6.0  # seconds that a zygote has to end what is below it before it is killed (over KILL_TIMEOUT_S)


class ZygoteProcess(Protocol):
    @property
    def pid(self) -> int: ...
    @property
    def unkillable(
        self,
    ) -> Sequence[str]: ...  # what is left of its ranks, and cannot be killed, once it was waited for
    def on_ready(self, pid: int, pidfd: int | None) -> None: ...  # it is ready
    def kill(self) -> None: ...
    def wait(self) -> int | None: ...  # the wait status, None where nobody knows it; killed after _EXIT_TIMEOUT_S


def spawn_zygote(
    config: ZygoteConfig,
    child_socket: socket.socket,
    environment: Mapping[str, str],
    title_bytes: int,
    fds: Sequence[int],
) -> int:
    """Start a zygote as our child, which has ``child_socket``; return its pid. ``fds`` become its stdin, stdout, stderr.

    ``title_bytes``: bytes of its command line that ranks write theirs over.

    Raises:
        OSError: there can be no more processes.
    """
    child_socket.set_inheritable(True)
    with limits.original_nofile_limit():
        # A session of its own: Ctrl-C in the terminal is for us to pass on.
        return os.posix_spawn(
            sys.executable,
            [sys.executable, ZYGOTE_SCRIPT, str(child_socket.fileno()), json.dumps(config), "-" * title_bytes],
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
            setsid=True,
            setsigmask={*config["shielded"], *FORWARDED_SIGNALS},  # until it ignores or hears them
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores, and a program should not
        )


class OwnZygote:
    """Our child, for this run alone."""

    unkillable: Sequence[str] = ()  # what it leaves is ours to end

    def __init__(self, config: ZygoteConfig, theirs: socket.socket, environment: Mapping[str, str], room: int) -> None:
        """Start it.

        Raises:
            OSError: there can be no more processes.
        """
        self._child = ChildProcess(spawn_zygote(config, theirs, environment, room, ()))

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
    """A fork of a warm zygote, below a guardian, which tells us of its end."""

    def __init__(self, guardian_socket: socket.socket, warm_start: WarmStart | None) -> None:
        """``guardian_socket`` is the guardian's; ``warm_start`` is the warm zygote, where that has yet to import."""
        self._line, self._starting = guardian_socket, warm_start
        self._pidfd: int | None = None
        self.pid = warm_start.pid if warm_start else 0
        self.unkillable: Sequence[str] = ()

    def on_ready(self, pid: int, pidfd: int | None) -> None:
        self.pid, self._pidfd = pid, pidfd
        if self._starting:
            self._starting.close()
            self._starting = None

    def kill(self) -> None:
        if self._starting:
            self._starting.kill()
        elif self.pid:
            processes.send_signal(self.pid, signal.SIGKILL, self._pidfd)

    def wait(self) -> int | None:
        from ddplaunch.warm.asking import receive_reply

        ended: GuardianExited | None = receive_reply(self._line, _EXIT_TIMEOUT_S)
        if ended is None:
            self.kill()
            ended = receive_reply(self._line, _EXIT_TIMEOUT_S)
        self._line.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._starting:
            self._starting.close()
            self._starting = None
        self.unkillable = ended["stuck"] if ended else ()
        return ended["status"] if ended else None


class WarmStart:
    """A warm zygote that we have started, until it has imported all: so long it goes when we go."""

    def __init__(self, pid: int, pidfd: int | None, lifeline: socket.socket, path: str) -> None:
        self.pid = pid
        self._pidfd, self._tie, self._path = pidfd, lifeline, path

    def kill(self) -> None:
        processes.send_signal(self.pid, signal.SIGKILL, self._pidfd)
        with suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))  # unless there are others

    def close(self) -> None:
        self._tie.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
