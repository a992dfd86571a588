"""Records of jobs that were started from this machine over SSH: a small file for each, next to the history of runs.

Their launchers, and their histories, are on the hosts. The file names these hosts, so that a command of the user on
this machine can run there. It stays after the end of the job, unless the job has no history.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import host_name, sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.history_dir import MAX_TARGET_CHARS, history_dir, json_files, open_history_dir
from ddplaunch.base.safe_files import read_file_and_owner
from ddplaunch.base.types import as_dict, parse
from ddplaunch.core.rank.proc_utils import start_ticks
from ddplaunch.features.runs import run_lookup

MAX_JOBS = 100  # on record
MAX_BYTES = 1 << 20  # of a file


class SshJob(Struct, frozen=True):
    """A job that was started over SSH, as recorded on the machine it was started from."""

    run_id: str
    hosts: tuple[str, ...]  # as ssh names them; the first is node 0
    python: str  # that runs ddplaunch on the hosts
    target: str
    cwd: str  # of the command that started it
    pid: int  # of that command
    ticks: int | None  # when that process started, see `start_ticks`
    host: str  # of that process
    began: float  # in seconds since the epoch
    ended: float | None = None
    code: int | None = None  # its exit code

    @property
    def is_running(self) -> bool:
        """Whether the command that started it still runs, as far as this machine knows."""
        is_remote = self.host != host_name()
        return self.ended is None and (is_remote or start_ticks(self.pid) == self.ticks)

    @property
    def state(self) -> str:
        """Its state in a word: running, lost, failed or done."""
        if self.ended is None:
            return "running" if self.is_running else "lost"
        return "failed" if self.code else "done"


@contextmanager
def record_job(job: SshJob, *, history: bool) -> Iterator[SshEnd]:
    """Record a job while it runs, and its end; without ``history`` the record is removed at the end."""
    end = SshEnd()
    _write(job)
    try:
        yield end
    finally:
        if history and end.code is not None:
            _write(replace(job, ended=time.time(), code=end.code))
        else:
            _remove(job)


class SshEnd:
    """The end of a job; None as exit code: it never started."""

    code: int | None = None


def read_jobs() -> list[SshJob]:
    """Read all records of jobs over SSH, the latest first."""
    return sorted(filter(None, map(_read, json_files(_folder()))), key=lambda job: job.began, reverse=True)


def read_remote_jobs() -> list[SshJob]:
    """Read the jobs without a launcher on this machine nor, when they have ended, a run record here; latest first."""
    jobs = read_jobs()
    known = run_lookup.list_known() if jobs else {}
    here = {job.run_id for job in known.values() if job}
    return [job for job in jobs if job.run_id[:40] not in here and (job.is_running or job.run_id not in known)]


def find_remote_job(word: str | None) -> SshJob | None:
    """Find the job on other hosts with this name, beginning of a name, or PID; ``word`` None: the only one.

    None if none or several match, or a run of this machine.
    """
    jobs = read_remote_jobs()
    if word is None:
        jobs = [] if run_lookup.list_running() else [job for job in jobs if job.is_running]
        return jobs[0] if len(jobs) == 1 else None
    exact = [job for job in jobs if job.run_id == word or (job.is_running and str(job.pid) == word)]
    if exact or not word or word.isdecimal():
        return next(iter(exact), None)
    names = {*(job.run_id for job in jobs), *run_lookup.list_known()}
    matches = [job for job in jobs if job.run_id.startswith(word)]
    return matches[0] if len([name for name in names if name.startswith(word)]) == 1 and matches else None


def remove_ended_jobs() -> None:
    """Delete the records of jobs that have ended."""
    for job in read_jobs():
        if not job.is_running:
            _remove(job)


def _write(job: SshJob) -> None:
    with suppress(OSError):
        folder = open_history_dir(_folder(), create=True)
        try:
            data = json.dumps({**as_dict(job), "target": sanitize_line(job.target, MAX_TARGET_CHARS)}).encode()
            new = f".{_name(job)}.new"
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(new, _name(job), src_dir_fd=folder, dst_dir_fd=folder)
            for old in read_jobs()[MAX_JOBS:]:
                os.unlink(_name(old), dir_fd=folder)
        finally:
            os.close(folder)


def _remove(job: SshJob) -> None:
    with suppress(OSError):
        os.unlink(os.path.join(_folder(), _name(job)))


def _folder() -> str:
    return os.path.join(os.path.dirname(history_dir() or "/nowhere/runs"), "over-ssh")


def _name(job: SshJob) -> str:
    return f"{job.run_id}.{job.host}.{job.pid}.json"


def _read(path: str) -> SshJob | None:
    try:
        data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        return parse(data, SshJob) if owner == os.geteuid() else None
    except (OSError, ProtocolError):
        return None
