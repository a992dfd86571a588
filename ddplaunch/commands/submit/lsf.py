"""LSF: which options a job may have, its script, and the programs that submit, show and kill it.

LSF gives slots; ``span[ptile=N]`` puts N of them on each host. The script starts one launcher on each host by blaunch,
which hands words to a shell as rsh does, so bash reads the command from its input. bsub(1) says what each ``#BSUB``
line means.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

import click

from ddplaunch.commands.submit.hosts import AGAIN, HostsScheduler, check_array, check_passed_on, only_slurm
from ddplaunch.commands.submit.job import BatchJob
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_SIGNAL, UsageError
from ddplaunch.queue.scheduler import Deadline, JobId, JobState, ended, sorted_by

_PATTERNS = {"%J": "LSB_JOBID", "%I": "LSB_JOBINDEX"}  # what bsub calls number and index in the name of a file
_BY_HAND = "type it as for bsub: --bsub-arg="
_OURS_ALONE = {
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

_KILLED = {
    "RUNLIMIT": ("reached its time limit", EXIT_SIGNAL + 15),
    "MEMLIMIT": ("used more memory than it had", EXIT_SIGNAL + 9),
}
"""Reasons (TERM_…) why LSF ended a job that say more than its exit code: words, and our exit code."""


_REFUSED = {
    "gpus_per_task": "--gpus-per-node 8 says how many",
    "gres": "--gpus-per-node 8 says how many GPUs",
    **dict.fromkeys(
        ("mem", "mem_per_gpu", "mem_per_cpu"),
        f"each site chooses the unit; {_BY_HAND}'-M 200G', or -R 'rusage[mem=200G]'",
    ),
    "qos": f"{_BY_HAND}'-sp 100', a priority",
    "constraint": f"{_BY_HAND}'-R select[NAME]'",
    "nodelist": f"{_BY_HAND}'-m \"n1 n2\"'",
    "exclude": f"{_BY_HAND}'-R select[hname!=n1]'",
    "reservation": f"{_BY_HAND}'-U NAME'",
    "dependency": f"{_BY_HAND}'-w done(4711)'",
    "mail_type": f"{_BY_HAND}-N",
    "mail_user": f"{_BY_HAND}'-u ADDRESS'",
    "comment": f"{_BY_HAND}'-Jd TEXT'",
    **only_slurm("bsub"),
}
"""Options that a job of LSF does not have, by click's names, and what to type instead."""


class Lsf(HostsScheduler):
    """LSF, by bjobs, and by bhist for what that has forgotten."""

    system, name, submits, asks, cancels = "LSF", "lsf", "bsub", "bjobs", "bkill"
    keeps = "bhist -l -n 0 shows what LSF still has"
    lists, passes, directive, submits_again = "bjobs", "bsub_args", "#BSUB", "bsub <"
    shows = "bjobs -env shows the variables of a job to you, and at some sites to everyone"
    refused = _REFUSED
    job_id, index, hosts_file = "LSB_JOBID", "LSB_JOBINDEX", "LSB_DJOB_HOSTFILE"
    hosts_hint = "bjobs -l $LSB_JOBID shows what the job was given"
    starts_by, starts_here = 'blaunch -z "${hosts[rank]}" /bin/bash -s', "/bin/bash -s"
    starts_note = "blaunch keeps no quotation marks, so bash reads the command from its input."

    def check(self, ctx: click.Context) -> None:
        values = ctx.params
        hint = "options of ddplaunch submit: --nodes, --cpus-per-task, --gpus-per-node, --time, --partition, --output"
        ours_alone = _OURS_ALONE | (_OF_REQUEUE if values["requeue"] else set())
        check_passed_on("--bsub-arg", values["bsub_args"], "-R rusage[mem=4G]", ours_alone, hint)
        for text in values["bsub_args"]:
            if "span[" in text:
                raise UsageError(f"--bsub-arg {text}: ddplaunch sets span itself", hint)
        if values["gpus_per_node"] and not values["gpus_per_node"].isdecimal():
            what = f"--gpus-per-node {values['gpus_per_node']}: here it is a number"
            raise UsageError(what, "--gpus-per-node 8, and --partition NAME if a queue has that type")
        check_array(ctx, lists=True)
        if values["spares"] and not any(text.startswith("-app") for text in values["bsub_args"]):
            hint = "name one: --bsub-arg='-app PROFILE'; without it LSF ends a job that has lost a host"
            what = "--spares needs an application profile of the site, with DJOB_COMMFAIL_ACTION=IGNORE_COMMFAIL"
            raise UsageError(what, hint)
        output = values["output"]
        if output and (odd := re.search("%(?![JI])", output)):
            hint = "%J is the job's number, %I its index in an array"
            raise UsageError(f"--output {output}: {odd[0]} is not a pattern here", hint)

    def job_name(self, text: str) -> str:
        return re.sub(r"[^A-Za-z0-9+_.-]", "_", text)

    def log(self, job: BatchJob, number: str) -> str:
        return os.path.join(job.chdir, _output(job).replace("%J", number).replace("%I", "%a"))

    def head(self, job: BatchJob) -> Iterator[str]:
        slots = job.cpus_per_task or 1
        indices, _, at_once = (job.array or "").partition("%")
        array = f"[{indices}]{at_once and '%'}{at_once}" if job.array else ""
        yield f"#BSUB -J {self.word(job.job_name + array)}"
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
            yield f"#BSUB -q {self.word(job.partition)}"
        if job.account is not None:
            yield f"#BSUB -P {self.word(job.account)}"
        yield from self.passed_on(job)
        if job.requeue:
            again = job.requeue
            yield f"# The warning comes before the time limit: {again.times}."
            yield f"#BSUB -wa {again.warning}"
            yield f"#BSUB -wt {-(-again.before_the_end // 60)}"
            yield f"#BSUB -Q {AGAIN}"
            yield "#BSUB -r"
        yield "#BSUB -o /dev/null"

    def before(self, job: BatchJob) -> Iterator[str]:
        yield "# The log, as it grows: LSF would write it at the end of the job, with a report."
        first, *rest = re.split("(%[JI])", _output(job))
        parts = [os.path.join(job.chdir, first), *rest]
        name = "".join(f'"${_PATTERNS[part]}"' if part in _PATTERNS else part and shlex.quote(part) for part in parts)
        yield f"exec >>{name} 2>&1"
        yield ""

    def traps(self, job: BatchJob) -> Iterator[str]:
        yield "# bkill sends SIGINT and SIGTERM. They are for the launchers: this script waits for them."
        yield "trap : INT TERM USR2"
        if job.requeue:
            yield "# The warning comes to all processes of this script. It is for the launcher alone, which handles it."
            yield f"trap '' {job.requeue.warning}"

    def after(self, job: BatchJob) -> Iterator[str]:
        if job.requeue:
            yield f"[ $code -eq {AGAIN} ] && code=1  # after {AGAIN} LSF would start it again"

    def advice(self, said: str) -> str:
        return "bqueues lists the queues, bhosts the hosts"

    def given(self, job: BatchJob, answer: str) -> JobId | None:
        found = re.search(r"Job <(\d+)>", answer)
        return JobId(found[1], index="" if job.array else None) if found else None

    def words(self, job: JobId) -> tuple[str, ...]:
        return (f"{job.number}[{job.index}]" if job.index else job.number,)

    def records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[JobState] | None:
        shown = deadline.call("bjobs", "-noheader", "-o", _FIELDS, *(word for job in jobs for word in self.words(job)))
        found = list(listed(shown.stdout))
        if not found and "is not found" not in shown.stderr:
            return None
        told = sorted_by(jobs, found)
        if lost := [job for job in jobs if job not in told]:
            words = [word for job in lost for word in self.words(job)]
            found += ends_of(deadline.call("bhist", "-l", "-n", "0", *words).stdout)
        return found


def _output(job: BatchJob) -> str:
    return job.output or ("lsf-%J_%I.out" if job.array else "lsf-%J.out")


def listed(shown: str) -> Iterator[JobState]:
    """What ``bjobs -noheader -o`` prints of jobs, like ``4711|0|EXIT|7|-``; the index of a job alone is 0."""
    line = r"(?m)^(\d+)(?:\[\d+\])?\|(\d+)\|([A-Z]+)\|(\d+|-|)\|(.*)$"
    for number, index, state, code, reason in re.findall(line, shown):
        job = JobId(number, index=None if index == "0" else index)
        yield replace(_state(state, code, reason), job=job, number=job.typed)


def _state(state: str, code: str, reason: str) -> JobState:
    if state == "DONE":
        return ended(0, "completed")
    if state in ("EXIT", "ZOMBI"):
        return _end(int(code) if code.isdecimal() else None, reason)
    waits = state in ("PEND", "PSUSP", "WAIT", "PROV")
    return JobState(_STATES.get(state, f"is in state {state}"), None, waits, state == "RUN")


def ends_of(history: str) -> Iterator[JobState]:
    """How jobs ended, by ``bhist -l``, which breaks lines within words; each begins with its name in brackets."""
    for job in re.split(r"(?m)^(?=Job <)", history):
        text = re.sub(r"\s+", "", job)
        begins = re.match(r"Job<(\d+)(?:\[(\d+)\])?>", text)
        code = re.search(r".*Exitedwithexitcode(\d+)", text)
        if begins and "Donesuccessfully" in text:
            end = ended(0, "completed")
        elif begins and ("Exited" in text or "Completed<exit>" in text):
            end = _end(int(code[1]) if code else None, text)
        else:
            continue
        which = JobId(begins[1], index=begins[2])
        yield replace(end, job=which, number=which.typed)


def _end(code: int | None, reason: str) -> JobState:
    """How a job ended that did not succeed."""
    found = re.search(r"TERM_([A-Z_]+)", reason)
    if found and found[1] in _KILLED:
        how, ours = _KILLED[found[1]]
        return ended(ours, how)
    if code is None:
        return ended(EXIT_SIGNAL + 15, "was killed before it began")
    return ended(code or 1, f"was killed: LSF says {found[0]}" if found else "failed")
