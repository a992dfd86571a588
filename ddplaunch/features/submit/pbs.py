"""PBS: supported options, the batch script, and calling qsub, qstat and qdel.

For PBS Professional and OpenPBS: Torque names resources differently. qsub(1B) says what each ``#PBS`` line means,
pbs_resources(7B) what a chunk of ``select`` may have, pbsdsh(1B) how a task starts on another host: by the words of a
command, without the script's variables, folder and stdin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

import click
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, UsageError
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.hosts_scheduler import (
    HostsScheduler,
    check_array,
    check_pass_through,
    slurm_only_options,
)
from ddplaunch.system.schedulers.scheduler import BatchJobState, Deadline, JobId, ended_state

ARRAY_INDEX_PATTERN = "^array_index^"  # qsub's pattern for the index in file names

_PASS_THROUGH_HINT = "pass it to qsub: --qsub-arg="
_RESERVED_OPTIONS = {"-S", "-j", "-k", "-o", "-e", "-V", "-N", "-q", "-J", "-A", "-I", "-X", "-z"}
_OF_THE_LIST = re.compile(r"-l(?:.*[\s,])?(select|place|walltime|nodes|ncpus|ngpus)=")

_SIGNALS = 256
"""If a signal ended the script, Exit_status is 256 plus the signal's number."""

_TERMINATION_CODES = {
    -24: ("used more CPUs than it had", EXIT_SIGNAL + 15),
    -25: ("used more CPUs than it had", EXIT_SIGNAL + 15),
    -26: ("used more virtual memory than it had", EXIT_SIGNAL + 9),
    -27: ("used more memory than it had", EXIT_SIGNAL + 9),
    -28: ("used more CPU time than it had", EXIT_SIGNAL + 15),
    -29: ("reached its time limit", EXIT_SIGNAL + 15),
}
"""Exit_status of a job that PBS killed for a limit (JOB_EXEC_KILL_… of OpenPBS): description, and our exit code."""

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


_REFUSED = {
    "gpus_per_task": "--gpus-per-node 8 says how many",
    "gres": "--gpus-per-node 8 says how many GPUs",
    **dict.fromkeys(("mem_per_gpu", "mem_per_cpu"), "--mem 200G is that of a node"),
    "qos": f"{_PASS_THROUGH_HINT}'-p -100', a priority",
    **dict.fromkeys(
        ("constraint", "nodelist", "exclude"), "PBS has no such option; a queue may have the nodes: --partition NAME"
    ),
    "reservation": "a reservation of PBS is a queue: --partition R123",
    "dependency": f"{_PASS_THROUGH_HINT}'-W depend=afterok:4711'",
    "mail_type": f"{_PASS_THROUGH_HINT}'-m ae'",
    "mail_user": f"{_PASS_THROUGH_HINT}'-M ADDRESS'",
    "comment": "--job-name NAME is shown",
    "requeue": "PBS itself starts a preempted job again; at a time limit only its operators may (qrerun)",
    **slurm_only_options("qsub"),
}
"""Options that PBS does not support, by click's names, with hints what to use instead."""


class Pbs(HostsScheduler):
    """PBS; queries jobs with qstat, which also lists ended jobs if the site keeps their history."""

    title, cluster_name, submit_program, query_program, cancel_program = "PBS", "pbs", "qsub", "qstat", "qdel"
    history_hint = "PBS keeps jobs that have ended if the site sets job_history_enable"
    list_command, pass_through_option, directive, resubmit_command = "qstat", "qsub_args", "#PBS", "qsub"
    token_warning = "qstat -f shows the variables of a job to you, and at some sites to everyone"
    unsupported_options = _REFUSED
    job_id, index, hosts_file = "PBS_JOBID", "PBS_ARRAY_INDEX", "PBS_NODEFILE"
    hosts_hint = "qstat -f $PBS_JOBID shows what the job was given (exec_host)"
    local_start = '/bin/bash -c "$launch" node'
    remote_start_command = f'pbsdsh -n "$rank" -- {local_start}'
    start_comment = "pbsdsh starts it in the home folder, with the variables of qsub alone."
    reads_stdin = False

    def check_options(self, ctx: click.Context) -> None:
        values = ctx.params
        hint = "options of ddplaunch submit: --partition, --account, --job-name, --output"
        check_pass_through("--qsub-arg", values["qsub_args"], "-P PROJECT", _RESERVED_OPTIONS, hint)
        for text in values["qsub_args"]:
            if found := _OF_THE_LIST.match(text):
                hint = "options of ddplaunch submit: --nodes, --cpus-per-task, --gpus-per-node, --exclusive, --time"
                raise UsageError(f"--qsub-arg {text}: ddplaunch sets {found[1]} itself", hint)
        if values["gpus_per_node"] and not values["gpus_per_node"].isdecimal():
            what = f"--gpus-per-node {values['gpus_per_node']}: PBS does not distinguish types of GPUs"
            raise UsageError(what, "--gpus-per-node 8, and --partition NAME if a queue has that type")
        if values["mem"] and not re.search("[1-9]", values["mem"]):
            raise UsageError("--mem 0 does not work with --scheduler pbs", "--mem 200G, or --exclusive for whole nodes")
        check_array(ctx, first=0, alone=False)
        output = values["output"]
        if output and (odd := re.search("[:$%]", output)):
            what = f"--output {output}: PBS has no patterns, and reads a colon as a host's name"
            raise UsageError(what, f"leave {odd[0]} out; without --output the log is NAME.oNUMBER")
        if output and values["array"] and ARRAY_INDEX_PATTERN not in output:
            what = f"--output {output}: each job of an array needs a log of its own"
            raise UsageError(what, f"--output DIR/{ARRAY_INDEX_PATTERN}.out")

    def job_name(self, text: str) -> str:
        """Return a valid job name: at most 230 letters, digits and +-_. with a letter or digit first."""
        name = re.sub(r"[^A-Za-z0-9+_.-]", "_", text)[:230]
        return name if name[:1].isalnum() else f"j{name}"

    def log_path(self, job: BatchJob, number: str) -> str:
        """Return the path of the log; in the default name, a job 1234.pbs01 is 1234."""
        index = f".{ARRAY_INDEX_PATTERN}" if job.array else ""
        name = job.output or f"{job.job_name}.o{number.partition('.')[0]}{index}"
        return os.path.join(job.chdir, name.replace(ARRAY_INDEX_PATTERN, "%a"))

    def directive_lines(self, job: BatchJob) -> Iterator[str]:
        yield "#PBS -S /bin/bash"
        yield f"#PBS -N {self.quote_word(job.job_name)}"
        yield f"#PBS -l select={_select_chunks(job)}"
        yield f"#PBS -l place=scatter{':exclhost' if job.exclusive else ''}"
        if job.array:
            yield f"#PBS -J {job.array}"
        if job.spares:
            yield "# When a node is lost, a spare takes its place: PBS must not end the job."
            yield "#PBS -W tolerate_node_failures=all"
        if job.seconds is not None:
            yield f"#PBS -l walltime={job.seconds // 3600}:{job.seconds // 60 % 60:02}:{job.seconds % 60:02}"
        if job.partition is not None:
            yield f"#PBS -q {self.quote_word(job.partition)}"
        if job.account is not None:
            yield f"#PBS -A {self.quote_word(job.account)}"
        yield from self.pass_through_lines(job)
        yield "# Both streams go into one log as they come; the job has the variables of the shell that submits it."
        yield "#PBS -j oe"
        yield "#PBS -k doe"
        if job.output:
            yield f"#PBS -o {self.quote_word(os.path.join(job.chdir, job.output))}"
        yield "#PBS -V"

    def node_lines(self, job: BatchJob) -> Iterator[str]:
        yield "unset OMP_NUM_THREADS  # PBS has set it to the CPUs of the whole node"
        yield from super().node_lines(job)

    def trap_lines(self, job: BatchJob) -> Iterator[str]:
        yield "# At the time limit and for qdel PBS sends SIGTERM. It is for the launchers: this script waits for them."
        yield "trap : TERM"

    def rejection_hint(self, error: str) -> str:
        return "qstat -Q lists the queues, pbsnodes -a the hosts with what they have"

    def parse_job_id(self, job: BatchJob, answer: str) -> JobId | None:
        found = re.fullmatch(r"(\d+)(\[\])?(\.\S+)?", answer)
        return JobId(found[1] + (found[3] or ""), index="" if found[2] else None) if found else None

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        """Return the id as PBS takes it: 4711.pbs01, 4711[2].pbs01, or 4711[].pbs01 for all of an array."""
        number, dot, server = job.number.partition(".")
        return (job.number if job.index is None else f"{number}[{job.index}]{dot}{server}",)

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[BatchJobState] | None:
        per_index = ["-t"] if any(job.index == "" for job in jobs) else []  # the indices of an array, not only itself
        words = ["-f", *per_index, *(word for job in jobs for word in self.job_arguments(job))]
        done = deadline.run("qstat", "-x", *words)
        if done.returncode and "job_history_enable" in done.stderr:
            done = deadline.run("qstat", *words)
        found = list(parse_qstat(done.stdout))
        if done.returncode and not found and "Unknown Job Id" not in done.stderr:
            return None
        return found


def _select_chunks(job: BatchJob) -> str:
    """Return the chunks of -l select, each for a node; mpiprocs=1 gives it one line in the host file, and one task."""
    chunk = [f"ncpus={job.cpus_per_task or 1}", "mpiprocs=1"]
    if job.gpus_per_node is not None:
        chunk.append(f"ngpus={job.gpus_per_node}")
    if job.mem is not None:
        chunk.append(f"mem={_format_size(job.mem)}")
    return ":".join([str(job.nodes), *chunk])


def _format_size(text: str) -> str:
    """Convert a size to PBS's form, 200gb for 200G; without a unit it is megabytes, as for sbatch."""
    number, unit = re.fullmatch(r"(\d+)([A-Z]?)B?", text.upper()).groups()  # type: ignore[union-attr] # was checked
    return f"{number}{(unit or 'M').lower()}b"


def parse_qstat(output: str) -> Iterator[BatchJobState]:
    """Parse ``qstat -f``: the state of each job."""
    for text in re.split(r"(?m)^(?=Job Id: )", output):
        match = re.match(r"Job Id: (\d+)(?:\[(\d*)\])?(\.\S+)?", text)
        # Lines are ``    name = value``; a long value continues on the next lines, after a tab.
        fields = dict(re.findall(r"(?m)^ {4}(\S+) = (.*)$", text.replace("\n\t", "")))
        if match and "job_state" in fields:
            job = JobId(match[1] + (match[3] or ""), index=match[2])
            yield replace(_parse_state(fields), job=job, number=job.text)


def _parse_state(fields: Mapping[str, str]) -> BatchJobState:
    state = fields["job_state"]
    if state in "FX":
        return ended_state(*_end(fields.get("Exit_status")))
    words, waits = _STATES.get(state, f"is in state {state}"), state in "QWHT"
    why = fields.get("comment") if waits else None
    return BatchJobState(f"{words}: {why}" if why else words, None, waits, state == "R")


def _end(status: str | None) -> tuple[int, str]:
    """Return exit code and description of an ended job; a job that never started has no status."""
    if status is None:
        return EXIT_SIGNAL + 15, "was deleted before it began"
    code = int(status)
    if code >= _SIGNALS:
        return EXIT_SIGNAL + code % _SIGNALS, f"was killed by signal {code % _SIGNALS}"
    if code < 0:
        how, exit_code = _TERMINATION_CODES.get(code, (f"was not run by PBS (Exit_status {code})", 1))
        return exit_code, how
    return code, "failed" if code else "completed"
