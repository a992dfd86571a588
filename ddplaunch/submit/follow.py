"""A submitted job followed to its end: its log as it grows, and its state.

We open the log again for each look: over NFS only that is sure to show what another machine has written (close-to-open
consistency, nfs(5)). Slurm's controller serves the whole cluster, so we ask it at most once a second, and less often
while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import BinaryIO, Protocol

from ddplaunch.submit.queue import JobId

LOG_EVERY = 0.5
ASK_EVERY = 1.0
ASK_AT_LEAST_EVERY = 5.0
REMIND_EVERY = 60.0
"""Seconds between looks at the log, between questions to Slurm (least and most), and between reminders of a wait."""


class Record(Protocol):
    """What a scheduler says of a job."""

    @property
    def code(self) -> int | None:
        """Our exit code; None while it runs or waits."""

    @property
    def log(self) -> str | None:
        """The file of its output."""

    @property
    def waits(self) -> bool:
        """Whether it waits to start, of which people are reminded."""

    @property
    def words(self) -> str:
        """What to say about it, after "job 7"."""


class Scheduler(Protocol):
    """Whom a follower asks about its job."""

    asked: str  # the program that is asked

    def look(self, job: JobId) -> Record | None:
        """Return what it says; None if it does not answer. Raises LaunchError if it has forgotten the job."""

    def cancel(self, job: JobId) -> None:
        """Cancel the job. Raises LaunchError if that failed."""


class Follower:
    """Follows one job: its log goes to ``out`` byte for byte, and ``say`` prints a line for each change.

    ``run`` may be left by KeyboardInterrupt and called again.
    """

    def __init__(self, job: JobId, scheduler: Scheduler, out: BinaryIO, say: Callable[[str], None]) -> None:
        self.job = job
        self.scheduler = scheduler
        self.out = out
        self.say = say
        self.log: str | None = None
        self.read = 0
        self._said: str | None = None
        self._said_at = 0.0
        self._answered_at = time.monotonic()

    def run(self) -> int:
        """Follow the job to its end; return its exit code. Raises LaunchError if Slurm has forgotten the job."""
        pause, ask_at = ASK_EVERY, 0.0
        while True:
            now = time.monotonic()
            if now >= ask_at:
                before = self._said
                seen = self.scheduler.look(self.job)
                if seen is not None:
                    self.log = self.log or seen.log
                    if seen.code is not None:
                        self._copy()  # all of it, before we say how it ended
                self._tell(seen)
                if seen is not None and seen.code is not None:
                    return seen.code
                pause = ASK_EVERY if self._said != before else min(pause * 1.25, ASK_AT_LEAST_EVERY)
                ask_at = time.monotonic() + pause
            self._copy()
            time.sleep(LOG_EVERY)

    def _tell(self, seen: Record | None) -> None:
        now = time.monotonic()
        number = self.job.number
        if seen is None:
            if now - self._answered_at >= REMIND_EVERY:
                waited = f"{self.scheduler.asked} has not answered for {now - self._answered_at:.0f} s"
                self.say(f"{waited}; job {number} is not affected")
                self._answered_at = now
            return
        self._answered_at = now
        if seen.words == self._said and (not seen.waits or now - self._said_at < REMIND_EVERY):
            return
        self._said, self._said_at = seen.words, now
        self.say(f"job {number} {seen.words}")

    def _copy(self) -> None:
        """Write what is new in the log."""
        if self.log is None:
            return
        try:
            file = open(self.log, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:  # the job has not begun
            return
        except OSError as error:
            self.say(f"cannot read {self.log}: {error.strerror}")
            self.log = None
            return
        with file:
            file.seek(self.read)
            while chunk := file.read(1 << 16):
                self.out.write(chunk)
                self.read += len(chunk)
        self.out.flush()
