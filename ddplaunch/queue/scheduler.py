"""What all schedulers have in common: a job's id, what one says of a job, and calling its programs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError, UsageError

if TYPE_CHECKING:
    from ddplaunch.queue.submitted import SubmittedJob

QUICK_TIMEOUT_S = 10.0  # seconds in which a command that asks once has an answer
QUERY_TIMEOUT_S = 60.0  # seconds for an answer while a job is followed, and for cancelling

ACCOUNTING_DELAY_S = 120.0
"""Seconds after which a job that its scheduler no longer shows must be in the accounts.

Grid Engine's default flush_time is 15 s (reporting_params in sge_conf(5)), and the file is often on NFS.
"""


@dataclass(frozen=True)
class JobId:
    """A job's number as its scheduler gave it, like 4711 or 4711.pbs01, and the cluster where there are several."""

    number: str
    cluster: str | None = None
    index: str | None = None  # in an array; "" is all of it, None is a job alone

    @property
    def text(self) -> str:
        """How people type it: 4711_2 for index 2 of an array."""
        number, dot, server = self.number.partition(".")
        return f"{number}_{self.index}{dot}{server}" if self.index else self.number


@dataclass(frozen=True)
class BatchJobState:
    """What a scheduler says of a job."""

    description: str  # what to say about it, after "job 7"
    code: int | None = None  # our exit code; None until it is known
    is_pending: bool = False  # it has not begun
    is_running: bool = False  # its ranks may be asked
    ended_unknown: bool = False  # it has ended, and how is not known yet
    state: str = ""  # in a word, to be counted, where that is not pending, running, failed or completed
    job: JobId | None = None  # its own, also in an array
    number: str = ""  # how its run is called
    host: str | None = None  # of node 0
    log_path: str | None = None  # the file of its output
    stderr_path: str | None = None  # the file of its stderr, where that is another


class JobForgotten(LaunchError):
    """The scheduler no longer knows the job, or never did."""


class SchedulerNotResponding(LaunchError):
    """The scheduler does not answer."""

    exit_code = EXIT_UNAVAILABLE


StatesByJob = Mapping[JobId, Sequence[BatchJobState]]
"""What is known of each job that was asked about: one record, of an array one for each index."""


class Scheduler:
    """A scheduler: it is asked about jobs, and cancels them. An object may be asked again and again."""

    title: str  # its name, as people know it
    submit_program: str  # the program that takes scripts
    query_program: str  # the program that is asked
    cancel_program: str  # the program that cancels a job
    history_hint: str  # where more may be found about jobs that it has forgotten
    ping_command = ""  # what says whether it is there, where that is not ``query_program``
    can_requeue = False  # whether it may start a job again that has ended
    allows_overlapping_steps = (
        False  # whether the nodes of any job have room for a step, so that all may be asked at once
    )
    can_kill = False  # whether it can kill a job's ranks at once
    stderr_prefixes: tuple[str, ...] = ()  # how lines of its own begin, where ``step_command`` starts something
    step_failure_hint: str = ""  # what may be the cause where that fails

    def query(self, jobs: Sequence[JobId], seconds: float) -> StatesByJob | None:
        """Ask about all of these jobs at once; None if it does not answer in time. It has forgotten what is missing."""
        try:
            found = self.query_records(jobs, Deadline(seconds))
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if found is None else group_by_job(jobs, found)

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> Iterable[BatchJobState] | None:
        """What it says of them, in any order; raises OSError where a program cannot be started, and TimeoutExpired."""
        raise NotImplementedError

    def query_one(self, job: JobId, seconds: float = QUERY_TIMEOUT_S) -> BatchJobState | None:
        """Ask about one job; None if it does not answer. Raises Forgotten."""
        told = self.query([job], seconds)
        if told is None:
            return None
        if not told.get(job):
            raise self.forgotten_error(job)
        return told[job][0]

    def forgotten_error(self, job: JobId) -> JobForgotten:
        """The error of a job that it does not know, or no longer."""
        return JobForgotten(f"{self.title} has forgotten job {job.text}: how it ended is not known", self.history_hint)

    def why_unavailable(self, cluster: str | None = None) -> str | None:
        """Why a question would not be answered now; None where only a question tells."""
        return None

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        """A job as the programs call it."""
        return (job.number,)

    def cancel(self, job: JobId) -> None:
        """Cancel a job; what the program prints goes to our stderr. Raises LaunchError if it failed."""
        try:
            words = [self.cancel_program, *self.job_arguments(job)]
            code = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=2, timeout=QUERY_TIMEOUT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise SchedulerNotResponding(
                f"{self.cancel_program} has not cancelled job {job.text} in {QUERY_TIMEOUT_S:g} s"
            ) from None
        if code:
            raise LaunchError(f"{self.cancel_program} did not cancel job {job.text} (exit code {code})")

    def kill(self, job: JobId) -> None:
        """Cancel a job without the time that its ranks have to stop, where ``can_kill`` says that it can."""
        raise NotImplementedError

    def step_command(
        self, job: SubmittedJob, seen: BatchJobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """The words and variables that run a command on node 0 of a job, or on all nodes.

        Raises UsageError if the scheduler starts nothing in a running job.
        """
        what = f"{words[0]} cannot ask the nodes of job {seen.number}: {self.title} starts nothing in it from outside"
        raise UsageError(what, f"log in to one of them by SSH and type it there: ddplaunch {words[0]}")


def ended_state(code: int, how: str) -> BatchJobState:
    """A job that has ended: with our exit code for it, and in words, how."""
    return BatchJobState(f"{how} (exit code {code})", code)


def group_by_job(jobs: Sequence[JobId], found: Iterable[BatchJobState]) -> dict[JobId, list[BatchJobState]]:
    """The records of each job; of an array those of each index, and not of itself."""

    def is_of(one: JobId, job: JobId) -> bool:
        same = one.number.partition(".")[0] == job.number.partition(".")[0] and one.cluster == job.cluster
        return same and ((one.index or "").isdecimal() if job.index == "" else one.index == job.index)

    listed = list(found)
    told = {job: [each for each in listed if each.job and is_of(each.job, job)] for job in jobs}
    return {job: records for job, records in told.items() if records}


def array_indices(array: str) -> Iterator[str]:
    """The indices of an array like 0-3, 1,5 or 0-8:2, in order; %2 says only how many run at once."""
    for part in array.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part):
            yield from map(str, range(int(found[1]), int(found[2]) + 1, int(found[3] or 1) or 1))
        else:
            yield part


class Deadline:
    """One for all calls of a question. What is late raises TimeoutExpired."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Ask a program something. Raises OSError if it cannot be started."""
        return run_program(*words, seconds=self.left)


def run_program(
    *words: str, seconds: float = QUERY_TIMEOUT_S, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Ask a program something. Raises OSError if it cannot be started, TimeoutExpired if it takes longer."""
    return subprocess.run(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        start_new_session=True,  # Ctrl-C is ours
    )
