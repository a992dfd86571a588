"""A batch job that this user has submitted, as it is stored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from msgspec import Struct, field

from ddplaunch.system.code_version import CodeVersion


class JobEnd(Struct, frozen=True):
    """How a job ended: a description, and its exit code."""

    words: str
    code: int


class SubmittedJob(Struct, frozen=True):
    """The record of a submitted job."""

    number: str  # the scheduler's, like 4711, or 4711.pbs01
    cluster: str | None  # Slurm's name of the cluster, if there are several
    name: str
    target: str
    nodes: int
    array: str | None  # the indices of an array
    cwd: str
    log: str  # path; of an array with %a for the index
    run_id: str | None  # --run-id, as typed
    python: str  # the interpreter that runs ddplaunch on the nodes
    image: str | None  # the container image in which it runs, if any
    moment: float  # when it was submitted, in seconds since the epoch
    ended: str | None = None  # description of how it ended
    code: int | None = None  # its exit code
    scheduler: str = "slurm"  # its name in the registry of schedulers
    gone: float | None = None  # when it was first seen to have ended, while its exit status is unknown
    ends: Mapping[str, JobEnd] = field(default_factory=dict)  # how the jobs of an array ended, by index
    code_copy: str | None = None  # the folder of the copy of the code that it runs
    errors: str | None = None  # the file of its stderr, if it is not the log
    last_lines: str = ""  # what a rank that failed printed last, if its scheduler keeps that
    code_version: CodeVersion | None = None  # the copied code; run records have it too, but only on the nodes
    argv: tuple[str, ...] = ()  # the command that submitted it, without secrets
    typed_in: str = ""  # the folder in which that command was typed
    runs: tuple[str, ...] = ()  # of a grid: the name of each index, like "lr=0.1,seed=2"
    by_hand: bool = False  # created by another program, whose next job may have the same name: it is never stored

    @property
    def run_prefix(self) -> str:
        """The prefix of the names of the job's runs; in a Slurm array each index has its own job number."""
        array = self.array and self.scheduler != "slurm"
        return self.run_id or (f"{self.number.partition('.')[0]}_" if array else f"{self.number}.")

    def get_end(self, index: str | None) -> JobEnd | None:
        """How the job, or this index of its array, ended; None if that is not known."""
        if index:
            return self.ends.get(index)
        return None if self.code is None else JobEnd(self.ended or "", self.code)

    def log_paths(self, index: str | None) -> tuple[str | None, str | None]:
        """Return the paths of the job's log and stderr file; None if a path is unknown here or there is none."""
        return self._file(self.log, index), self._file(self.errors, index)

    @staticmethod
    def _file(path: str | None, index: str | None) -> str | None:
        path = path and path.replace("%a", index or "%a")
        return None if path is None or re.search("%[a-zA-Z]", os.path.basename(path)) else path
