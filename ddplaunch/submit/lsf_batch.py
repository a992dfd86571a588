"""LSF's own programs: submit a script, look at a job, kill it. Only this module reads what they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from ddplaunch.errors import EXIT_SIGNAL, LaunchError
from ddplaunch.submit import programs
from ddplaunch.submit.programs import Record
from ddplaunch.submit.queue import JobId

CANCELS = "bkill"

_STATES = {
    "PEND": "waits",
    "PSUSP": "waits, and is on hold",
    "WAIT": "waits",
    "PROV": "waits for its hosts",
    "RUN": "is running",
    "USUSP": "is suspended",
    "SSUSP": "is suspended by LSF",
    "UNKWN": "runs on a host that does not answer",
}

_FIELDS = "stat exit_code exit_reason delimiter='|'"

_KILLED = {
    "RUNLIMIT": ("reached its time limit", EXIT_SIGNAL + 15),
    "MEMLIMIT": ("used more memory than it had", EXIT_SIGNAL + 9),
}
"""Reasons (TERM_…) why LSF ended a job that say more than its exit code: words, and our exit code."""


def check_is_here(environ: Mapping[str, str]) -> None:
    """Check that this machine has bsub. Raises UsageError if it is not on PATH."""
    programs.check_on_path("bsub", "LSF", environ)


def submit(script: str, environ: Mapping[str, str]) -> JobId:
    """Hand a script to bsub; return the job's number. Raises UsageError if it refuses."""
    said = programs.submit(["bsub"], script, environ, "bqueues lists the queues, bhosts the hosts")
    found = re.search(r"Job <(\d+)>", said)
    if found is None:
        raise LaunchError(f"bsub took the job, but its answer has no job id: {said!r}", "bjobs lists your jobs")
    return JobId(found[1])


class Scheduler:
    """What a follower asks about one job."""

    asked = "bjobs"

    def __init__(self, log: str) -> None:
        self._log = log

    def look(self, job: JobId) -> Record | None:
        """Ask bjobs about a job, and bhist about one that it has forgotten; None if bjobs does not answer.

        Raises LaunchError if both have no word of the job's end.
        """
        try:
            shown = programs.call("bjobs", "-noheader", "-o", _FIELDS, job.number)
            if "is not found" not in shown.stderr:
                return parse(shown.stdout, self._log)
            end = end_of(programs.call("bhist", "-l", "-n", "0", job.number).stdout)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if end is None:
            what = f"LSF has forgotten job {job.number}: its exit code is not known"
            raise LaunchError(what, f"its log: {self._log}")
        return programs.ended(self._log, *end)

    def cancel(self, job: JobId) -> None:
        """Kill a job. Raises LaunchError if bkill failed."""
        programs.cancel(CANCELS, job.number)


def parse(shown: str, log: str) -> Record | None:
    """Read what ``bjobs -noheader -o`` prints of one job, like ``EXIT|7|-``; None if it is something else."""
    found = re.fullmatch(r"([A-Z]+)\|(\d+|-|)\|(.*)", shown.strip())
    if found is None:
        return None
    state, code, reason = found.groups()
    if state == "DONE":
        return programs.ended(log, 0, "completed")
    if state in ("EXIT", "ZOMBI"):
        return programs.ended(log, *_end(int(code) if code.isdecimal() else None, reason))
    return Record(_STATES.get(state, f"is in state {state}"), log, waits=state in ("PEND", "PSUSP", "WAIT", "PROV"))


def end_of(history: str) -> tuple[int, str] | None:
    """Our exit code of a job, and how it ended, by ``bhist -l``, which breaks lines within words; None if it runs."""
    text = re.sub(r"\s+", "", history)
    if "Donesuccessfully" in text:
        return 0, "completed"
    found = re.search(r".*Exitedwithexitcode(\d+)", text)
    if found is None and "Completed<exit>" not in text and "Exited" not in text:
        return None
    return _end(int(found[1]) if found else None, text)


def _end(code: int | None, reason: str) -> tuple[int, str]:
    """Our exit code of a job that did not succeed, and how it ended."""
    found = re.search(r"TERM_([A-Z_]+)", reason)
    if found and found[1] in _KILLED:
        how, ours = _KILLED[found[1]]
        return ours, how
    if code is None:
        return EXIT_SIGNAL + 15, "was killed before it began"
    return code or 1, f"was killed: LSF says {found[0]}" if found else "failed"
