"""Runs one command and watches it to the end of its last descendant: its marks, times and processor seconds.

The benchmark process is the subreaper of what it runs, and collects every process itself that nobody else waits for.
So the resource usage of a job is complete: a child that a launcher reaped is counted with the launcher, one that it
left behind (or that was orphaned by a kill) comes to us.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.benchmarks import contenders, kernel

DEADLINE = 120.0
"""Seconds after which a job counts as hung."""

LEFT_BEHIND = 20.0
"""Seconds that what is left below us may outlive the launcher before it counts as left behind."""


class Failed(Exception):
    """A contender failed to do what was to be measured."""


@dataclass(frozen=True)
class Mark:
    """A line from programs/marks.py: a rank says where it is."""

    what: str
    rank: int
    attempt: int
    pid: int
    time: float


class Job:
    """A command that runs; a context manager that leaves no process behind.

    Attributes:
        began: when it was started; ended: when the launcher's own process had exited; gone: when its last descendant
            had (all as time.monotonic).
        cpu: seconds of user and system time of every process that has been collected.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        hold: bool = False,
        output: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start ``command`` with ``variables`` on top of a clean environment and its stdout in the file ``output``.

        Its home is empty. With a ``folder``, which lasts, it is one of several alike, and what it keeps for the next
        one may stay.
        """
        self.marks: list[Mark] = []
        self.ended: float | None = None
        self.gone: float | None = None
        self.cpu = 0.0
        self._status: int | None = None
        self._leftovers: list[str] = []
        self._partial = b""
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        keeps, folder = folder is not None, folder or Path(self._folder.name)
        self._stderr_path = folder / "stderr"
        report, release = folder / "report", folder / "release"
        for pipe in (report, release):
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        self._report = os.open(report, os.O_RDWR | os.O_NONBLOCK)  # as a writer too, so that it never ends
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _noted)
        self._open = [self._report, self._woken, self._wake, os.open(release, os.O_RDWR)]
        self._poll = select.poll()
        self._poll.register(self._report, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        home = folder / "home"
        home.mkdir(exist_ok=True)
        extra = {
            "HOME": str(home),
            "BENCH_REPORT": str(report),
            "BENCH_RELEASE": str(release),
            "BENCH_HOLD": "1" if hold else "",
        }
        kernel.adopt_orphans(not keeps)
        with open(self._stderr_path, "wb") as stderr, open(output or os.devnull, "wb") as stdout:
            self.began = time.monotonic()
            self._process = subprocess.Popen(
                command,
                env={**contenders.environment(), "TMPDIR": str(folder), **extra, **(variables or {})},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        kernel.kill_all_below(os.getpid())
        self._process.returncode = self._process.returncode or 0  # collected by us, not by subprocess
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in self._open:
            os.close(fd)
        self._folder.cleanup()

    # ------------------------------------------------------------------------------------------------------ waiting

    def until(self, what: str, ranks: int, attempt: int = 0) -> float:
        """Wait for the last of ``ranks`` marks ``what``; return the time that it bears.

        Raises:
            Failed: the launcher ended before, or nothing came in DEADLINE.
        """
        self._wait(lambda: len(self.times(what, attempt)) >= ranks or self.ended is not None)
        if len(self.times(what, attempt)) < ranks:
            came = f"only {len(self.times(what, attempt))} of {ranks} ranks came to {what!r}"
            raise Failed(f"{came} when the launcher ended: {self.last_errors()}")
        return max(self.times(what, attempt))

    @property
    def lasted(self) -> float:
        """Seconds from its start to the end of the launcher's own process."""
        assert self.ended is not None
        return self.ended - self.began

    def times(self, what: str, attempt: int = 0) -> list[float]:
        return [mark.time for mark in self.marks if mark.what == what and mark.attempt == attempt]

    def pids(self, what: str, attempt: int = 0) -> dict[int, int]:
        """The processes that have marked ``what``, by rank."""
        return {mark.rank: mark.pid for mark in self.marks if mark.what == what and mark.attempt == attempt}

    def watch(self, seconds: float) -> None:
        """Handle events for this long."""
        over = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() >= over, seconds + DEADLINE, wake_at=over)

    def release(self) -> None:
        """Release the ranks that wait."""
        os.close(self._open.pop())

    def finish(self) -> int:
        """Wait until the launcher and everything below it have gone; return its exit code, -N for signal N.

        Raises:
            Failed: it hung, or left something behind that did not go.
        """
        self._wait(lambda: self.gone is not None)
        if self._leftovers:
            raise Failed(f"left behind: {'; '.join(self._leftovers)}")
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)

    def succeed(self) -> None:
        """Wait for its end, which has to be a good one."""
        code = self.finish()
        if code != 0:
            raise Failed(f"exit code {code}: {self.last_errors()}")

    def last_errors(self) -> str:
        """Return the last lines of stderr as one line."""
        lines = [line.strip() for line in self._stderr_path.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-300:] or "(nothing on stderr)"

    # ---------------------------------------------------------------------------------------------------- the loop

    def _wait(self, done: Callable[[], bool], timeout_s: float = DEADLINE, wake_at: float | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise Failed(f"nothing happened for {timeout_s:.0f} s: {self.last_errors()}")
            if self.ended is not None and self.gone is None and now > self.ended + LEFT_BEHIND:
                self._leftovers = [kernel.describe(pid) for pid in kernel.descendants(os.getpid())]
                self.gone = now
                continue
            pause = min(deadline, wake_at or deadline) - now
            if self.ended is not None:
                pause = min(pause, 1.0)
            ready = {fd for fd, _ in self._poll.poll(max(0.0, pause) * 1000)}
            if self._report in ready:
                self._read_marks()
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()

    def memory(self) -> float:
        """MB that the whole job has in memory now, launcher included (PSS)."""
        return kernel.proportional_memory(kernel.descendants(os.getpid()))

    def _read_marks(self) -> None:
        try:
            *lines, self._partial = (self._partial + os.read(self._report, 1 << 16)).split(b"\n")
        except BlockingIOError:
            return
        for line in lines:
            what, rank, attempt, pid, moment = line.decode().split(" ")
            self.marks.append(Mark(what, int(rank), int(attempt), int(pid), float(moment)))

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.gone = time.monotonic()
                return
            if pid == 0:
                return
            self.cpu += usage.ru_utime + usage.ru_stime
            if pid == self.pid:
                self.ended, self._status = time.monotonic(), status
                self._read_marks()


def _noted(number: int, frame: FrameType | None) -> None:
    """SIGCHLD only has to wake the poll."""
