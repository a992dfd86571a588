"""Grid Engine: which options a job may have, its script, and the programs that submit, show and delete it.

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

import click

from ddplaunch import TYPE_CHECKING
from ddplaunch.commands.submit.hosts import AGAIN, HostsScheduler, check_array, check_passed_on, only_slurm
from ddplaunch.commands.submit.job import BatchJob
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_SIGNAL, UsageError
from ddplaunch.plan.command import python_command
from ddplaunch.queue.scheduler import (
    ACCOUNTED_AFTER,
    SOON,
    Deadline,
    JobId,
    JobState,
    call,
    ended,
    indices,
    sorted_by,
)

if TYPE_CHECKING:
    from ddplaunch.queue.submitted import Submitted

_NUMBER, _TASK = "$JOB_ID", "$TASK_ID"  # what qsub calls a job's number and index in the name of a file
_AGAIN, _LIMIT = "25", "37"  # qacct's "failed" of a job that is started again, and of one that exceeded h_rt
_BY_HAND = "Grid Engine leaves it to the site; type it as for qsub: --qsub-arg="
_OURS_ALONE = {"-pe", "-S", "-j", "-o", "-e", "-wd", "-cwd", "-V", "-terse", "-sync", "-N", "-q", "-t", "-tc"}


_REFUSED = {
    **dict.fromkeys(
        ("gpus_per_node", "gpus_per_task", "gres"),
        f"{_BY_HAND}'-l gpu=8', or what `qconf -sc` calls GPUs; --nproc 8 says how many ranks",
    ),
    **dict.fromkeys(("mem", "mem_per_gpu", "mem_per_cpu"), f"{_BY_HAND}'-l h_vmem=4G', for each slot"),
    "account": f"{_BY_HAND}'-P PROJECT'",
    "qos": f"{_BY_HAND}'-p -100', a priority",
    "constraint": f"{_BY_HAND}'-l NAME=VALUE'",
    "nodelist": f"{_BY_HAND}'-l hostname=NAME'",
    "exclude": f"{_BY_HAND}'-l hostname=!NAME'",
    "exclusive": f"{_BY_HAND}'-l exclusive', or what `qconf -sc` calls it",
    "reservation": f"{_BY_HAND}'-ar ID'",
    "dependency": f"{_BY_HAND}'-hold_jid 4711'",
    "mail_type": f"{_BY_HAND}'-m ea'",
    "mail_user": f"{_BY_HAND}'-M ADDRESS'",
    "comment": f"{_BY_HAND}'-ac comment=TEXT'",
    **only_slurm("qsub"),
}
"""Options that a job of Grid Engine does not have, by click's names, and what to type instead."""


class GridEngine(HostsScheduler):
    """Grid Engine, by qstat for what waits or runs, and by qacct for what has ended."""

    system, name, submits, asks, cancels = "Grid Engine", "sge", "qsub", "qstat", "qdel"
    keeps = "qacct -j shows it later; a job deleted while it waited is never there"
    speaks = ("error: executing task", "error: commlib", "error: unable to", "qrsh: ")
    refuses = "each host needs a free slot for it: submit with --cpus-per-task 2 or more"
    submit_words, lists, passes, directive, submits_again = ("-terse",), "qstat", "qsub_args", "#$", "qsub"
    shows = "qstat -j shows the variables of a job to everyone"
    refused = _REFUSED
    job_id, index, hosts_file, hands_on = "JOB_ID", "SGE_TASK_ID", "PE_HOSTFILE", False
    hosts_given = "$PE gave $NSLOTS slots on"
    hosts_hint = "qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N"
    starts_by, starts_here = 'qrsh -inherit -V "${hosts[rank]}" /bin/bash -s', "bash -s"
    starts_note = "qrsh does not keep quotation marks, so bash reads the command from its input."
    unfit, quoted = "\n\r\0", " \t'"

    def __init__(self) -> None:
        self._waited: dict[JobId, bool] = {}  # when they were last shown
        self._deleted = set[JobId]()  # while they waited: qacct never says anything of them
        self._gone_since: dict[JobId, float] = {}

    def check(self, ctx: click.Context) -> None:
        values = ctx.params
        hint = "options of ddplaunch submit: --pe, --partition, --job-name, --output"
        check_passed_on("--qsub-arg", values["qsub_args"], "-l h_vmem=4G", _OURS_ALONE, hint)
        if values["pe"] is None:
            hint = "`qconf -spl` lists them; it needs control_slaves TRUE, and as many slots on each host"
            raise UsageError("--scheduler sge needs --pe NAME, a parallel environment", hint)
        check_array(ctx)
        if values["requeue"] and values["time"] is None:
            what = f"--requeue {values['requeue']} needs --time with --scheduler sge"
            raise UsageError(what, "the job is requeued before that time is up; Grid Engine preempts by suspending it")

    def job_name(self, text: str) -> str:
        """It may not begin with a digit, nor have some characters (sge_types(1))."""
        name = "".join("_" if each in "\n\t\r/:@\\*?" else each for each in text)
        return f"j{name}" if name[:1].isdigit() else name

    def log(self, job: BatchJob, number: str) -> str:
        path = _output(job).replace(_NUMBER, number).replace("$JOB_NAME", job.job_name).replace(_TASK, "%a")
        return os.path.join(job.chdir, path)

    def head(self, job: BatchJob) -> Iterator[str]:
        yield "#$ -S /bin/bash"
        yield f"#$ -N {self.word(job.job_name)}"
        yield f"#$ -pe {self.word(job.pe or '')} {job.nodes * (job.cpus_per_task or 1)}"
        if job.array:
            indices, _, at_once = job.array.partition("%")
            yield f"#$ -t {indices}"
            if at_once:
                yield f"#$ -tc {at_once}"
        if job.seconds is not None:
            yield f"#$ -l h_rt={job.seconds}"
        if job.partition is not None:
            yield f"#$ -q {self.word(job.partition)}"
        yield from self.passed_on(job)
        yield "# Both streams go into one log; the job has the variables of the shell that submits it."
        yield "#$ -j y"
        yield f"#$ -o {self.word(_output(job))}"
        yield f"#$ -wd {self.word(job.chdir)}"
        yield "#$ -V"
        if job.requeue:
            yield "#$ -r y"

    def before(self, job: BatchJob) -> Iterator[str]:
        if job.setup:
            yield "# On the first node; qrsh -V hands the variables on to all. A set-up that fails ends the job."
            yield from super().node_lines(job)
            yield ""

    def node_lines(self, job: BatchJob) -> Iterator[str]:
        yield from ()

    def traps(self, job: BatchJob) -> Iterator[str]:
        if job.requeue and job.seconds:
            times = job.requeue.times
            yield f"# The warning before the time limit: {times}. (At s_rt Grid Engine ends the other hosts.)"

    def here(self, job: BatchJob) -> str:
        if not (job.requeue and job.seconds):
            return self.starts_here
        late = job.seconds - job.requeue.before_the_end
        return f"timeout --foreground --preserve-status -s {job.requeue.warning} {late} {self.starts_here}"

    def after(self, job: BatchJob) -> Iterator[str]:
        yield f"if [ $code -eq {AGAIN} ] || [ $code -eq {AGAIN + 1} ]; then"
        yield '  echo "ddplaunch: the job ends with 1: Grid Engine would start it again after $code"'
        yield "  code=1"
        yield "fi"

    def advice(self, said: str) -> str:
        return "qconf -spl lists the parallel environments, qconf -sql the queues"

    def given(self, job: BatchJob, answer: str) -> JobId | None:
        number, _, tasks = answer.partition(".")  # 7.1-4:1 of an array
        return JobId(number, index="" if tasks else None) if number.isdecimal() else None

    def records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[JobState] | None:
        shown = deadline.call("qstat", "-xml")
        if shown.returncode:
            return None
        found = list(listed(shown.stdout))
        told = sorted_by(jobs, found)
        for job in jobs:
            seen = [each.job for each in told.get(job, ())]
            if seen:
                self._gone_since.pop(job, None)
                self._waited[job] = any(each.waits for each in told[job])
            if not seen or job.index == "":
                found += [each for each in self._ended(job, deadline) if each.job not in seen]
        return found

    def _ended(self, job: JobId, deadline: Deadline) -> list[JobState]:
        """What qacct says of a job that qstat does not show, or of those of an array."""
        try:
            accounted = deadline.call("qacct", "-j", job.number).stdout
        except (OSError, subprocess.TimeoutExpired):
            accounted = ""
        found = sorted_by([job], ends_of(accounted, job.number)).get(job, [])
        if found or job.index == "":
            return found
        if job in self._deleted and self._waited.get(job):
            return [replace(ended(EXIT_SIGNAL + 15, "was deleted before it began"), job=job)]
        since = self._gone_since.setdefault(job, time.monotonic())
        if time.monotonic() - since > ACCOUNTED_AFTER:
            return []
        return [JobState("has ended; qacct does not show it yet", gone=True, job=job)]

    def words(self, job: JobId) -> tuple[str, ...]:
        return (job.number, "-t", job.index) if job.index else (job.number,)

    def cancel(self, job: JobId) -> None:
        super().cancel(job)
        self._deleted.add(job)

    def enter(
        self, job: Submitted, seen: JobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """By ``qrsh -inherit``, as the script does: Grid Engine lets the job's owner, while a host has a free slot."""
        assert seen.job
        found = [seen.host or ""]
        if everywhere:
            spread = call("qstat", "-g", "t", "-xml", seconds=SOON).stdout
            of_job = sorted_by([seen.job], listed(spread)).get(seen.job, ())
            found = list(dict.fromkeys(each.host for each in of_job if each.host))
        command = f"cd {shlex.quote(job.cwd)} && exec {shlex.join([*python_command(job.python), *words])}"
        there = shlex.join(["/bin/sh", "-c", shlex.quote(command)])
        each = f"for host in {shlex.join(found)}; do qrsh -inherit -V -nostdin $host {there} & done; "
        env = {**os.environ, "JOB_ID": seen.job.number, "SGE_TASK_ID": seen.job.index or "undefined"}
        ends = "code=0; for one in $(jobs -p); do wait $one || code=$?; done; exit $code"
        return ["/bin/bash", "-c", each + ends], env


def _output(job: BatchJob) -> str:
    return job.output or (f"sge-{_NUMBER}.{_TASK}.out" if job.array else f"sge-{_NUMBER}.out")


def listed(text: str) -> Iterator[JobState]:
    """What ``qstat -xml`` prints of jobs; of an array, of each index that waits or runs."""
    for shown in re.findall(r"<job_list\b.*?</job_list>", text, re.DOTALL):
        fields = dict(re.findall(r"<(\w+)>([^<]*)</\1>", shown))
        number, state, tasks = fields.get("JB_job_number"), fields.get("state"), fields.get("tasks")
        if number is None or state is None:
            continue
        host = fields.get("queue_name", "").partition("@")[2]
        waits, runs = "q" in state, state in ("r", "Rr", "t", "Rt")
        for index in indices(tasks) if tasks else [None]:
            job = JobId(number, index=index)
            yield JobState(words_of(state), None, waits, runs, job=job, number=job.typed, host=host or None)


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


def ends_of(accounted: str, number: str) -> list[JobState]:
    """How a job ended, or each of an array that has, from what ``qacct -j`` prints.

    A record is lines of a name and a value, below a line of ``=``. What qrsh has started may have records of its own,
    some with a pe_taskid; our script ends after it. The last record counts, also of a job that was started again, but
    not one after which it is: sge_status(5), 25.
    """
    found: dict[str, JobState | None] = {}
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


def _end(failed: str, code: int) -> JobState | None:
    number = failed.split()[0]
    if number == _AGAIN:
        return None
    if number == _LIMIT:
        return ended(EXIT_SIGNAL + 15, "reached its time limit")
    if number == "0":
        return ended(code, "failed" if code else "completed")
    if code > EXIT_SIGNAL:
        return ended(code, f"was killed by signal {code - EXIT_SIGNAL}")
    return ended(code or 1, f"failed: Grid Engine says {failed}")
