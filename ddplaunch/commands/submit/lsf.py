"""LSF: the script of a job, short enough to read before it is submitted, and the programs for submitted jobs.

LSF gives slots; ``span[ptile=N]`` puts N of them on each host. The script starts one launcher on each host by blaunch,
which hands words to a shell as rsh does, so bash reads the command from its input. bsub(1) says what each ``#BSUB``
line means.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch.commands.submit.hosts_job import AGAIN, HostsJob, finish, hosts, launch, mark, options, start, word
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_SIGNAL, LaunchError
from ddplaunch.queue import scheduler as programs
from ddplaunch.queue.scheduler import Deadline, JobId, Record, Told

JOB_ID = "LSB_JOBID"
INDEX = "LSB_JOBINDEX"
HOSTFILE = "LSB_DJOB_HOSTFILE"

_PATTERNS = {"%J": JOB_ID, "%I": INDEX}  # what bsub calls number and index in the name of a file
_HINT = "bjobs -l $LSB_JOBID shows what the job was given"

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

_FIELDS = "jobid jobindex stat exit_code exit_reason delimiter='|'"

_KILLED = {
    "RUNLIMIT": ("reached its time limit", EXIT_SIGNAL + 15),
    "MEMLIMIT": ("used more memory than it had", EXIT_SIGNAL + 9),
}
"""Reasons (TERM_…) why LSF ended a job that say more than its exit code: words, and our exit code."""


def script(job: HostsJob) -> str:
    """Write the job as a script for bsub. Raises UsageError if a value cannot stand in a ``#BSUB`` line."""
    name = f"${JOB_ID}.${INDEX}" if job.array else f"${JOB_ID}"
    parts = (_head(job), [""], _log(job), [""], hosts(job, HOSTFILE, _HINT), [""], mark(job, name), _launchers(job))
    return "\n".join(line for part in parts for line in part) + "\n"


def log_path(job: HostsJob, number: str) -> str:
    """Where the log of job ``number`` will be; %a stands for its index in an array."""
    return os.path.join(job.chdir, _output(job).replace("%J", number).replace("%I", "%a"))


def _output(job: HostsJob) -> str:
    return job.output or ("lsf-%J_%I.out" if job.array else "lsf-%J.out")


def _head(job: HostsJob) -> Iterator[str]:
    slots = job.cpus_per_task or 1
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: bsub < THIS_FILE"
    indices, _, at_once = (job.array or "").partition("%")
    array = f"[{indices}]{at_once and '%'}{at_once}" if job.array else ""
    yield f"#BSUB -J {word(job.job_name + array)}"
    yield f"#BSUB -n {job.nodes * slots}"
    yield f'#BSUB -R "span[ptile={slots}]"'
    if job.gpus_per_node is not None:
        yield f'#BSUB -gpu "num={job.gpus_per_node}"'
    if job.exclusive:
        yield "#BSUB -x"
    if job.seconds is not None:
        minutes = -(-job.seconds // 60)
        yield f"#BSUB -W {minutes // 60}:{minutes % 60:02}"
    if job.partition is not None:
        yield f"#BSUB -q {word(job.partition)}"
    if job.account is not None:
        yield f"#BSUB -P {word(job.account)}"
    yield from options(job, "#BSUB")
    if job.requeue:
        again = job.requeue
        yield f"# The warning comes before the time limit: {again.times}."
        yield f"#BSUB -wa {again.warning}"
        yield f"#BSUB -wt {-(-again.before_the_end // 60)}"
        yield f"#BSUB -Q {AGAIN}"
        yield "#BSUB -r"
    yield "#BSUB -o /dev/null"


def _log(job: HostsJob) -> Iterator[str]:
    yield "# The log, as it grows: LSF would write it at the end of the job, with a report."
    first, *rest = re.split("(%[JI])", _output(job))
    parts = [os.path.join(job.chdir, first), *rest]
    name = "".join(f'"${_PATTERNS[part]}"' if part in _PATTERNS else part and shlex.quote(part) for part in parts)
    yield f"exec >>{name} 2>&1"


def _launchers(job: HostsJob) -> Iterator[str]:
    variables = (JOB_ID, INDEX) if job.array else (JOB_ID,)
    yield "# One launcher on each host. blaunch keeps no quotation marks, so bash reads the command from its input."
    yield from launch(job, "lsf", variables, as_input=True)
    yield "# bkill sends SIGINT and SIGTERM. They are for the launchers: this script waits for them."
    yield "trap : INT TERM USR2"
    if job.requeue:
        yield "# The warning comes to all processes of this script. It is for the launcher alone, which handles it."
        yield f"trap '' {job.requeue.warning}"
    yield from start(job, 'blaunch -z "${hosts[rank]}" /bin/bash -s', "/bin/bash -s", variables, ' <<<"$launch"')
    if job.requeue:
        yield f"[ $code -eq {AGAIN} ] && code=1  # after {AGAIN} LSF would start it again"
    yield from finish(job)


class Lsf(programs.Scheduler):
    """LSF, by bjobs, and by bhist for what that has forgotten."""

    system, submits, asks, cancels = "LSF", "bsub", "bjobs", "bkill"
    keeps = "bhist -l -n 0 shows what LSF still has"

    def hand_in(self, script: str, environ: Mapping[str, str]) -> JobId:
        said = programs.submit(["bsub"], script, environ, "bqueues lists the queues, bhosts the hosts")
        found = re.search(r"Job <(\d+)>", said)
        if found is None:
            raise LaunchError(f"bsub took the job, but its answer has no job id: {said!r}", "bjobs lists your jobs")
        return JobId(found[1], index="" if re.search(r'(?m)^#BSUB -J ".*\[', script) else None)

    def words(self, job: JobId) -> tuple[str, ...]:
        return (f"{job.number}[{job.index}]" if job.index else job.number,)

    def ask(self, jobs: Sequence[JobId], seconds: float) -> Told | None:
        deadline, words = Deadline(seconds), [word for job in jobs for word in self.words(job)]
        try:
            shown = deadline.call("bjobs", "-noheader", "-o", _FIELDS, *words)
            found = list(listed(shown.stdout))
            if not found and "is not found" not in shown.stderr:
                return None
            told = _sorted(found, jobs)
            if lost := [job for job in jobs if job not in told]:
                words = [word for job in lost for word in self.words(job)]
                told |= _sorted(ends_of(deadline.call("bhist", "-l", "-n", "0", *words).stdout), lost)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return told


def _sorted(found: Sequence[Record], jobs: Sequence[JobId]) -> dict[JobId, list[Record]]:
    told = dict[JobId, list[Record]]()
    for job in jobs:
        for each in found:
            if each.job and each.job.number == job.number and job.index in ("", each.job.index):
                told.setdefault(job, []).append(each)
    return told


def listed(shown: str) -> Iterator[Record]:
    """What ``bjobs -noheader -o`` prints of jobs, like ``4711|0|EXIT|7|-``; the index of a job alone is 0."""
    for number, index, fields in re.findall(r"(?m)^(\d+)(?:\[\d+\])?\|(\d+)\|(.*)$", shown):
        if record := parse(fields):
            job = JobId(number, index=None if index == "0" else index)
            yield replace(record, job=job, number=job.typed)


def parse(fields: str) -> Record | None:
    """Read state, exit code and reason, like ``EXIT|7|-``; None if it is something else."""
    found = re.fullmatch(r"([A-Z]+)\|(\d+|-|)\|(.*)", fields.strip())
    if found is None:
        return None
    state, code, reason = found.groups()
    if state == "DONE":
        return programs.ended(0, "completed")
    if state in ("EXIT", "ZOMBI"):
        return programs.ended(*_end(int(code) if code.isdecimal() else None, reason))
    waits = state in ("PEND", "PSUSP", "WAIT", "PROV")
    words = _STATES.get(state, f"is in state {state}")
    return Record(words, None, waits, state == "RUN", state="pending" if waits else "running")


def ends_of(history: str) -> list[Record]:
    """How jobs ended, by ``bhist -l``: each begins with its name in angle brackets."""
    found = []
    for text in re.split(r"(?m)^(?=Job <)", history):
        begins = re.match(r"Job <(\d+)(?:\[(\d+)\])?>", text)
        end = end_of(text) if begins else None
        if begins and end:
            job = JobId(begins[1], index=begins[2])
            found.append(replace(programs.ended(*end), job=job, number=job.typed))
    return found


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
