"""Runs N real launchers on this machine, each with one rank that reports its start and then waits."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks import contenders, kernel
from tests.benchmarks.measure import Failed
from tests.conftest import free_port

DEADLINE = 180.0
"""Seconds after which a job counts as hung."""

RANK = 'exec 3<"$BENCH_RELEASE"; echo "$RANK $$" >"$BENCH_REPORT"; exec cat <&3'


class Launchers:
    """The launchers of one job by node rank; a context manager that leaves no process behind.

    Attributes:
        ranks: the process of each rank that has said that it runs, and when it did.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.port = free_port()
        self.ranks: dict[int, tuple[int, float]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="scale-"))
        report, release = self._folder / "report", self._folder / "release"
        self._variables = {"TMPDIR": str(self._folder), "BENCH_REPORT": str(report), "BENCH_RELEASE": str(release)}
        os.mkfifo(report)
        os.mkfifo(release)
        self._report = os.open(report, os.O_RDWR | os.O_NONBLOCK)  # as a writer too, so that it never ends
        self._release = os.open(release, os.O_RDWR)  # ranks wait for our end of it
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        kernel.adopt_orphans()

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *error: object) -> None:
        kernel.kill_all_below(os.getpid())
        for process in self._processes.values():
            process.wait()
        os.close(self._report)
        self.release()
        shutil.rmtree(self._folder)

    @property
    def control_port(self) -> int:
        return self.port + 1

    def pid(self, node_rank: int) -> int:
        return self._processes[node_rank].pid

    def start(self, node_rank: int) -> None:
        where = ["--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        which = ["--nnodes", str(self.nodes), "--node-rank", str(node_rank), "--nproc", "1"]
        with open(self._folder / f"{node_rank}.stderr", "wb") as stderr:
            self._processes[node_rank] = subprocess.Popen(
                [sys.executable, "-m", "ddplaunch", "run", *which, *where, "--no-python", "/bin/sh", "-c", RANK],
                env={**contenders.environment(), "HOME": str(self._folder), **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def read_stderr(self, node_rank: int) -> str:
        """What a launcher has written to stderr so far."""
        return (self._folder / f"{node_rank}.stderr").read_text(errors="replace")

    def until(self, done: Callable[[], bool], what: str, pause: float = 0.005) -> float:
        """Wait for something; return when it was seen.

        Raises:
            Failed: it did not come.
        """
        deadline = time.monotonic() + DEADLINE
        while not done():
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not in {DEADLINE:.0f} s; node 0 says {self.read_stderr(0)[-300:]!r}")
            time.sleep(pause)
        return time.monotonic()

    def all_seek(self) -> bool:
        """Whether all but node 0 have reported that they wait for node 0."""
        return all((self._folder / f"{each}.stderr").stat().st_size for each in self._processes if each)

    def all_run(self, expected: int) -> bool:
        """Whether ``expected`` ranks run; reads what they have reported."""
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        if poll.poll(20):
            now = time.monotonic()
            for line in os.read(self._report, 1 << 16).decode().splitlines():
                rank, pid = line.split()
                self.ranks[int(rank)] = int(pid), now
        return len(self.ranks) >= expected

    def finish(self) -> tuple[float, set[int]]:
        """Wait until every launcher has exited; return when the last did, and their exit codes.

        Raises:
            Failed: one did not, or left a process behind.
        """
        deadline = time.monotonic() + DEADLINE
        poll = select.poll()
        waiting = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        last = 0.0
        while waiting and time.monotonic() < deadline:
            for fd, _ in poll.poll(1000):
                last = time.monotonic()
                poll.unregister(fd)
                os.close(fd)
                self._processes[waiting.pop(fd)].wait()
        for fd in waiting:
            os.close(fd)
        if waiting:
            raise Failed(f"node {sorted(waiting.values())[:8]} had not exited after {DEADLINE:.0f} s")
        if left := kernel.descendants(os.getpid()):
            raise Failed(f"left behind: {'; '.join(map(kernel.describe, left[:8]))}")
        return last, {process.returncode for process in self._processes.values()}

    def release(self) -> None:
        """Let the ranks end with exit code 0."""
        if self._release >= 0:
            os.close(self._release)
            self._release = -1

    def interrupt(self) -> None:
        """Ctrl-C on node 0."""
        os.kill(self.pid(0), signal.SIGINT)

    def kill_rank(self, rank: int) -> None:
        os.kill(self.ranks[rank][0], signal.SIGKILL)
