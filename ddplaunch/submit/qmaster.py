"""Grid Engine's own programs: submit a script, look at a job, delete it. Only this module reads what they print."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping

from ddplaunch.errors import EXIT_SIGNAL, LaunchError
from ddplaunch.submit import programs
from ddplaunch.submit.programs import Record
from ddplaunch.submit.queue import JobId

ACCOUNTED_AFTER = 120.0
"""Seconds after which a job that qstat no longer shows must be in the accounting file.

The default flush_time is 15 s (reporting_params in sge_conf(5)), and the file is often on NFS.
"""

CANCELS = "qdel"

_LIMIT = "37"  # qacct's "failed" of a job that exceeded h_rt (sge_status(5))


def check_is_here(environ: Mapping[str, str]) -> None:
    """Check that this machine has qsub. Raises UsageError if it is not on PATH."""
    programs.check_on_path("qsub", "Grid Engine", environ)


def submit(script: str, environ: Mapping[str, str]) -> JobId:
    """Hand a script to qsub; return the job's number. Raises UsageError if it refuses."""
    hint = "qconf -spl lists the parallel environments, qconf -sql the queues"
    number = programs.submit(["qsub", "-terse"], script, environ, hint).rpartition("\n")[2]
    if not number.isdecimal():
        raise LaunchError(f"qsub took the job, but its answer is not a job id: {number!r}", "qstat lists your jobs")
    return JobId(number)


class Scheduler:
    """What a follower asks about one job."""

    asked = "qstat"

    def __init__(self, log: str) -> None:
        self._log = log
        self._gone_since: float | None = None
        self._waits = self._deleted = False  # both: it was deleted while it waited

    def look(self, job: JobId) -> Record | None:
        """Ask qstat about a job, and once it is gone, qacct; None if qstat does not answer.

        Raises LaunchError if qacct does not show the job for long.
        """
        try:
            listed = programs.call("qstat", "-xml")
            if listed.returncode:
                return None
            state = state_of(listed.stdout, job.number)
            if state is not None:
                self._gone_since, self._waits = None, "w" in state
                return Record(words_of(state), self._log, self._waits)
            accounted = programs.call("qacct", "-j", job.number)
        except (OSError, subprocess.TimeoutExpired):
            return None
        end = end_of(accounted.stdout)
        if end is not None:
            return programs.ended(self._log, *end)
        if self._waits and self._deleted:  # qacct never shows such a job
            return programs.ended(self._log, EXIT_SIGNAL + 15, "was deleted before it began")
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since > ACCOUNTED_AFTER:
            what = f"job {job.number} has ended, and qacct does not show it: its exit code is not known"
            raise LaunchError(
                what, f"qacct -j {job.number} shows it later; a job deleted while it waited is never there"
            )
        return Record("has ended; qacct does not show it yet", self._log, gone=True)

    def cancel(self, job: JobId) -> None:
        """Delete a job. Raises LaunchError if qdel failed."""
        programs.cancel(CANCELS, job.number)
        self._deleted = self._waits


def state_of(listed: str, number: str) -> str | None:
    """The state of a job in what ``qstat -xml`` prints, like "r"; None where it is not there."""
    for job in re.findall(r"<job_list\b.*?</job_list>", listed, re.DOTALL):
        if f"<JB_job_number>{number}</JB_job_number>" in job:
            state = re.search(r"<state>(\w+)</state>", job)
            return state[1] if state else None
    return None


def words_of(state: str) -> str:
    """What to say about a job in a state as qstat shows it, like qw, r or Eqw."""
    if "E" in state:
        return f"is in an error state, {state}, and will not start: qstat -explain E says why"
    if "d" in state:
        return "is being deleted"
    if "h" in state:
        return "waits, and is on hold"
    return "waits" if "w" in state else "is running"


def end_of(accounted: str) -> tuple[int, str] | None:
    """Our exit code of a job, and how it ended, from what ``qacct -j`` prints; None where it has nothing of it.

    A record is lines of a name and a value, below a line of ``=``. What qrsh has started may have records of its own,
    some with a pe_taskid; our script ends after it. The last record counts, also of a job that was started again.
    """
    found = None
    for record in re.split(r"(?m)^=+$", accounted):
        fields = dict(re.findall(r"(?m)^(\w+) +(.*?) *$", record))
        if fields.get("pe_taskid", "NONE") not in ("NONE", "undefined") or "exit_status" not in fields:
            continue
        failed, code = fields.get("failed", "0"), int(fields["exit_status"].split()[0])
        number = failed.split()[0]
        if number == _LIMIT:
            found = EXIT_SIGNAL + 15, "reached its time limit"
        elif number == "0":
            found = code, "failed" if code else "completed"
        elif code > EXIT_SIGNAL:
            found = code, f"was killed by signal {code - EXIT_SIGNAL}"
        else:
            found = code or 1, f"failed: Grid Engine says {failed}"
    return found
