"""Base class of batch schedulers: job ids, job states, and running the scheduler's programs with a timeout."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

QUICK_TIMEOUT_S = 10.0  # for commands that query once
QUERY_TIMEOUT_S = 60.0  # while a job is followed, and for cancelling

ACCOUNTING_DELAY_S = 120.0
"""Time after which a job that its scheduler no longer lists must be in the accounting file.

Grid Engine's default flush_time is 15 s (reporting_params in sge_conf(5)), and the file is often on NFS.
"""


class JobId(Struct, frozen=True):
    """A job's number as its scheduler gave it, like 4711 or 4711.pbs01, and the cluster where there are several."""

    number: str
    cluster: str | None = None
    index: str | None = None  # in an array; "" is the whole array, None is not an array

    @property
    def text(self) -> str:
        """The form that users type: 4711_2 for index 2 of an array."""
        number, dot, server = self.number.partition(".")
        return f"{number}_{self.index}{dot}{server}" if self.index else self.number


class BatchJobState(Struct, frozen=True):
    """The state of a job as its scheduler reports it."""

    description: str  # completes the sentence "job 7 …"
    code: int | None = None  # the exit code that ddplaunch returns for it; None until it is known
    is_pending: bool = False  # it has not started, or waits to start again
    is_running: bool = False  # its nodes can be queried
    ended_unknown: bool = False  # it has ended, the exit code is not known yet
    state: str = ""  # one word, for counting; "" for pending, running, failed and completed
    job: JobId | None = None  # its id; of an array, that of the index
    number: str = ""  # the number in the name of its runs
    host: str | None = None  # the host of node 0
    log_path: str | None = None  # the file of its output
    stderr_path: str | None = None  # the file of its stderr, if it is not the log
    last_lines: str = ""  # what a rank that failed printed last, if its scheduler keeps that


class JobForgotten(LaunchError):
    """The scheduler no longer knows the job, or never did."""


class SchedulerNotResponding(LaunchError):
    """The scheduler does not answer."""

    exit_code = EXIT_UNAVAILABLE


class LogSource:
    """A source of a batch job's output; copies new output to stdout, and the job's stderr to stderr."""

    def update(self, state: BatchJobState) -> None:
        """Called after each query of the scheduler with the state of the job."""

    def copy_new(self) -> None:
        """Copy the job's output since the last call."""
        raise NotImplementedError

    def copy_rest(self) -> None:
        """Copy all output that is available now; once the job has ended, this is the rest of its output."""
        self.copy_new()

    def close(self) -> None:
        """End any program that reads the job's output; does nothing by default."""


StatesByJob = Mapping[JobId, Sequence[BatchJobState]]
"""The states of each queried job: one, or one for each index of an array."""


class Scheduler:
    """A batch scheduler: queries and cancels jobs. An object may be used for many queries."""

    title: str  # its name in messages
    submit_program: str  # takes a batch script
    query_program: str  # shows the state of a job
    cancel_program: str  # cancels a job
    history_hint: str  # where to look up jobs that it no longer knows
    ping_command = ""  # shows whether it is up, if not ``query_program``
    can_requeue = False  # a job that has ended may start again
    allows_overlapping_steps = False  # a step can start on every node of any job
    can_kill = False  # it can send SIGKILL to the ranks at once
    stderr_prefixes: tuple[str, ...] = ()  # prefixes of its own lines on the stderr of a step
    step_failure_hint: str = ""  # hint where no step could be started
    missing_hint = "run it on a login node"  # hint for a machine without its programs

    def query(self, jobs: Sequence[JobId], seconds: float) -> StatesByJob | None:
        """Query the states of all jobs at once, without jobs that are unknown; None if there is no answer in time."""
        try:
            found = self.query_records(jobs, Deadline(seconds))
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if found is None else group_by_job(jobs, found)

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> Iterable[BatchJobState] | None:
        """Return the jobs' states in any order. Raises OSError if a program cannot be started, and TimeoutExpired."""
        raise NotImplementedError

    def query_one(self, job: JobId, seconds: float = QUERY_TIMEOUT_S) -> BatchJobState | None:
        """Query the state of one job; None if there is no answer. Raises JobForgotten."""
        states = self.query([job], seconds)
        if states is None:
            return None
        if not states.get(job):
            raise self.forgotten_error(job)
        return states[job][0]

    def forgotten_error(self, job: JobId) -> JobForgotten:
        """Return the error for a job that the scheduler does not know, or no longer knows."""
        what = f"{self.title} no longer knows job {job.text}; its exit status is unknown"
        return JobForgotten(what, self.history_hint)

    def why_unavailable(self, cluster: str | None = None) -> str | None:
        """Return why a query of the scheduler would fail now; None if no reason is known without a query."""
        return None

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        """The arguments that name a job to the scheduler's programs."""
        return (job.number,)

    def find_unrecorded_job(self, word: str) -> SubmittedJob | None:
        """Find a running or pending job of the user that is not on record; None if there is none, or no answer."""
        return None

    def open_log(self, job: JobId, lines: int) -> LogSource | None:
        """Open a job's output from its last ``lines`` lines on (0: all); None if the scheduler writes it to a file."""
        return None

    def cancel(self, job: JobId) -> None:
        """Cancel a job; the program's output goes to stderr. Raises LaunchError if it failed."""
        words, failed = [self.cancel_program, *self.job_arguments(job)], f"did not cancel job {job.text}"
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, timeout=QUERY_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise SchedulerNotResponding(f"{self.cancel_program} {failed} within {QUERY_TIMEOUT_S:g} s") from None
        if done.returncode:
            raise LaunchError(f"{self.cancel_program} {failed} (exit code {done.returncode})")

    def kill(self, job: JobId) -> None:
        """Send SIGKILL to a job's ranks, without the usual grace; only if ``can_kill``."""
        raise NotImplementedError

    def step_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return the arguments and variables that run a command on node 0 of a job, or on all nodes.

        Raises UsageError if the scheduler cannot start anything in a running job.
        """
        why = f"{self.title} cannot start a step in a running job"
        what = f"{words[0]} cannot reach the nodes of job {state.number}: {why}"
        raise UsageError(what, f"log in to one of them with SSH and run there: ddplaunch {words[0]}")

    def interactive_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, terminal: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return arguments and variables like ``step_command``, for a command that reads our stdin, on ``state.host``.

        Raises UsageError if the scheduler cannot do that.
        """
        self.step_command(job, state, words, everywhere=False)
        what = f"{self.title} cannot give a terminal on the nodes of job {state.number}"
        raise UsageError(what, f"log in to {state.host or 'its first node'} and type: ddplaunch {words[0]}")

    def file_copy_hint(self, state: BatchJobState) -> str | None:
        """Return a hint how to copy a file from node 0; None if the nodes have this machine's folders."""
        return None


def ended_state(code: int, how: str) -> BatchJobState:
    """The state of a job that has ended; ``code`` is the exit code that ddplaunch returns for it."""
    return BatchJobState(f"{how} (exit code {code})", code)


def group_by_job(jobs: Sequence[JobId], states: Iterable[BatchJobState]) -> dict[JobId, list[BatchJobState]]:
    """Group states by queried job; a whole array gets the states of its indices, not its own state."""

    def belongs_to(one: JobId, job: JobId) -> bool:
        same = one.number.partition(".")[0] == job.number.partition(".")[0] and one.cluster == job.cluster
        return same and ((one.index or "").isdecimal() if job.index == "" else one.index == job.index)

    listed = list(states)
    grouped = {job: [each for each in listed if each.job and belongs_to(each.job, job)] for job in jobs}
    return {job: records for job, records in grouped.items() if records}


def array_indices(array: str) -> Iterator[str]:
    """Yield the indices of an array like 0-3, 1,5 or 0-8:2, in order; %2 only limits how many run at once."""
    for part in array.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part):
            yield from map(str, range(int(found[1]), int(found[2]) + 1, int(found[3] or 1) or 1))
        else:
            yield part


class Deadline:
    """A deadline shared by all program calls of one query; a call that exceeds it raises TimeoutExpired."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program and return its output. Raises OSError if it cannot be started."""
        return run_program(*words, seconds=self.left)


def run_program(
    *words: str, seconds: float = QUERY_TIMEOUT_S, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output. Raises OSError if it cannot be started, TimeoutExpired if it is late."""
    return subprocess.run(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        start_new_session=True,  # so that Ctrl-C reaches ddplaunch alone
    )


def side_by_side_command(commands: Iterable[Sequence[str]]) -> list[str]:
    """Return one command that runs several at once and waits for all; its exit code is that of the last that failed.

    The shell's ``jobs -p`` would omit a command that has ended before, and with it its exit code: bash(1), jobs.
    """
    starts = "".join(f"{shlex.join(words)} & pids+=($!)\n" for words in commands)
    return [
        "/bin/bash",
        "-c",
        f"pids=()\n{starts}code=0\nfor pid in ${{pids[@]}}; do wait $pid || code=$?; done\nexit $code",
    ]
