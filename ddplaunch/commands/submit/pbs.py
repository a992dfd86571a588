"""PBS: the script of a job, short enough to read before it is submitted, and the programs for submitted jobs.

For PBS Professional and OpenPBS: Torque has other words for resources. qsub(1B) says what each ``#PBS`` line means,
pbs_resources(7B) what a chunk of ``select`` may have, pbsdsh(1B) how a task starts on another host: by the words of a
command, without the script's variables, folder and input.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch.commands.submit.hosts_job import HostsJob, finish, hosts, launch, options, start, word
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_SIGNAL, LaunchError
from ddplaunch.queue import scheduler as programs
from ddplaunch.queue.scheduler import Deadline, JobId, Record, Told

JOB_ID = "PBS_JOBID"
INDEX = "PBS_ARRAY_INDEX"
NODEFILE = "PBS_NODEFILE"
EACH = "^array_index^"  # what qsub calls the index in the name of a file

_HINT = "qstat -f $PBS_JOBID shows what the job was given (exec_host)"
_PER_NODE = '/bin/bash -c "$launch" node'

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


def script(job: HostsJob) -> str:
    """Write the job as a script for qsub. Raises UsageError if a value cannot stand in a ``#PBS`` line."""
    return "\n".join([*_head(job), "", *hosts(job, NODEFILE, _HINT), "", *_launchers(job)]) + "\n"


def log_path(job: HostsJob, number: str) -> str:
    """Where the log of job ``number`` will be; 1234.pbs01 has the sequence number 1234, %a stands for its index."""
    name = job.output or f"{job.job_name}.o{number.partition('.')[0]}{f'.{EACH}' if job.array else ''}"
    return os.path.join(job.chdir, name.replace(EACH, "%a"))


def _head(job: HostsJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: qsub THIS_FILE"
    yield "#PBS -S /bin/bash"
    yield f"#PBS -N {word(job.job_name)}"
    yield f"#PBS -l select={_select(job)}"
    yield f"#PBS -l place=scatter{':exclhost' if job.exclusive else ''}"
    if job.array:
        yield f"#PBS -J {job.array}"
    if job.spares:
        yield "# When a node is lost, a spare takes its place: PBS is not to end the job."
        yield "#PBS -W tolerate_node_failures=all"
    if job.seconds is not None:
        yield f"#PBS -l walltime={job.seconds // 3600}:{job.seconds // 60 % 60:02}:{job.seconds % 60:02}"
    if job.partition is not None:
        yield f"#PBS -q {word(job.partition)}"
    if job.account is not None:
        yield f"#PBS -A {word(job.account)}"
    yield from options(job, "#PBS")
    yield "# Both streams go into one log as they come; the job has the variables of the shell that submits it."
    yield "#PBS -j oe"
    yield "#PBS -k doe"
    if job.output:
        yield f"#PBS -o {word(os.path.join(job.chdir, job.output))}"
    yield "#PBS -V"


def _select(job: HostsJob) -> str:
    """The chunks, each a node; mpiprocs is how many lines each has in the file of hosts, and how many tasks."""
    chunk = [f"ncpus={job.cpus_per_task or 1}", "mpiprocs=1"]
    if job.gpus_per_node is not None:
        chunk.append(f"ngpus={job.gpus_per_node}")
    if job.mem is not None:
        chunk.append(f"mem={_size(job.mem)}")
    return ":".join([str(job.nodes), *chunk])


def _size(text: str) -> str:
    """A size as PBS has it, 200gb for 200G; without a unit it is megabytes, as for sbatch."""
    number, unit = re.fullmatch(r"(\d+)([A-Z]?)B?", text.upper()).groups()  # type: ignore[union-attr] # was checked
    return f"{number}{(unit or 'M').lower()}b"


def _launchers(job: HostsJob) -> Iterator[str]:
    yield "# One launcher on each host. pbsdsh starts it in the home folder, with the variables of qsub alone."
    variables = (JOB_ID, INDEX) if job.array else (JOB_ID,)
    unset = "unset OMP_NUM_THREADS  # PBS has set it to the CPUs of the whole node"
    yield from launch(job, "pbs", variables, (unset,))
    yield "# At the time limit and for qdel PBS sends SIGTERM. It is for the launchers: this script waits for them."
    yield "trap : TERM"
    yield from start(job, f'pbsdsh -n "$rank" -- {_PER_NODE}', _PER_NODE, variables)
    yield from finish(job)


class Pbs(programs.Scheduler):
    """PBS, by qstat, which has jobs that have ended too where the site keeps them."""

    system, submits, asks, cancels = "PBS", "qsub", "qstat", "qdel"
    keeps = "PBS keeps jobs that have ended if the site sets job_history_enable"

    def hand_in(self, script: str, environ: Mapping[str, str]) -> JobId:
        hint = "qstat -Q lists the queues, pbsnodes -a the hosts with what they have"
        answer = programs.submit(["qsub"], script, environ, hint).rpartition("\n")[2]
        found = re.fullmatch(r"(\d+)(\[\])?(\.\S+)?", answer)
        if found is None:
            raise LaunchError(f"qsub took the job, but its answer is not a job id: {answer!r}", "qstat lists your jobs")
        return JobId(found[1] + (found[3] or ""), index="" if found[2] else None)

    def words(self, job: JobId) -> tuple[str, ...]:
        """4711.pbs01, 4711[2].pbs01, or 4711[].pbs01 for all of an array."""
        number, dot, server = job.number.partition(".")
        return (job.number if job.index is None else f"{number}[{job.index}]{dot}{server}",)

    def ask(self, jobs: Sequence[JobId], seconds: float) -> Told | None:
        deadline = Deadline(seconds)
        each = ["-t"] if any(job.index == "" for job in jobs) else []  # the jobs of an array, not it alone
        words = ["-f", *each, *(word for job in jobs for word in self.words(job))]
        try:
            shown = deadline.call("qstat", "-x", *words)
            if shown.returncode and "job_history_enable" in shown.stderr:
                shown = deadline.call("qstat", *words)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = list(listed(shown.stdout))
        if shown.returncode and not found and "Unknown Job Id" not in shown.stderr:
            return None
        told = {job: [each for each in found if each.job and _is_of(each.job, job)] for job in jobs}
        return {job: records for job, records in told.items() if records}


def _is_of(one: JobId, job: JobId) -> bool:
    """Whether it is this job, or one of this array, which is not one itself."""
    same = one.number.partition(".")[0] == job.number.partition(".")[0]
    return same and (bool(one.index) if job.index == "" else one.index == job.index)


def listed(shown: str) -> Iterator[Record]:
    """What ``qstat -f`` prints of jobs, each below its id."""
    for text in re.split(r"(?m)^(?=Job Id: )", shown):
        found = re.match(r"Job Id: (\d+)(?:\[(\d*)\])?(\.\S+)?", text)
        record = parse(text) if found else None
        if found and record:
            job = JobId(found[1] + (found[3] or ""), index=found[2])
            yield replace(record, job=job, number=job.typed)


def parse(shown: str) -> Record | None:
    """Read what ``qstat -f`` prints of one job; None if it is something else.

    Lines are ``    name = value``; a long value goes on in the next lines, behind a tab.
    """
    fields = dict(re.findall(r"(?m)^ {4}(\S+) = (.*)$", shown.replace("\n\t", "")))
    state = fields.get("job_state")
    if state is None:
        return None
    if state in "FX":
        return programs.ended(*_end(fields.get("Exit_status")))
    words, waits = _STATES.get(state, f"is in state {state}"), state in "QWHT"
    why = fields.get("comment") if waits else None
    count = "pending" if waits else "running"
    return Record(f"{words}: {why}" if why else words, None, waits, state == "R", state=count)


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
