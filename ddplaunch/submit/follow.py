"""A submitted job followed to its end: its log as it grows, and its state.

We open the log again for each look: over NFS only that is sure to show what another machine has written (close-to-open
consistency, nfs(5)). Slurm's controller serves the whole cluster, so we ask it at most once a second, and less often
while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import BinaryIO

from ddplaunch.submit.queue import JobId, JobRecord, look

LOG_EVERY = 0.5
ASK_EVERY = 1.0
ASK_AT_LEAST_EVERY = 5.0
REMIND_EVERY = 60.0
"""Seconds between looks at the log, between questions to Slurm (least and most), and between reminders of a wait."""


class _Log:
    """A file that grows on another machine, and where what is new in it goes."""

    def __init__(self, out: BinaryIO) -> None:
        self.path: str | None = None  # None until it is known, and once it cannot be read
        self.read = 0  # bytes
        self._out = out

    def copy(self, say: Callable[[str], None]) -> None:
        """Write what is new in it."""
        if self.path is None:
            return
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:  # the job has not begun
            return
        except OSError as error:
            say(f"cannot read {self.path}: {error.strerror}")
            self.path = None
            return
        with file:
            file.seek(self.read)
            while chunk := file.read(1 << 16):
                self._out.write(chunk)
                self.read += len(chunk)
        self._out.flush()


class Follower:
    """Follows one job: its log goes to ``out`` byte for byte, and ``say`` prints a line for each change.

    Where stderr has a file of its own, that goes to ``err``. ``run`` may be left by KeyboardInterrupt and called again.
    """

    def __init__(self, job: JobId, out: BinaryIO, err: BinaryIO, say: Callable[[str], None]) -> None:
        self.job = job
        self.say = say
        self._log, self._errors = _Log(out), _Log(err)
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
                seen = look(self.job)
                if seen is not None:
                    self._log.path = self._log.path or seen.log
                    self._errors.path = self._errors.path or seen.errors
                    if seen.code is not None:
                        self._copy()  # all of it, before we say how it ended
                self._tell(seen)
                if seen is not None and seen.code is not None:
                    return seen.code
                pause = ASK_EVERY if self._said != before else min(pause * 1.25, ASK_AT_LEAST_EVERY)
                ask_at = time.monotonic() + pause
            self._copy()
            time.sleep(LOG_EVERY)

    def _copy(self) -> None:
        self._log.copy(self.say)
        self._errors.copy(self.say)

    def _tell(self, seen: JobRecord | None) -> None:
        now = time.monotonic()
        number = self.job.number
        if seen is None:
            if now - self._answered_at >= REMIND_EVERY:
                self.say(f"scontrol has not answered for {now - self._answered_at:.0f} s; job {number} is not affected")
                self._answered_at = now
            return
        self._answered_at = now
        if seen.words == self._said and (seen.state != "PENDING" or now - self._said_at < REMIND_EVERY):
            return
        self._said, self._said_at = seen.words, now
        self.say(f"job {number} {seen.words}")
