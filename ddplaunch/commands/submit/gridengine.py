"""Grid Engine: the script of a job, short enough to read before it is submitted, and the programs for submitted jobs.

Grid Engine gives slots, not nodes, and starts one process: the script, on the first host. So the script starts one
launcher on each host, by ``qrsh -inherit``, and these learn their node rank from variables that ``clusters/sge`` reads.
qsub(1) says what each ``#$`` line means, sge_pe(5) what a parallel environment is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.commands.submit.hosts_job import AGAIN, HostsJob, finish, hosts, launch, mark, start
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_SIGNAL, LaunchError, UsageError
from ddplaunch.plan.command import python_command
from ddplaunch.queue import scheduler as programs
from ddplaunch.queue.scheduler import Deadline, JobId, Record, Told

if TYPE_CHECKING:
    from ddplaunch.queue.submitted import Submitted

ACCOUNTED_AFTER = 120.0
"""Seconds after which a job that qstat no longer shows must be in the accounting file.

The default flush_time is 15 s (reporting_params in sge_conf(5)), and the file is often on NFS.
"""

_NUMBER, _TASK = "$JOB_ID", "$TASK_ID"  # what qsub calls a job's number and index in the name of a file
_AGAIN, _LIMIT = "25", "37"  # qacct's "failed" of a job that is started again, and of one that exceeded h_rt
_HINT = "qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N"


def script(job: HostsJob) -> str:
    """Write the job as a script for qsub. Raises UsageError if a value cannot stand in a ``#$`` line."""
    given = "$PE gave $NSLOTS slots on"
    name = f"{_NUMBER}.$SGE_TASK_ID" if job.array else _NUMBER
    parts = (_head(job), _setup(job), hosts(job, "PE_HOSTFILE", _HINT, given), [""], mark(job, name), _launchers(job))
    return "\n".join(line for part in parts for line in part) + "\n"


def log_path(job: HostsJob, number: str) -> str:
    """Where the log of job ``number`` will be; %a stands for its index in an array."""
    path = _output(job).replace(_NUMBER, number).replace("$JOB_NAME", job.job_name).replace(_TASK, "%a")
    return os.path.join(job.chdir, path)


def _output(job: HostsJob) -> str:
    return job.output or (f"sge-{_NUMBER}.{_TASK}.out" if job.array else f"sge-{_NUMBER}.out")


def _head(job: HostsJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: qsub THIS_FILE"
    yield "#$ -S /bin/bash"
    yield f"#$ -N {_word(job.job_name)}"
    yield f"#$ -pe {_word(job.pe or '')} {job.nodes * (job.cpus_per_task or 1)}"
    if job.array:
        indices, _, at_once = job.array.partition("%")
        yield f"#$ -t {indices}"
        if at_once:
            yield f"#$ -tc {at_once}"
    if job.seconds is not None:
        yield f"#$ -l h_rt={job.seconds}"
    if job.partition is not None:
        yield f"#$ -q {_word(job.partition)}"
    for words in job.more:
        yield f"#$ {' '.join(map(_word, shlex.split(words)))}"
    yield "# Both streams go into one log; the job has the variables of the shell that submits it."
    yield "#$ -j y"
    yield f"#$ -o {_word(_output(job))}"
    yield f"#$ -wd {_word(job.chdir)}"
    yield "#$ -V"
    if job.requeue:
        yield "#$ -r y"
    yield ""


def _word(text: str) -> str:
    """Quote a word of a ``#$`` line, which qsub splits as a shell would, without its variables and escapes."""
    if any(each in text for each in "\n\r\0") or {'"', "'"} <= set(text):
        raise UsageError(f"{text!r} does not fit in one line of a batch script", "leave line breaks and quotes out")
    if not text or set(text) & set(" \t'"):
        return f'"{text}"'
    return f"'{text}'" if '"' in text else text


def _setup(job: HostsJob) -> Iterator[str]:
    if not job.setup:
        return
    yield "# On the first node; qrsh -V hands the variables on to all. A set-up that fails ends the job."
    for each in job.setup:
        yield f"{each.line} || exit"
    yield ""


def _launchers(job: HostsJob) -> Iterator[str]:
    yield "# One launcher on each host. qrsh does not keep quotation marks, so bash reads the command from its input."
    yield from launch(replace(job, setup=()), "sge", (), as_input=True)
    here = "bash -s"
    if job.requeue and job.seconds:
        yield f"# The warning before the time limit: {job.requeue.times}. (At s_rt Grid Engine ends the other hosts.)"
        late = job.seconds - job.requeue.before_the_end
        here = f"timeout --foreground --preserve-status -s {job.requeue.warning} {late} {here}"
    yield from start(job, 'qrsh -inherit -V "${hosts[rank]}" /bin/bash -s', here, (), ' <<<"$launch"')
    yield f"if [ $code -eq {AGAIN} ] || [ $code -eq {AGAIN + 1} ]; then"
    yield '  echo "ddplaunch: the job ends with 1: Grid Engine would start it again after $code"'
    yield "  code=1"
    yield "fi"
    yield from finish(job)


class GridEngine(programs.Scheduler):
    """Grid Engine, by qstat for what waits or runs, and by qacct for what has ended."""

    system, submits, asks, cancels = "Grid Engine", "qsub", "qstat", "qdel"
    keeps = "qacct -j shows it later; a job deleted while it waited is never there"
    speaks = ("error: executing task", "error: commlib", "error: unable to", "qrsh: ")
    refuses = "each host needs a free slot for it: submit with --cpus-per-task 2 or more"

    def __init__(self) -> None:
        self._waited = set[JobId]()
        self._deleted = set[JobId]()  # while they waited, of which qacct never says anything
        self._gone_since: dict[JobId, float] = {}

    def hand_in(self, script: str, environ: Mapping[str, str]) -> JobId:
        hint = "qconf -spl lists the parallel environments, qconf -sql the queues"
        answer = programs.submit(["qsub", "-terse"], script, environ, hint).rpartition("\n")[2]
        number, _, tasks = answer.partition(".")  # 7.1-4:1 of an array
        if not number.isdecimal():
            raise LaunchError(f"qsub took the job, but its answer is not a job id: {answer!r}", "qstat lists your jobs")
        return JobId(number, index="" if tasks else None)

    def ask(self, jobs: Sequence[JobId], seconds: float) -> Told | None:
        deadline, told = Deadline(seconds), dict[JobId, list[Record]]()
        try:
            shown = deadline.call("qstat", "-xml")
        except (OSError, subprocess.TimeoutExpired):
            return None
        if shown.returncode:
            return None
        for job in jobs:
            found = {each.job: each for each in listed(shown.stdout, job.number) if _is_of(each.job, job)}
            if found:
                self._gone_since.pop(job, None)
                self._waited.discard(job)
                self._waited.update(job for each in found.values() if each.waits)
            if not found or job.index == "":
                found |= {each.job: each for each in self._ended(job, deadline) if each.job not in found}
            if found:
                told[job] = sorted(found.values(), key=lambda each: int(each.job.index or 0) if each.job else 0)
        return told

    def _ended(self, job: JobId, deadline: Deadline) -> list[Record]:
        """What qacct says of a job that qstat does not show, or of those of an array."""
        try:
            accounted = deadline.call("qacct", "-j", job.number).stdout
        except (OSError, subprocess.TimeoutExpired):
            accounted = ""
        found = [each for each in ends_of(accounted, job.number) if _is_of(each.job, job)]
        if found or job.index == "":
            return found
        if job in self._waited & self._deleted:
            return [replace(programs.ended(EXIT_SIGNAL + 15, "was deleted before it began"), job=job)]
        since = self._gone_since.setdefault(job, time.monotonic())
        if time.monotonic() - since > ACCOUNTED_AFTER:
            return []
        return [Record("has ended; qacct does not show it yet", gone=True, job=job)]

    def words(self, job: JobId) -> tuple[str, ...]:
        return (job.number, "-t", job.index) if job.index else (job.number,)

    def cancel(self, job: JobId) -> None:
        super().cancel(job)
        self._deleted.add(job)

    def enter(
        self, job: Submitted, seen: Record, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], dict[str, str]]:
        """By ``qrsh -inherit``, as the script does: Grid Engine lets the job's owner, while a host has a free slot."""
        assert seen.job
        found = [seen.host or ""]
        if everywhere:
            spread = programs.call("qstat", "-g", "t", "-xml", seconds=programs.SOON).stdout
            of_job = (each for each in listed(spread, seen.job.number) if _is_of(each.job, seen.job) and each.host)
            found = list(dict.fromkeys(each.host or "" for each in of_job))
        command = f"cd {shlex.quote(job.cwd)} && exec {shlex.join([*python_command(job.python), *words])}"
        there = shlex.join(["/bin/sh", "-c", shlex.quote(command)])
        each = f"for host in {shlex.join(found)}; do qrsh -inherit -V -nostdin $host {there} & done; "
        env = {**os.environ, "JOB_ID": seen.job.number, "SGE_TASK_ID": seen.job.index or "undefined"}
        ends = "code=0; for one in $(jobs -p); do wait $one || code=$?; done; exit $code"
        return ["/bin/bash", "-c", each + ends], env


def _is_of(one: JobId | None, job: JobId) -> bool:
    """Whether it is this job, or one of this array."""
    return one is not None and one.number == job.number and job.index in ("", one.index)


def listed(text: str, number: str) -> Iterator[Record]:
    """What ``qstat -xml`` prints of a job; of an array, of each index that waits or runs."""
    for shown in re.findall(r"<job_list\b.*?</job_list>", text, re.DOTALL):
        fields = dict(re.findall(r"<(\w+)>([^<]*)</\1>", shown))
        if fields.get("JB_job_number") != number or "state" not in fields:
            continue
        state, tasks = fields["state"], fields.get("tasks")
        host = fields.get("queue_name", "").partition("@")[2]
        waits, runs = "q" in state, state in ("r", "Rr", "t", "Rt")
        count = "pending" if waits else "running"
        for index in _indices(tasks) if tasks else [None]:
            job = JobId(number, index=index)
            yield Record(words_of(state), None, waits, runs, state=count, job=job, number=job.typed, host=host or None)


def _indices(tasks: str) -> Iterator[str]:
    """The indices that qstat shows as 2, or as 3-7:2,9."""
    for each in tasks.split(","):
        if found := re.fullmatch(r"(\d+)-(\d+):(\d+)", each):
            first, last, step = map(int, found.groups())
            yield from map(str, range(first, last + 1, step))
        else:
            yield each


def words_of(state: str) -> str:
    """What to say about a job in a state as qstat shows it, like qw, r or Eqw."""
    if "E" in state:
        return f"is in an error state, {state}, and will not start: qstat -explain E says why"
    if "d" in state:
        return "is being deleted"
    if "h" in state:
        return "waits, and is on hold"
    if "q" in state:
        return "was requeued and waits" if "R" in state else "waits"
    if set(state) & set("sST"):
        return "is suspended"
    return "is running again" if "R" in state else "is running"


def ends_of(accounted: str, number: str) -> list[Record]:
    """How a job ended, or each of an array that has, from what ``qacct -j`` prints.

    A record is lines of a name and a value, below a line of ``=``. What qrsh has started may have records of its own,
    some with a pe_taskid; our script ends after it. The last record counts, also of a job that was started again, but
    not one after which it is: sge_status(5), 25.
    """
    found: dict[str, Record | None] = {}
    for record in re.split(r"(?m)^=+$", accounted):
        fields = dict(re.findall(r"(?m)^(\w+) +(.*?) *$", record))
        if fields.get("pe_taskid", "NONE") not in ("NONE", "undefined") or "exit_status" not in fields:
            continue
        index = fields.get("taskid", "undefined")
        failed, code = fields.get("failed", "0"), int(fields["exit_status"].split()[0])
        end = _end(failed, code)
        job = JobId(number, index=index if index.isdecimal() else None)
        found[index] = end and replace(end, job=job, number=job.typed)
    return [each for each in found.values() if each]


def _end(failed: str, code: int) -> Record | None:
    number = failed.split()[0]
    if number == _AGAIN:
        return None
    if number == _LIMIT:
        return programs.ended(EXIT_SIGNAL + 15, "reached its time limit")
    if number == "0":
        return programs.ended(code, "failed" if code else "completed")
    if code > EXIT_SIGNAL:
        return programs.ended(code, f"was killed by signal {code - EXIT_SIGNAL}")
    return programs.ended(code or 1, f"failed: Grid Engine says {failed}")
