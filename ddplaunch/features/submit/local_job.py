"""The folder of a job of ``submit --scheduler local``, in which its processes record their progress.

``job.json`` is what was submitted, ``script`` what bash runs for each index, ``process.json`` the supervisor. For each
index ("0" if the job is no array): ``0.process`` is its script, ``0.started`` is there once it has what it waited for,
``0.cancel`` once it was cancelled, ``0.end`` has its exit code.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

from ddplaunch.base.errors import host_name
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import list_dir, read_regular_file
from ddplaunch.base.types import parse
from ddplaunch.system.history_dir import history_dir, open_history_dir
from ddplaunch.system.processes.proc_utils import start_ticks

J = TypeVar("J", bound=Struct)

PREFIX = "local-"
ONLY_INDEX = "0"
MAX_FILE_BYTES = 1 << 20
MIN_UNUSED_S = 60.0
"""How long a folder is unchanged before it may be removed: another ``submit`` needs less until it records its job."""


class LocalJob(Struct, frozen=True):
    """A job that was submitted with ``--scheduler local``."""

    number: str  # "local-7"
    indices: tuple[str, ...]
    is_array: bool
    limit: int | None  # how many of them run at once
    log: str  # path, with %a for the index
    host: str
    boot: str  # the boot id of the machine at the submission


class ProcessIdentity(Struct, frozen=True):
    """A process of the job, by its PID and the time of its start."""

    pid: int
    ticks: int

    @property
    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.ticks


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read_job(self) -> LocalJob | None:
        """Return what was submitted; None if there is no such job."""
        return self._read("job.json", LocalJob)

    def read_supervisor(self) -> ProcessIdentity | None:
        return self._read("process.json", ProcessIdentity)

    def read_script_process(self, index: str) -> ProcessIdentity | None:
        """Return the process that runs the script of an index; None before it starts."""
        return self._read(f"{index}.process", ProcessIdentity)

    def read_exit_code(self, index: str) -> int | None:
        """Return the exit code of an index; None before its end."""
        try:
            return int(read_regular_file(self.file(index, "end"), 100))
        except (OSError, ValueError):
            return None

    def has_file(self, index: str, kind: str) -> bool:
        return os.path.exists(self.file(index, kind))

    def file(self, index: str, kind: str) -> str:
        return os.path.join(self.path, f"{index}.{kind}")

    def is_alive(self) -> bool:
        """Whether a process of the job runs on this machine."""
        job = self.read_job()
        if job is None or job.host != host_name() or job.boot != boot_id():
            return False
        processes = [self.read_supervisor(), *map(self.read_script_process, job.indices)]
        return any(process and process.is_alive for process in processes)

    def is_left_over(self) -> bool:
        """Whether nothing needs this folder: it is no longer new, and has no job, or one that ended on this host."""
        try:
            unused_s = time.time() - os.stat(self.path).st_mtime
        except OSError:
            return False
        job = self.read_job()
        return unused_s > MIN_UNUSED_S and (job is None or (job.host == host_name() and not self.is_alive()))

    def _read(self, name: str, kind: type[J]) -> J | None:
        try:
            return parse(read_regular_file(os.path.join(self.path, name), MAX_FILE_BYTES), kind)
        except (OSError, ProtocolError):
            return None


def boot_id() -> str:
    """Return the boot id of this machine, which differs after each start."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def find_job_folder(number: str) -> JobFolder:
    """Return the folder of a job, which may not exist."""
    return JobFolder(os.path.join(_local_dir(), number.removeprefix(PREFIX)))


def make_job_folder(kept: Collection[str]) -> tuple[str, JobFolder]:
    """Make the folder of a new job, and return its number and folder; remove folders of ended jobs not in ``kept``.

    Raises OSError.
    """
    path = _local_dir()
    os.close(open_history_dir(path, create=True))
    taken = [int(name) for name in list_dir(path) if name.isdecimal()]
    for number in taken:
        folder = find_job_folder(str(number))
        if f"{PREFIX}{number}" not in kept and number != max(taken) and folder.is_left_over():
            shutil.rmtree(folder.path, ignore_errors=True)
    number = max(taken, default=0)
    while True:
        number += 1
        folder = find_job_folder(str(number))
        try:
            os.mkdir(folder.path, 0o700)
        except FileExistsError:
            continue
        return f"{PREFIX}{number}", folder


def _local_dir() -> str:
    return os.path.join(os.path.dirname(history_dir() or "/nowhere/runs"), "local")
