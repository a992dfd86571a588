"""LSF: supported options, the batch script, and calling bsub, bjobs, bhist and bkill.

LSF allocates slots; ``span[ptile=N]`` puts N of them on each host. The script starts one launcher on each host by
blaunch, which passes words to a shell as rsh does, so bash reads the command from stdin. bsub(1) says what each
``#BSUB`` line means.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

import click
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_SIGNAL, UsageError
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.hosts_scheduler import (
    REQUEUE_EXIT_CODE,
    HostsScheduler,
    check_array,
    check_pass_through,
    slurm_only_options,
)
from ddplaunch.system.schedulers.scheduler import BatchJobState, Deadline, JobId, ended_state, group_by_job

_FILE_PATTERNS = {"%J": "LSB_JOBID", "%I": "LSB_JOBINDEX"}  # bsub's patterns in file names, and the variables for them
_PASS_THROUGH_HINT = "pass it to bsub: --bsub-arg="
_RESERVED_OPTIONS = {
    "-J", "-n", "-nnodes", "-gpu", "-x", "-W", "-q", "-P", "-o", "-oo", "-e", "-eo", "-I", "-Is", "-Ip", "-K",
}  # fmt: skip
_OF_REQUEUE = {"-Q", "-wa", "-wt", "-r"}

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

_TERMINATION_REASONS = {
    "RUNLIMIT": ("reached its time limit", EXIT_SIGNAL + 15),
    "MEMLIMIT": ("used more memory than it had", EXIT_SIGNAL + 9),
}
"""Reasons (TERM_…) why LSF ended a job: description, and the exit code that ddplaunch returns."""


_REFUSED = {
    "gpus_per_task": "--gpus-per-node 8 says how many",
    "gres": "--gpus-per-node 8 says how many GPUs",
    **dict.fromkeys(
        ("mem", "mem_per_gpu", "mem_per_cpu"),
        f"each site chooses the unit; {_PASS_THROUGH_HINT}'-M 200G', or -R 'rusage[mem=200G]'",
    ),
    "qos": f"{_PASS_THROUGH_HINT}'-sp 100', a priority",
    "constraint": f"{_PASS_THROUGH_HINT}'-R select[NAME]'",
    "nodelist": f"{_PASS_THROUGH_HINT}'-m \"n1 n2\"'",
    "exclude": f"{_PASS_THROUGH_HINT}'-R select[hname!=n1]'",
    "reservation": f"{_PASS_THROUGH_HINT}'-U NAME'",
    "dependency": f"{_PASS_THROUGH_HINT}'-w done(4711)'",
    "mail_type": f"{_PASS_THROUGH_HINT}-N",
    "mail_user": f"{_PASS_THROUGH_HINT}'-u ADDRESS'",
    "comment": f"{_PASS_THROUGH_HINT}'-Jd TEXT'",
    **slurm_only_options("bsub"),
}
"""Options that LSF does not support, by click's names, with hints what to use instead."""


class Lsf(HostsScheduler):
    """LSF; queries jobs with bjobs, and with bhist those that bjobs no longer lists."""

    title, cluster_name, submit_program, query_program, cancel_program = "LSF", "lsf", "bsub", "bjobs", "bkill"
    history_hint = "bhist -l -n 0 shows what LSF still has"
    list_command, pass_through_option, directive, resubmit_command = "bjobs", "bsub_args", "#BSUB", "bsub <"
    token_warning = "bjobs -env shows the variables of a job to you, and at some sites to everyone"
    unsupported_options, default_outputs = _REFUSED, ("lsf-%J.out", "lsf-%J_%I.out")
    job_id, index, hosts_file = "LSB_JOBID", "LSB_JOBINDEX", "LSB_DJOB_HOSTFILE"
    hosts_hint = "bjobs -l $LSB_JOBID shows what the job was given"
    remote_start_command, local_start = 'blaunch -z "${hosts[rank]}" /bin/bash -s', "/bin/bash -s"
    start_comment = "blaunch keeps no quotation marks, so bash reads the command from its input."

    def check_options(self, ctx: click.Context) -> None:
        values = ctx.params
        hint = "options of ddplaunch submit: --nodes, --cpus-per-task, --gpus-per-node, --time, --partition, --output"
        reserved = _RESERVED_OPTIONS | (_OF_REQUEUE if values["requeue"] else set())
        check_pass_through("--bsub-arg", values["bsub_args"], "-R rusage[mem=4G]", reserved, hint)
        for text in values["bsub_args"]:
            if "span[" in text:
                raise UsageError(f"--bsub-arg {text}: ddplaunch sets span itself", hint)
        if values["gpus_per_node"] and not values["gpus_per_node"].isdecimal():
            what = f"--gpus-per-node {values['gpus_per_node']}: expected a number with --scheduler lsf"
            raise UsageError(what, "--gpus-per-node 8, and --partition NAME if a queue has that type")
        check_array(ctx, lists=True)
        if values["spares"] and not any(text.startswith("-app") for text in values["bsub_args"]):
            hint = "--bsub-arg='-app PROFILE'; without it LSF ends a job that loses a host"
            what = "--spares needs an application profile of the site, with DJOB_COMMFAIL_ACTION=IGNORE_COMMFAIL"
            raise UsageError(what, hint)
        output = values["output"]
        if output and (odd := re.search("%(?![JI])", output)):
            hint = "%J is the job's number, %I its index in an array"
            raise UsageError(f"--output {output}: {odd[0]} is not a pattern here", hint)

    def job_name(self, text: str) -> str:
        """Return a valid job name: letters, digits and +_.- without a dash first, which bsub reads as an option."""
        name = re.sub(r"[^A-Za-z0-9+_.-]", "_", text)
        return f"j{name}" if name.startswith("-") else name

    def log_path(self, job: BatchJob, number: str) -> str:
        return os.path.join(job.chdir, self.output_pattern(job).replace("%J", number).replace("%I", "%a"))

    def directive_lines(self, job: BatchJob) -> Iterator[str]:
        slots = job.cpus_per_task or 1
        indices, _, at_once = (job.array or "").partition("%")
        array = f"[{indices}]{at_once and '%'}{at_once}" if job.array else ""
        yield f"#BSUB -J {self.quote_word(job.job_name + array)}"
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
            yield f"#BSUB -q {self.quote_word(job.partition)}"
        if job.account is not None:
            yield f"#BSUB -P {self.quote_word(job.account)}"
        yield from self.pass_through_lines(job)
        if job.requeue:
            again = job.requeue
            yield f"# The warning comes before the time limit: {again.timing_comment}."
            yield f"#BSUB -wa {again.warning}"
            yield f"#BSUB -wt {-(-again.warning_lead_s // 60)}"
            yield f"#BSUB -Q {REQUEUE_EXIT_CODE}"
            yield "#BSUB -r"
        yield "#BSUB -o /dev/null"

    def preamble_lines(self, job: BatchJob) -> Iterator[str]:
        yield "# The log, as it grows: LSF would write it at the end of the job, with a report."
        first, *rest = re.split("(%[JI])", self.output_pattern(job))
        parts = [os.path.join(job.chdir, first), *rest]
        words = (
            f'"${_FILE_PATTERNS[part]}"' if part in _FILE_PATTERNS else part and shlex.quote(part) for part in parts
        )
        yield f"exec >>{''.join(words)} 2>&1"
        yield ""

    def trap_lines(self, job: BatchJob) -> Iterator[str]:
        yield "# bkill sends SIGINT and SIGTERM. They are for the launchers: this script waits for them."
        yield "trap : INT TERM USR2"
        if job.requeue:
            yield "# The warning comes to all processes of this script. It is for the launcher alone, which handles it."
            yield f"trap '' {job.requeue.warning}"

    def exit_code_lines(self, job: BatchJob) -> Iterator[str]:
        if job.requeue:
            yield f"[ $code -eq {REQUEUE_EXIT_CODE} ] && code=1  # after {REQUEUE_EXIT_CODE} LSF would start it again"

    def rejection_hint(self, error: str) -> str:
        return "bqueues lists the queues, bhosts the hosts"

    def parse_job_id(self, job: BatchJob, answer: str) -> JobId | None:
        found = re.search(r"Job <(\d+)>", answer)
        return JobId(found[1], index="" if job.array else None) if found else None

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        return (f"{job.number}[{job.index}]" if job.index else job.number,)

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[BatchJobState] | None:
        words = [word for job in jobs for word in self.job_arguments(job)]
        done = deadline.run("bjobs", "-noheader", "-o", _FIELDS, *words)
        states = list(parse_bjobs(done.stdout))
        if not states and "is not found" not in done.stderr:
            return None
        known = group_by_job(jobs, states)
        if missing := [job for job in jobs if job not in known]:
            words = [word for job in missing for word in self.job_arguments(job)]
            states += parse_bhist(deadline.run("bhist", "-l", "-n", "0", *words).stdout)
        return states


def parse_bjobs(shown: str) -> Iterator[BatchJobState]:
    """Parse ``bjobs -noheader -o``, like ``4711|0|EXIT|7|-``; a job without an array has index 0."""
    line = r"(?m)^(\d+)(?:\[\d+\])?\|(\d+)\|([A-Z]+)\|(\d+|-|)\|(.*)$"
    for number, index, state, code, reason in re.findall(line, shown):
        job = JobId(number, index=None if index == "0" else index)
        yield replace(_parse_state(state, code, reason), job=job, number=job.text)


def _parse_state(state: str, code: str, reason: str) -> BatchJobState:
    if state == "DONE":
        return ended_state(0, "completed")
    if state in ("EXIT", "ZOMBI"):
        return _failed_state(int(code) if code.isdecimal() else None, reason)
    waits = state in ("PEND", "PSUSP", "WAIT", "PROV")
    return BatchJobState(_STATES.get(state, f"is in state {state}"), None, waits, state == "RUN")


def parse_bhist(history: str) -> Iterator[BatchJobState]:
    """Parse ``bhist -l``, which breaks lines within words: how each job ended."""
    for job in re.split(r"(?m)^(?=Job <)", history):
        text = re.sub(r"\s+", "", job)
        header = re.match(r"Job<(\d+)(?:\[(\d+)\])?>", text)
        code = re.search(r".*Exitedwithexitcode(\d+)", text)
        if header and "Donesuccessfully" in text:
            end = ended_state(0, "completed")
        elif header and ("Exited" in text or "Completed<exit>" in text):
            end = _failed_state(int(code[1]) if code else None, text)
        else:
            continue
        which = JobId(header[1], index=header[2])
        yield replace(end, job=which, number=which.text)


def _failed_state(code: int | None, reason: str) -> BatchJobState:
    """Return the state of a job that did not succeed."""
    match = re.search(r"TERM_([A-Z_]+)", reason)
    if match and match[1] in _TERMINATION_REASONS:
        how, exit_code = _TERMINATION_REASONS[match[1]]
        return ended_state(exit_code, how)
    if code is None:
        return ended_state(EXIT_SIGNAL + 15, "was killed before it began")
    return ended_state(code or 1, f"was killed: LSF reports {match[0]}" if match else "failed")
