"""The zygote as a process to start, kill and wait for: a child of the launcher, or what a feature provides."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.core.rank.zygote_messages import ZygoteConfig
from ddplaunch.system.processes import process_limits
from ddplaunch.system.processes.child_processes import ChildProcess
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS

ZYGOTE_SCRIPT = os.path.join(PACKAGE_DIR, "core", "rank", "zygote.py")
_MAX_TITLE_BYTES = 4096  # of the ranks' command line in ``ps``; the kernel refuses one of 128 KiB (MAX_ARG_STRLEN)


class ZygoteProcess(Protocol):
    """A zygote that was started, by the launcher or by a ``ZygoteSource``."""

    @property
    def pid(self) -> int: ...
    @property
    def unkillable(self) -> Sequence[str]: ...  # after ``wait``: its descendants that cannot be killed
    def on_ready(self, pid: int, pidfd: int | None) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout_s: float) -> int | None: ...  # the wait status, None if unknown; kills it after this time


class ZygoteSource(Protocol):
    """Provides the zygotes of a run, in place of those that the launcher starts with the job."""

    @property
    def unavailable_reason(self) -> str | None: ...  # why the last zygote is not from it

    @property
    def child_pid(self) -> int | None: ...  # of a zygote that is a child of the launcher already

    def get_zygote(
        self, config: ZygoteConfig, environment: Mapping[str, str]
    ) -> tuple[ZygoteProcess, socket.socket] | None:
        """Return a zygote, and the launcher's end of its socket; None: start one in the usual way."""


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
    Raises OSError if the limit of processes or memory is reached.
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


class ZygoteStartSettings(NamedTuple):
    """The configuration and environment with which a zygote is started."""

    config: ZygoteConfig
    environment: Mapping[str, str]
    title: str = ""  # the longest command line that ``ps`` is to show for a rank


def spawn_child_zygote(start: ZygoteStartSettings) -> tuple[ChildZygote, socket.socket]:
    """Start a zygote for one run; return it and the launcher's end of its socket. OSError: as ``spawn_zygote``."""
    our_socket, child_socket = socket.socketpair()
    title_bytes = min(len(start.title.encode(errors="replace")), _MAX_TITLE_BYTES)
    try:
        return ChildZygote(spawn_zygote(start.config, child_socket, start.environment, title_bytes, ())), our_socket
    except OSError:
        our_socket.close()
        raise
    finally:
        child_socket.close()


class ChildZygote(ChildProcess):
    """A zygote that is a child of the launcher, for this run alone."""

    unkillable: Sequence[str] = ()  # the launcher adopts its descendants, and kills them itself

    def on_ready(self, pid: int, pidfd: int | None) -> None:
        pass
