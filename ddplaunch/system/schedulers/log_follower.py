"""Follows a submitted job to its end: copies its log as it grows and reports its state; Ctrl-C asks what to do with it.

The log is opened anew for each poll: over NFS only that is sure to show what another machine has written (close-to-open
consistency, nfs(5)). Slurm's controller serves the whole cluster, so it is queried at most once a second, and less
often while nothing changes.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import BinaryIO

import click

from ddplaunch.base.errors import EXIT_SIGNAL
from ddplaunch.base.text import format_size
from ddplaunch.system.schedulers.outage_notice import REMINDER_INTERVAL_S, OutageNotice
from ddplaunch.system.schedulers.scheduler import BatchJobState, JobId, LogSource, Scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from ddplaunch.system.schedulers.submitted_jobs import save_end_if_known

LOG_POLL_INTERVAL_S = 0.5
MIN_QUERY_INTERVAL_S = 1.0
MAX_QUERY_INTERVAL_S = 5.0
"""Seconds between polls of the log, and between queries of the scheduler (bounds)."""


class _FollowedFile:
    """A file that another machine appends to; new bytes are copied to ``out``."""

    def __init__(self, out: BinaryIO, path: str | None = None, last: int | None = None) -> None:
        """``last``: of the existing content, copy only this many bytes, from the start of a line; None: copy all."""
        self.path = path  # None before it is known, and after it could not be read
        self.read = 0  # bytes copied
        self._out, self._last = out, last

    def set_path(self, path: str | None) -> None:
        """Set the path that the scheduler reports, unless bytes were copied, or the known path has a % (Slurm bug)."""
        if path and not self.read and "%" not in (self.path or ""):
            self.path = path

    def copy_new(self) -> None:
        """Copy the bytes that were appended since the last call."""
        for chunk in self._read_new():
            self._out.write(chunk)
        self._out.flush()

    def _read_new(self) -> Iterator[bytes]:
        if self.path is None:
            return
        try:
            with open(self.path, "rb") as file:
                if self._last is not None:
                    self._skip(file, self._last)
                    self._last = None
                if os.fstat(file.fileno()).st_size < self.read:  # the job has begun again, with a new log
                    self.read = 0
                file.seek(self.read)
                while chunk := file.read(1 << 16):
                    self.read += len(chunk)
                    yield chunk
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # the job has not begun; the file was replaced (NFS)
                print_line(f"cannot read {self.path}: {error.strerror}")
                self.path = None

    def _skip(self, file: BinaryIO, last: int) -> None:
        before = file.seek(0, os.SEEK_END) - last
        if before <= 0:
            return
        file.seek(before)
        file.readline()
        self.read = file.tell()
        print_line(f"skipped the first {format_size(self.read)} of {self.path}")


class _LogFiles(LogSource):
    """The log of a job, copied to stdout byte for byte, and its stderr file, if it has one, to stderr."""

    def __init__(self, files: tuple[str | None, str | None], last: int | None) -> None:
        self._log = _FollowedFile(sys.stdout.buffer, files[0], last)
        self._errors = _FollowedFile(sys.stderr.buffer, files[1], last)

    def update(self, state: BatchJobState) -> None:
        if not state.is_pending:  # until then the path for an index of an array is not known
            self._log.set_path(state.log_path)
            self._errors.set_path(state.stderr_path)

    def copy_new(self) -> None:
        self._log.copy_new()
        self._errors.copy_new()


class LogFollower:
    """Follows one batch job: copies its output as it is written, until the job ends.

    Each change of its state is printed as a line on stderr.
    """

    def __init__(
        self,
        job: JobId,
        scheduler: Scheduler,
        files: tuple[str | None, str | None] = (None, None),
        last: int | None = None,
        lines: int = 0,
    ) -> None:
        """``files``: paths of log and stderr, None if unknown; ``last``: skip all but their last ``last`` bytes.

        ``lines``: of a job without such files, skip all but this number of last lines; 0: skip none.
        """
        self.job, self.scheduler = job, scheduler
        self.last_seen: BatchJobState | None = None
        self._log = scheduler.open_log(job, lines) or _LogFiles(files, last)
        self._reported_state: str | None = None
        self._reported_at = 0.0
        self._outage = OutageNotice(scheduler.title, job.text)

    @property
    def reads_files(self) -> bool:
        """Whether the output is in files of this machine."""
        return isinstance(self._log, _LogFiles)

    def run(self) -> int:
        """Follow the job to its end; return its exit code. Raises LaunchError if its scheduler no longer knows it.

        After a KeyboardInterrupt it may be called again.
        """
        interval, query_at = MIN_QUERY_INTERVAL_S, 0.0
        while True:
            now = time.monotonic()
            if now >= query_at:
                before = self._reported_state
                state = self.scheduler.query_one(self.job)
                if state is not None:
                    self.last_seen = state
                    self._log.update(state)
                    if state.code is not None:
                        self._log.copy_rest()  # before the line on its end
                self._report_state(state)
                if state is not None and state.code is not None:
                    return state.code
                interval = min(interval * 1.25, MAX_QUERY_INTERVAL_S)
                if self._reported_state != before:
                    interval = MIN_QUERY_INTERVAL_S
                query_at = time.monotonic() + interval
            self._log.copy_new()
            time.sleep(LOG_POLL_INTERVAL_S)

    def finish(self, state: BatchJobState) -> int:
        """Print the log of a job that has ended, and its final state; return its exit code."""
        self._log.update(state)
        self._log.copy_rest()
        self._report_state(state)
        return state.code or 0

    def copy_logs(self) -> None:
        """Copy what the job has printed until now."""
        self._log.copy_rest()

    def close(self) -> None:
        """Release the source of the job's output, which ends any program that reads it."""
        self._log.close()

    def _report_state(self, state: BatchJobState | None) -> None:
        now = time.monotonic()
        number = self.job.text
        if notice := self._outage.update(answered=state is not None):
            print_line(notice)
        if state is None:
            return
        reminder_due = state.is_pending and now - self._reported_at >= REMINDER_INTERVAL_S
        if state.description == self._reported_state and not reminder_due:
            return
        self._reported_state, self._reported_at = state.description, now
        print_line(f"job {number} {state.description}")


def follow_job(follower: LogFollower, log: str, saved: SubmittedJob | None = None) -> int:
    """Follow a job to its end and return its exit code; 130 where Ctrl-C leaves it running.

    Its end is stored in the ``saved`` record, if there is one.
    """
    job = follower.job
    with closing(follower):
        while True:
            try:
                code = follower.run()
                if saved:
                    save_end_if_known(saved, job, follower.last_seen)
                return code
            except KeyboardInterrupt:
                answer = _ask_user(job)
                code = EXIT_SIGNAL + 2
            except BrokenPipeError:  # `| head` has read enough
                answer = "d"
                code = EXIT_SIGNAL + 13
            if answer == "c":
                follower.scheduler.cancel(job)
            elif answer == "d":
                print_line(f"job {job.text} keeps running; its log: {log}")
                return code


def print_line(line: str) -> None:
    """Print one message line to stderr, with "ddplaunch:" in front."""
    with suppress(BrokenPipeError):  # `2>&1 | head`: stdout shows the end of the reader
        click.echo(f"ddplaunch: {line}", err=True)


def _ask_user(job: JobId) -> str:
    """Ask what to do with the job: "c" is to cancel it, "d" to detach, anything else to follow on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "d"
    question = f"\nddplaunch: job {job.text}: [c]ancel it, [d]etach and let it run, or [f]ollow on? "
    click.echo(question, err=True, nl=False)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer:  # Ctrl-C again, or Ctrl-D
        click.echo(err=True)
        return "d"
    return answer.strip().lower()[:1]
