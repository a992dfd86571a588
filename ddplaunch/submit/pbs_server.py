"""PBS's own programs: submit a script, look at a job, delete it. Only this module reads what they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from ddplaunch.errors import EXIT_SIGNAL, LaunchError
from ddplaunch.submit import programs
from ddplaunch.submit.programs import Record
from ddplaunch.submit.queue import JobId

CANCELS = "qdel"

_SIGNALS = 256
"""Exit_status of a job whose script a signal ended is 256 and the signal."""

_KILLED = {
    -24: ("used more CPUs than it had", EXIT_SIGNAL + 15),
    -25: ("used more CPUs than it had", EXIT_SIGNAL + 15),
    -26: ("used more virtual memory than it had", EXIT_SIGNAL + 9),
    -27: ("used more memory than it had", EXIT_SIGNAL + 9),
    -28: ("used more CPU time than it had", EXIT_SIGNAL + 15),
    -29: ("reached its time limit", EXIT_SIGNAL + 15),
}
"""Exit_status of a job that PBS killed for a limit: words, and our exit code (JOB_EXEC_KILL_… of OpenPBS)."""

_STATES = {
    "Q": "waits",
    "W": "waits for its start time",
    "H": "waits, and is on hold",
    "T": "is being moved",
    "M": "was moved to another server",
    "B": "is running",
    "R": "is running",
    "S": "is suspended",
    "U": "is suspended: its host's keyboard is in use",
    "E": "is ending",
}


def check_is_here(environ: Mapping[str, str]) -> None:
    """Check that this machine has qsub. Raises UsageError if it is not on PATH."""
    programs.check_on_path("qsub", "PBS", environ)


def submit(script: str, environ: Mapping[str, str]) -> JobId:
    """Hand a script to qsub; return the job's id, like 1234.pbs01. Raises UsageError if it refuses."""
    hint = "qstat -Q lists the queues, pbsnodes -a the hosts with what they have"
    number = programs.submit(["qsub"], script, environ, hint).rpartition("\n")[2]
    if re.fullmatch(r"\d+(\.\S+)?", number) is None:
        raise LaunchError(f"qsub took the job, but its answer is not a job id: {number!r}", "qstat lists your jobs")
    return JobId(number)


class Scheduler:
    """What a follower asks about one job."""

    asked = "qstat"

    def __init__(self, log: str) -> None:
        self._log = log

    def look(self, job: JobId) -> Record | None:
        """Ask qstat about a job; None if it does not answer.

        Raises LaunchError if PBS has forgotten the job: it keeps none that has ended, or no longer this one.
        """
        try:
            shown = programs.call("qstat", "-x", "-f", job.number)
            if shown.returncode and "job_history_enable" in shown.stderr:
                shown = programs.call("qstat", "-f", job.number)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if "Unknown Job Id" in shown.stderr:
            what = f"PBS has forgotten job {job.number}: its exit code is not known"
            hint = f"its log: {self._log}\nPBS keeps jobs that have ended if the site sets job_history_enable"
            raise LaunchError(what, hint)
        return None if shown.returncode else parse(shown.stdout, self._log)

    def cancel(self, job: JobId) -> None:
        """Delete a job. Raises LaunchError if qdel failed."""
        programs.cancel(CANCELS, job.number)


def parse(shown: str, log: str) -> Record | None:
    """Read what ``qstat -f`` prints of one job; None if it is something else.

    Lines are ``    name = value``; a long value goes on in the next lines, behind a tab.
    """
    fields = dict(re.findall(r"(?m)^ {4}(\S+) = (.*)$", shown.replace("\n\t", "")))
    state = fields.get("job_state")
    if state is None:
        return None
    if state in "FX":
        return programs.ended(log, *_end(fields.get("Exit_status")))
    words, waits = _STATES.get(state, f"is in state {state}"), state in "QWHT"
    why = fields.get("comment") if waits else None
    return Record(f"{words}: {why}" if why else words, log, waits)


def _end(status: str | None) -> tuple[int, str]:
    """Our exit code of a job that has ended, and how it did; it has no status if it never began."""
    if status is None:
        return EXIT_SIGNAL + 15, "was deleted before it began"
    code = int(status)
    if code >= _SIGNALS:
        return EXIT_SIGNAL + code % _SIGNALS, f"was killed by signal {code % _SIGNALS}"
    if code < 0:
        how, ours = _KILLED.get(code, (f"was not run by PBS (Exit_status {code})", 1))
        return ours, how
    return code, "failed" if code else "completed"
