"""Starts the process that records the provenance of a run, once its ranks run; waits for it at the end of the run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import host_name
from ddplaunch.base.safe_files import current_folder
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.processes import child_processes, process_limits

LAST_WAIT_S = 0.5  # for git, at the end of the run: a short run on a slow disk must not end late
STOP_WAIT_S = 0.5  # for the process to end git and write that it has not answered

PROGRAM = os.path.join(PACKAGE_DIR, "features", "runs", "provenance_probe.py")


def probe_command(path: str, folders: Sequence[str], gpus: Sequence[str] = ()) -> list[str]:
    """Return the command of the process that writes files whose names begin with ``path``."""
    sys_path = [each for each in sys.path if each]
    request = {"host": host_name(), "gpus": gpus, "sys_path": sys_path, "folders": folders}
    return [sys.executable, "-I", "-S", PROGRAM, *os.path.split(path), json.dumps(request)]


class ProvenanceProcess:
    """The process of one run on one node: it takes some 50 ms of CPU time, beside the ranks and at a lower priority."""

    def __init__(self, environ: Mapping[str, str], loop: IsolatedLoop) -> None:
        """``environ``: the environment of the ranks, without the variables that the launcher adds."""
        self._environ, self._loop = environ, loop
        self._child: child_processes.ChildProcess | None = None
        self._pidfd = -1

    def start(self, plan: Plan, path: str) -> None:
        """Start the process, which writes files whose names begin with ``path``; do nothing if it cannot be started."""
        source, here = plan.target.source or plan.target.path, current_folder()
        folders = [os.path.dirname(os.path.abspath(source))] if source else []
        words = probe_command(path, [*dict.fromkeys((*folders, here))], plan.gpus)
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        signals = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM]
        with suppress(OSError), process_limits.original_nofile_limit():  # OSError: the limit on processes is reached
            pid = os.posix_spawn(
                sys.executable, words, self._environ, file_actions=null, setsid=True, setsigdef=signals, setsigmask=[]
            )
            self._child = child_processes.ChildProcess(pid, cleans_up_itself=True)
            self._pidfd = os.pidfd_open(pid)
            self._loop.watch_fd(self._pidfd, self._reap)  # else a zombie stays as long as the run

    def finish(self) -> None:
        """Wait for the process; after ``LAST_WAIT_S`` end its git command by SIGTERM, which the process records."""
        if self._child is None:
            return
        if not self._child.ends_within(LAST_WAIT_S):
            self._child.send_signal(signal.SIGTERM)
        self._reap()

    def _reap(self) -> None:
        if self._child:
            self._child.wait(STOP_WAIT_S)
            self._child = None
        if self._pidfd >= 0:
            self._loop.unwatch_fd(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
