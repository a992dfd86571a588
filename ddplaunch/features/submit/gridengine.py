"""Grid Engine: supported options, the batch script, and calling qsub, qstat, qacct and qdel.

Grid Engine allocates slots, not nodes, and starts one process: the script, on the first host. So the script starts one
launcher on each host, by ``qrsh -inherit``, with variables for the node rank that ``clusters/sge`` reads.
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
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, UsageError
from ddplaunch.cli import launcher_command
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.hosts_scheduler import (
    REQUEUE_EXIT_CODE,
    HostsScheduler,
    check_array,
    check_pass_through,
    slurm_only_options,
)
from ddplaunch.system.schedulers.scheduler import (
    ACCOUNTING_DELAY_S,
    QUICK_TIMEOUT_S,
    BatchJobState,
    Deadline,
    JobId,
    array_indices,
    ended_state,
    group_by_job,
    run_program,
    side_by_side_command,
)
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

_NUMBER, _TASK = "$JOB_ID", "$TASK_ID"  # qsub's patterns for a job's number and index in file names
_REQUEUED, _LIMIT = "25", "37"  # qacct's "failed" of a job that is requeued, and of one that exceeded h_rt
_PASS_THROUGH_HINT = "it differs from site to site; pass it to qsub: --qsub-arg="
_RESERVED_OPTIONS = {"-pe", "-S", "-j", "-o", "-e", "-wd", "-cwd", "-V", "-terse", "-sync", "-N", "-q", "-t", "-tc"}


_REFUSED = {
    **dict.fromkeys(
        ("gpus_per_node", "gpus_per_task", "gres"),
        f"{_PASS_THROUGH_HINT}'-l gpu=8', or what `qconf -sc` calls GPUs; --nproc 8 says how many ranks",
    ),
    **dict.fromkeys(("mem", "mem_per_gpu", "mem_per_cpu"), f"{_PASS_THROUGH_HINT}'-l h_vmem=4G', for each slot"),
    "account": f"{_PASS_THROUGH_HINT}'-P PROJECT'",
    "qos": f"{_PASS_THROUGH_HINT}'-p -100', a priority",
    "constraint": f"{_PASS_THROUGH_HINT}'-l NAME=VALUE'",
    "nodelist": f"{_PASS_THROUGH_HINT}'-l hostname=NAME'",
    "exclude": f"{_PASS_THROUGH_HINT}'-l hostname=!NAME'",
    "exclusive": f"{_PASS_THROUGH_HINT}'-l exclusive', or what `qconf -sc` calls it",
    "reservation": f"{_PASS_THROUGH_HINT}'-ar ID'",
    "dependency": f"{_PASS_THROUGH_HINT}'-hold_jid 4711'",
    "mail_type": f"{_PASS_THROUGH_HINT}'-m ea'",
    "mail_user": f"{_PASS_THROUGH_HINT}'-M ADDRESS'",
    "comment": f"{_PASS_THROUGH_HINT}'-ac comment=TEXT'",
    **slurm_only_options("qsub"),
}
"""Options that Grid Engine does not support, by click's names, with hints what to use instead."""


class GridEngine(HostsScheduler):
    """Grid Engine; queries pending and running jobs with qstat, and ended ones with qacct."""

    title, cluster_name, submit_program, query_program, cancel_program = "Grid Engine", "sge", "qsub", "qstat", "qdel"
    history_hint = "qacct -j shows it later, but never a job that was deleted while it waited"
    stderr_prefixes = ("error: executing task", "error: commlib", "error: unable to", "qrsh: ")
    step_failure_hint = "each host needs a free slot for it: submit with --cpus-per-task 2 or more"
    submit_options, list_command, pass_through_option = ("-terse",), "qstat", "qsub_args"
    directive, resubmit_command, default_outputs = "#$", "qsub", (f"sge-{_NUMBER}.out", f"sge-{_NUMBER}.{_TASK}.out")
    token_warning = "qstat -j shows the variables of a job to everyone"
    unsupported_options = _REFUSED
    job_id, index, hosts_file, forwards_job_id = "JOB_ID", "SGE_TASK_ID", "PE_HOSTFILE", False
    hosts_given_text = "$PE gave $NSLOTS slots on"
    hosts_hint = "qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N"
    remote_start_command, local_start = 'qrsh -inherit -V "${hosts[rank]}" /bin/bash -s', "bash -s"
    start_comment = "qrsh does not keep quotation marks, so bash reads the command from its input."
    forbidden_chars, quoted_chars = "\n\r\0", " \t'"

    def __init__(self) -> None:
        self._waited: dict[JobId, bool] = {}  # whether the job was pending when qstat last listed it
        self._deleted = set[JobId]()  # cancelled here: qacct never lists one that was still pending
        self._gone_since: dict[JobId, float] = {}

    def check_options(self, ctx: click.Context) -> None:
        values = ctx.params
        hint = "options of ddplaunch submit: --pe, --partition, --job-name, --output"
        check_pass_through("--qsub-arg", values["qsub_args"], "-l h_vmem=4G", _RESERVED_OPTIONS, hint)
        if values["pe"] is None:
            hint = "`qconf -spl` lists them; it needs control_slaves TRUE, and as many slots on each host"
            raise UsageError("--scheduler sge needs --pe NAME, a parallel environment", hint)
        check_array(ctx)
        if values["requeue"] and values["time"] is None:
            what = f"--requeue {values['requeue']} needs --time with --scheduler sge"
            raise UsageError(what, "the job is requeued before that time is up; Grid Engine preempts by suspending")

    def job_name(self, text: str) -> str:
        """Return a valid job name: no digit or dash first, and without some characters (sge_types(1))."""
        name = "".join("_" if each in "\n\t\r/:@\\*?" else each for each in text)
        return f"j{name}" if name[:1].isdigit() or name.startswith("-") else name

    def log_path(self, job: BatchJob, number: str) -> str:
        path = self.output_pattern(job).replace(_NUMBER, number).replace("$JOB_NAME", job.job_name).replace(_TASK, "%a")
        return os.path.join(job.chdir, path)

    def directive_lines(self, job: BatchJob) -> Iterator[str]:
        yield "#$ -S /bin/bash"
        yield f"#$ -N {self.quote_word(job.job_name)}"
        yield f"#$ -pe {self.quote_word(job.pe or '')} {job.nodes * (job.cpus_per_task or 1)}"
        if job.array:
            indices, _, at_once = job.array.partition("%")
            yield f"#$ -t {indices}"
            if at_once:
                yield f"#$ -tc {at_once}"
        if job.seconds is not None:
            yield f"#$ -l h_rt={job.seconds}"
        if job.partition is not None:
            yield f"#$ -q {self.quote_word(job.partition)}"
        yield from self.pass_through_lines(job)
        yield "# Both streams go into one log; the job has the variables of the shell that submits it."
        yield "#$ -j y"
        yield f"#$ -o {self.quote_word(self.output_pattern(job))}"
        yield f"#$ -wd {self.quote_word(job.chdir)}"
        yield "#$ -V"
        if job.requeue:
            yield "#$ -r y"

    def preamble_lines(self, job: BatchJob) -> Iterator[str]:
        if job.setup:
            yield "# On the first node; qrsh -V passes the variables to all. A failed set-up ends the job."
            yield from super().node_lines(job)
            yield ""

    def node_lines(self, job: BatchJob) -> Iterator[str]:
        yield from ()

    def trap_lines(self, job: BatchJob) -> Iterator[str]:
        if job.requeue and job.seconds:
            times = job.requeue.timing_comment
            yield f"# The warning before the time limit: {times}. (At s_rt Grid Engine ends the other hosts.)"

    def local_start_command(self, job: BatchJob) -> str:
        if not (job.requeue and job.seconds):
            return self.local_start
        late = job.seconds - job.requeue.warning_lead_s
        return f"timeout --foreground --preserve-status -s {job.requeue.warning} {late} {self.local_start}"

    def exit_code_lines(self, job: BatchJob) -> Iterator[str]:
        yield f"if [ $code -eq {REQUEUE_EXIT_CODE} ] || [ $code -eq {REQUEUE_EXIT_CODE + 1} ]; then"
        yield '  echo "ddplaunch: the job ends with 1: Grid Engine would start it again after $code"'
        yield "  code=1"
        yield "fi"

    def rejection_hint(self, error: str) -> str:
        return "qconf -spl lists the parallel environments, qconf -sql the queues"

    def parse_job_id(self, job: BatchJob, answer: str) -> JobId | None:
        number, _, tasks = answer.partition(".")  # 7.1-4:1 of an array
        return JobId(number, index="" if tasks else None) if number.isdecimal() else None

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[BatchJobState] | None:
        done = deadline.run("qstat", "-xml")
        if done.returncode:
            return None
        states = list(parse_qstat(done.stdout))
        listed = group_by_job(jobs, states)
        for job in jobs:
            listed_jobs = [each.job for each in listed.get(job, ())]
            if listed_jobs:
                self._gone_since.pop(job, None)
                self._waited[job] = any(each.is_pending for each in listed[job])
            if not listed_jobs or job.index == "":
                states += [each for each in self._query_qacct(job, deadline) if each.job not in listed_jobs]
        return states

    def _query_qacct(self, job: JobId, deadline: Deadline) -> list[BatchJobState]:
        """Query qacct about a job, or an array, that qstat does not list any more."""
        try:
            accounted = deadline.run("qacct", "-j", job.number).stdout
        except (OSError, subprocess.TimeoutExpired):
            accounted = ""
        found = group_by_job([job], parse_qacct(accounted, job.number)).get(job, [])
        if found or job.index == "":
            return found
        if job in self._deleted and self._waited.get(job):
            return [replace(ended_state(EXIT_SIGNAL + 15, "was deleted before it began"), job=job)]
        since = self._gone_since.setdefault(job, time.monotonic())
        if time.monotonic() - since > ACCOUNTING_DELAY_S:
            return []
        return [BatchJobState("has ended; qacct does not show it yet", ended_unknown=True, job=job)]

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        return (job.number, "-t", job.index) if job.index else (job.number,)

    def cancel(self, job: JobId) -> None:
        super().cancel(job)
        self._deleted.add(job)

    def step_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return a command that uses ``qrsh -inherit`` like the script: a job's owner may do that if a slot is free."""
        assert state.job
        hosts = [state.host or ""]
        if everywhere:
            spread = run_program("qstat", "-g", "t", "-xml", seconds=QUICK_TIMEOUT_S).stdout
            of_job = group_by_job([state.job], parse_qstat(spread)).get(state.job, ())
            hosts = list(dict.fromkeys(each.host for each in of_job if each.host))
        command = f"cd {shlex.quote(job.cwd)} && exec {shlex.join([*launcher_command(job.python), *words])}"
        remote_words = ["/bin/sh", "-c", shlex.quote(command)]
        env = {**os.environ, "JOB_ID": state.job.number, "SGE_TASK_ID": state.job.index or "undefined"}
        steps = [["qrsh", "-inherit", "-V", "-nostdin", host, *remote_words] for host in hosts]
        return side_by_side_command(steps), env


def parse_qstat(text: str) -> Iterator[BatchJobState]:
    """Parse ``qstat -xml``: the state of each job, or of each pending or running index of an array."""
    for entry in re.findall(r"<job_list\b.*?</job_list>", text, re.DOTALL):
        fields = dict(re.findall(r"<(\w+)>([^<]*)</\1>", entry))
        number, state, tasks = fields.get("JB_job_number"), fields.get("state"), fields.get("tasks")
        if number is None or state is None:
            continue
        host = fields.get("queue_name", "").partition("@")[2]
        waits, runs = "q" in state, state in ("r", "Rr", "t", "Rt")
        for index in array_indices(tasks) if tasks else [None]:
            job = JobId(number, index=index)
            yield BatchJobState(describe_state(state), None, waits, runs, job=job, number=job.text, host=host or None)


def describe_state(state: str) -> str:
    """Describe a state of qstat, like qw, r or Eqw; completes the sentence "job 7 …"."""
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


def parse_qacct(accounted: str, number: str) -> list[BatchJobState]:
    """Parse ``qacct -j``: how a job, or each ended index of an array, ended.

    A record is lines of a name and a value, below a line of ``=``. Processes started by qrsh may have records of their
    own, some with a pe_taskid; the script ends after them. The last record counts, also for a requeued job, but not a
    record of a run that was requeued: sge_status(5), 25.
    """
    states: dict[str, BatchJobState | None] = {}
    for record in re.split(r"(?m)^=+$", accounted):
        fields = dict(re.findall(r"(?m)^(\w+) +(.*?) *$", record))
        if fields.get("pe_taskid", "NONE") not in ("NONE", "undefined") or not fields.get("exit_status"):
            continue
        index = fields.get("taskid", "undefined")
        failed, code = fields.get("failed", "0"), int(fields["exit_status"].split()[0])
        end = _end(failed, code)
        job = JobId(number, index=index if index.isdecimal() else None)
        states[index] = end and replace(end, job=job, number=job.text)
    return [each for each in states.values() if each]


def _end(failed: str, code: int) -> BatchJobState | None:
    number = failed.partition(" ")[0] or "0"
    if number == _REQUEUED:
        return None
    if number == _LIMIT:
        return ended_state(EXIT_SIGNAL + 15, "reached its time limit")
    if number == "0":
        return ended_state(code, "failed" if code else "completed")
    if code > EXIT_SIGNAL:
        return ended_state(code, f"was killed by signal {code - EXIT_SIGNAL}")
    return ended_state(code or 1, f"failed: Grid Engine reports {failed}")
