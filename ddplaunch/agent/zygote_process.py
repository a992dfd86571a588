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
from ddplaunch.agent.children import Child
from ddplaunch.control.relay import FOR_RANKS
from ddplaunch.rank import processes

if TYPE_CHECKING:
    from typing import Protocol

    from ddplaunch.rank.messages import Config, GuardianEnded
else:
    Protocol = object

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "zygote.py")

_LEAVE_PATIENCE = 6.0  # seconds that a zygote has to end what is below it before it is killed (over KILL_PATIENCE)


class ZygoteProcess(Protocol):
    @property
    def pid(self) -> int: ...
    @property
    def stuck(self) -> Sequence[str]: ...  # what is left of its ranks, and cannot be killed, once it was waited for
    def born(self, pid: int, pidfd: int | None) -> None: ...  # it is ready
    def kill(self) -> None: ...
    def wait(self) -> int | None: ...  # the wait status, None where nobody knows it; killed after _LEAVE_PATIENCE


def start(config: Config, theirs: socket.socket, environment: Mapping[str, str], room: int, fds: Sequence[int]) -> int:
    """Start a zygote as our child, which has ``theirs``; return its pid. ``fds`` become its stdin, stdout, stderr.

    ``room``: bytes of its command line that ranks write theirs over.

    Raises:
        OSError: there can be no more processes.
    """
    theirs.set_inheritable(True)
    with limits.as_found():
        # A session of its own: Ctrl-C in the terminal is for us to pass on.
        return os.posix_spawn(
            sys.executable,
            [sys.executable, PROGRAM, str(theirs.fileno()), json.dumps(config), "-" * room],
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
            setsid=True,
            setsigmask={*config["shielded"], *FOR_RANKS},  # until it ignores or hears them
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores, and a program should not
        )


class OwnZygote:
    """Our child, for this run alone."""

    stuck: Sequence[str] = ()  # what it leaves is ours to end

    def __init__(self, config: Config, theirs: socket.socket, environment: Mapping[str, str], room: int) -> None:
        """Start it.

        Raises:
            OSError: there can be no more processes.
        """
        self._child = Child(start(config, theirs, environment, room, ()))

    @property
    def pid(self) -> int:
        return self._child.pid

    def born(self, pid: int, pidfd: int | None) -> None:
        pass

    def kill(self) -> None:
        self._child.kill()

    def wait(self) -> int | None:
        return self._child.wait(_LEAVE_PATIENCE)


class WarmZygote:
    """A fork of a warm zygote, below a guardian, which tells us of its end."""

    def __init__(self, line: socket.socket, starting: WarmStart | None) -> None:
        """``line`` is the guardian's; ``starting`` is the warm zygote, where that has yet to import."""
        self._line, self._starting = line, starting
        self._pidfd: int | None = None
        self.pid = starting.pid if starting else 0
        self.stuck: Sequence[str] = ()

    def born(self, pid: int, pidfd: int | None) -> None:
        self.pid, self._pidfd = pid, pidfd
        if self._starting:
            self._starting.close()
            self._starting = None

    def kill(self) -> None:
        if self._starting:
            self._starting.kill()
        elif self.pid:
            processes.send(self.pid, signal.SIGKILL, self._pidfd)

    def wait(self) -> int | None:
        from ddplaunch.warm.asking import receive

        ended: GuardianEnded | None = receive(self._line, _LEAVE_PATIENCE)
        if ended is None:
            self.kill()
            ended = receive(self._line, _LEAVE_PATIENCE)
        self._line.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._starting:
            self._starting.close()
            self._starting = None
        self.stuck = ended["stuck"] if ended else ()
        return ended["status"] if ended else None


class WarmStart:
    """A warm zygote that we have started, until it has imported all: so long it goes when we go."""

    def __init__(self, pid: int, pidfd: int | None, tie: socket.socket, path: str) -> None:
        self.pid = pid
        self._pidfd, self._tie, self._path = pidfd, tie, path

    def kill(self) -> None:
        processes.send(self.pid, signal.SIGKILL, self._pidfd)
        with suppress(OSError):
            os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))  # unless there are others

    def close(self) -> None:
        self._tie.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
