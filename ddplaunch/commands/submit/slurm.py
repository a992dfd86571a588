"""The batch script of a Slurm job: a pure function, short enough to read before it is submitted.

It asks for one task a node. That task is ``ddplaunch run``, which learns its node rank from the variables of its step.
sbatch(1) says what each ``#SBATCH`` line means. ``queue`` calls the programs of Slurm.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_PREEMPTED, UsageError
from ddplaunch.plan.command import python_command


@dataclass(frozen=True)
class Setup:
    """One ``--setup`` or ``--teardown``: a file that the job's shell sources, or a command that it runs."""

    text: str
    is_file: bool = False

    @property
    def line(self) -> str:
        """What the shell runs for it."""
        return f"source {shlex.quote(self.text)}" if self.is_file else self.text.rstrip("; ")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Requeue:
    """``--requeue``: how often, and a warning early enough for a checkpoint."""

    max_times: int
    warning: str  # the signal's name, without SIG
    grace: float  # seconds for a checkpoint
    stopping: float  # seconds to stop the ranks

    @property
    def before_the_end(self) -> int:
        """Seconds between the warning and the end."""
        return math.ceil(self.grace + self.stopping)

    @property
    def times(self) -> str:
        """What there is time for after the warning."""
        return f"{self.grace:g} s for a checkpoint, then {self.stopping:g} s for ranks to stop"

    def __str__(self) -> str:
        return f"{self.max_times}, warned by {self.warning} {self.before_the_end} s before the end"


@dataclass(frozen=True)
class BatchJob:
    """What a job asks Slurm for, and what it runs; None leaves it to Slurm's default."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    interpreter: str  # the Python that runs ddplaunch on the nodes
    chdir: str  # the absolute folder that the job runs in, on the nodes too
    job_name: str
    output: str  # the log, with sbatch's patterns (%j), relative to `chdir`
    error: str | None = None  # the file of stderr, likewise; None is the log
    nodes: int = 1
    gpus_per_node: str | None = None  # a number, or a type and a number ("a100:8")
    gpus_per_task: str | None = None  # the same, as a node has one task
    gres: str | None = None  # like gpu:a100:8,nvme:1
    cpus_per_task: int | None = None
    mem: str | None = None  # of a node; the three of memory exclude each other
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    time: str | None = None  # the limit, in one of sbatch's forms
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False  # whole nodes
    reservation: str | None = None
    dependency: str | None = None  # like afterok:4711 or singleton
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    array: str | None = None  # indices like 0-3 or 1,5%2; every one is a job of `nodes` nodes
    sbatch_args: Sequence[str] = ()  # further options of sbatch, as typed there
    srun_args: Sequence[str] = ()  # further options of srun, as typed there
    setup: Sequence[Setup] = ()
    teardown: Sequence[Setup] = ()  # runs at the end, whatever the exit code
    container_image: str | None = None  # srun's option of the pyxis plugin (github.com/NVIDIA/pyxis)
    container_mounts: Sequence[str] = ()  # SRC:DST pairs beside `chdir`, which is always mounted
    spares: int = 0  # of the nodes; the job goes on without one that is lost
    requeue: Requeue | None = None  # None leaves preempted jobs to Slurm's own rules


LINES = (
    "job-name",
    "nodes",
    "gpus-per-node",
    "gpus-per-task",
    "gres",
    "cpus-per-task",
    "mem",
    "mem-per-gpu",
    "mem-per-cpu",
    "time",
    "partition",
    "account",
    "qos",
    "constraint",
    "nodelist",
    "exclude",
    "exclusive",
    "reservation",
    "dependency",
    "mail-type",
    "mail-user",
    "comment",
    "array",
    "output",
    "error",
    "chdir",
)
"""The options of sbatch that have a field of their own, in the order of their lines."""


def script(job: BatchJob) -> str:
    """Write the job as a script for sbatch. Raises UsageError if a value cannot stand in an ``#SBATCH`` line."""
    return "\n".join([*_head(job), "", *_traps(job), *_teardown(job), *_setup(job), *_step(job), *_tail(job)]) + "\n"


def log_path(job: BatchJob, number: str, pattern: str | None = None) -> str:
    """Where the log of job ``number`` will be, or another file that ``pattern`` names.

    What is not known yet stays as it is: %N, and %a of an array.
    """
    known = {"A": number, "x": job.job_name, "%": "%"} | ({} if job.array else {"j": number})

    def fill(found: re.Match[str]) -> str:
        return known[found[2]].rjust(int(found[1] or 0), "0") if found[2] in known else found[0]

    return os.path.join(job.chdir, re.sub(r"%(\d?)([Ajx%])", fill, pattern or job.output))


def _head(job: BatchJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: sbatch THIS_FILE"
    folder = job.chdir.replace("%", "%%") + "/" if "%" in job.chdir else ""  # else a pattern of sbatch's begins there
    for name in LINES:
        value = getattr(job, name.replace("-", "_"))
        if value and name in ("output", "error"):
            value = os.path.join(folder, value)
        if value is True:
            yield f"#SBATCH --{name}"
        elif value not in (None, False):
            yield f"#SBATCH --{name}={_word(str(value))}"
    for words in job.sbatch_args:
        yield f"#SBATCH {' '.join(map(_word, shlex.split(words)))}"
    yield "# One task a node: ddplaunch, which starts the ranks of its node."
    yield "#SBATCH --ntasks-per-node=1"
    yield "# A job that Slurm starts again (preempted, or its node was lost) goes on in the same log."
    yield "#SBATCH --open-mode=append"
    if job.spares:
        yield "# When a node is lost, a spare takes its place: Slurm is not to end the job."
        yield "#SBATCH --no-kill"
    if job.requeue:
        again = job.requeue
        yield f"# The warning comes before a preemption or the time limit: {again.grace:g} s for a checkpoint, then"
        yield f"# {again.stopping:g} s for ranks to stop. Slurm may send it up to a minute early."
        yield f"#SBATCH --signal={again.warning}@{again.before_the_end}"
        yield "#SBATCH --requeue"


def _word(text: str) -> str:
    r"""Quote a word of an ``#SBATCH`` line.

    Not by shlex: sbatch reads ``\`` as an escape within quotes of both kinds, and a bare ``#`` begins a comment
    (``_get_argument`` in Slurm's src/sbatch/opt.c).
    """
    if "\n" in text or "\r" in text or "\0" in text:
        raise UsageError(f"{text!r} does not fit in one line of a batch script", "leave the line break out")
    if re.fullmatch(r"[\w@%+=:,./\[\]*~^&|()!<>-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _teardown(job: BatchJob) -> Iterator[str]:
    if not job.teardown:
        return
    yield "# At the end, on the first node, whatever the exit code, which stays the job's."
    yield "teardown() {"
    for each in job.teardown:
        yield f"  ({each.line})"
    yield "}"
    yield "trap teardown EXIT"
    yield ""


def _setup(job: BatchJob) -> Iterator[str]:
    if not job.setup:
        return
    yield "# On the first node; srun hands the variables on to all. A set-up that fails ends the job."
    for each in job.setup:
        yield f"{each.line} || exit"
    yield ""


def _traps(job: BatchJob) -> Iterator[str]:
    yield "# Slurm signals this shell too; so it first waits for srun. A signal for the ranks does not end it."
    yield f"trap {'ended=1' if job.requeue else ':'} TERM"
    yield "trap : USR1 USR2"
    yield ""


def _step(job: BatchJob) -> Iterator[str]:
    yield "# Node 0 leaves the job's exit code here. srun's is a killed task's, even where the job went on without it."
    yield 'exit_file="$PWD/.ddplaunch-exit-$SLURM_JOB_ID"'
    yield 'rm -f "$exit_file"'
    yield "# All three counts, so that no variable changes them: one launcher on each node. They end together;"
    yield "# srun is not to kill one because another has ended."
    counts = '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
    yield f'DDPLAUNCH_EXIT_FILE="$exit_file" srun {counts} \\'
    yield f"  --kill-on-bad-exit=0 --wait=0{' --no-kill' if job.spares else ''} \\"
    if job.cpus_per_task is not None:  # since Slurm 22.05 srun does not take it from the job (srun(1))
        yield '  --cpus-per-task="$SLURM_CPUS_PER_TASK" \\'
    if job.srun_args:
        yield f"  {' '.join(shlex.join(shlex.split(words)) for words in job.srun_args)} \\"
    if job.container_image is not None:
        if set(job.chdir) & {",", ":"}:
            what = f"{job.chdir} cannot be mounted in a container: for pyxis a comma or a colon ends a path"
            raise UsageError(what, "submit from a folder without these in its path")
        mounts = ",".join([f"{job.chdir}:{job.chdir}", *job.container_mounts])
        yield f"  --container-image={shlex.quote(job.container_image)} \\"
        yield f"  --container-mounts={shlex.quote(mounts)} --container-workdir={shlex.quote(job.chdir)} \\"
    # --cluster: the job inherits the variables of the shell that submits it, and these may look like another system's.
    yield f"  {shlex.join(python_command(job.interpreter))} \\"
    yield f"  {shlex.join(['run', '--cluster', 'slurm', *job.command])}"


def _tail(job: BatchJob) -> Iterator[str]:
    yield "code=$?"
    yield '[ -s "$exit_file" ] && read -r code <"$exit_file"'
    yield 'rm -f "$exit_file"'
    if job.requeue:
        yield from _again(job.requeue)
    yield "exit $code"


def _again(requeue: Requeue) -> Iterator[str]:
    yield "preempted() {  # without a warning, as on sites that have not set preempt_send_user_signal"
    yield '  [ $code -ne 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"'
    yield "}"
    yield f'if [ -z "$ended" ] && {{ [ $code -eq {EXIT_PREEMPTED} ] || preempted; }}; then'
    yield f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeue.max_times} ]; then'
    yield f'    echo "ddplaunch: requeueing, $((${{SLURM_RESTART_COUNT:-0}} + 1)) of {requeue.max_times}"'
    yield '    scontrol requeue "$SLURM_JOB_ID" && exit'
    yield "  else"
    yield f'    echo "ddplaunch: not requeued again: --requeue {requeue.max_times}"'
    yield "  fi"
    yield "fi"
