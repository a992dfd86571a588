"""Slurm: supported options, the batch script, and calling sbatch, squeue, scontrol, sacct and scancel.

The script requests one task per node. That task is ``ddplaunch run``, which reads its node rank from the variables of
its step. sbatch(1) says what each ``#SBATCH`` line means. ``slurm_output`` parses the output of the programs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import click
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_USAGE, LaunchError, UsageError
from ddplaunch.base.options import OptionSource, value_source
from ddplaunch.base.text import join_names
from ddplaunch.cli import LAUNCHER_COMMENT, launcher_command
from ddplaunch.features.submit import slurm_output
from ddplaunch.features.submit.batch_job import BatchJob, RequeueOptions
from ddplaunch.features.submit.batch_scheduler import BatchScheduler
from ddplaunch.observe.history.blamed_hosts import find_hosts_to_exclude
from ddplaunch.system.clusters.nodelist import expand_hosts
from ddplaunch.system.code_version import CODE_VARIABLE
from ddplaunch.system.schedulers.scheduler import (
    QUERY_TIMEOUT_S,
    QUICK_TIMEOUT_S,
    BatchJobState,
    Deadline,
    JobId,
    group_by_job,
    run_program,
)
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

OVERRIDE_VARIABLES = {
    name: "_".join(("SBATCH", *name.upper().split("-")))
    for name in (
        "account", "constraint", "error", "exclusive", "gpus-per-node", "gpus-per-task", "gres", "job-name",
        "mem-per-cpu", "mem-per-gpu", "open-mode", "output", "partition", "qos", "reservation",
    )
} | {"array": "SBATCH_ARRAY_INX", "mem": "SBATCH_MEM_PER_NODE", "time": "SBATCH_TIMELIMIT"}  # fmt: skip
"""The variables that override lines of a script (sbatch(1), INPUT ENVIRONMENT VARIABLES)."""

MEMORY_OPTIONS = ("mem", "mem-per-gpu", "mem-per-cpu")
"""The options of memory; sbatch accepts only one of them."""

_OUTER_JOB_VARIABLES = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"}

_REJECTION_HINTS = (  # the first that fits; for a wrong account Slurm names the partition too
    ("account", "sacctmgr show associations user=$USER lists the accounts"),
    ("qos", "sacctmgr show qos format=name lists them"),
    ("partition", "sinfo -s lists the partitions"),
    ("time limit", 'sinfo -o "%P %l" lists the partitions with their limits'),
    ("node configuration", 'sinfo -o "%P %D %c %m %G %f" lists nodes with CPUs, memory (MB), GPUs and features'),
    ("feature", 'sinfo -o "%P %D %f" lists nodes with their features'),
    ("dependency", "squeue --me lists your jobs; --dependency afterok:JOB waits for one"),
    ("reservation", "scontrol show reservation lists them"),
    ("node name", 'sinfo -N -o "%N" lists the nodes'),
    ("gres", 'sinfo -o "%P %D %G" lists nodes with their GPUs'),
    ("", "--dry-run shows the script"),
)

DIRECTIVE_OPTIONS = (
    "job-name", "nodes", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task", "mem", "mem-per-gpu", "mem-per-cpu",
    "time", "partition", "account", "qos", "constraint", "nodelist", "exclude", "exclusive", "reservation",
    "dependency", "mail-type", "mail-user", "comment", "array", "output", "error", "chdir",
)  # fmt: skip
"""The options of sbatch that are fields of ``BatchJob``, in the order of their lines."""


class Slurm(BatchScheduler):
    """Slurm; queries many jobs at once with squeue, and one with scontrol, which reports more."""

    title, submit_program, query_program, cancel_program = "Slurm", "sbatch", "scontrol", "scancel"
    history_hint = "sacct shows it, if the site keeps accounts"
    can_kill = can_requeue = allows_overlapping_steps = True
    ping_command = "scontrol ping"
    stderr_prefixes = ("srun: ", "slurmstepd")
    step_failure_hint = (
        "the site or its Slurm (before 20.11) may not allow srun --overlap; run the command on the node itself"
    )
    submit_options, list_command, pass_through_option = ("--parsable",), "squeue --me", "sbatch_args"
    override_variables, default_outputs = OVERRIDE_VARIABLES, ("slurm-%j.out", "slurm-%A_%a.out")

    def __init__(self) -> None:
        self._answers = False  # whether scontrol answered the last query

    def read_job(self, ctx: click.Context, target: str) -> BatchJob:
        mem, per_gpu, per_cpu = _memory_values(ctx)
        job = replace(super().read_job(ctx, target), mem=mem, mem_per_gpu=per_gpu, mem_per_cpu=per_cpu)
        _check(job)
        return job

    def check_options(self, ctx: click.Context) -> None:
        for words in ctx.params["sbatch_args"] if ctx.params["requeue"] else ():
            if words.startswith(("--signal", "--no-requeue")):
                hint = "--preempt-grace sets how long before the end the signal comes"
                raise UsageError(f"--sbatch-arg {words} does not work with --requeue {ctx.params['requeue']}", hint)

    def script_parts(self, job: BatchJob) -> Iterator[Iterable[str]]:
        yield from (_head_lines(job, self.output_pattern(job)), [""], _trap_lines(job))
        yield from (_teardown_lines(job), _setup_lines(job), _code_lines(job))
        yield from (job.grid_lines("$SLURM_ARRAY_TASK_ID"), _step_lines(job), _tail_lines(job))

    def log_name(self, job: BatchJob) -> str:
        return self.output_pattern(job)

    def log_path(self, job: BatchJob, number: str) -> str:
        return _expand_pattern(job, number, self.output_pattern(job))

    def stderr_path(self, job: BatchJob, number: str) -> str | None:
        return _expand_pattern(job, number, job.error) if job.error else None

    def job_notes(self, job: BatchJob) -> Iterator[str]:
        yield from super().job_notes(job)
        passed = any("cpus-per" in arg or "exclusive" in arg for arg in job.extra_options)
        if job.cpus_per_task is None and not job.exclusive and not passed:
            yield "Slurm may give each node one CPU for all ranks; set --cpus-per-task"
        if job.container_image:
            yield "the target was not checked: it is in the image"
            if not _has_containers():
                yield "srun has no --container-image here: the job will fail unless the nodes have pyxis"
        excluded = expand_hosts(job.exclude, "--exclude") if job.exclude and "/" not in job.exclude else ()
        if bad := [each for each in find_hosts_to_exclude(time.time()) if each.host not in excluded]:
            failed = join_names(f"{each.host} ({each.times} times)" for each in bad)
            hosts = ",".join([*([job.exclude] if job.exclude else []), *(each.host for each in bad)])
            yield f"failed in your jobs of the last 7 days: {failed}; to exclude them: --exclude {hosts}"

    def environment(self, script: str) -> Mapping[str, str]:
        """Return the environment without variables that override lines of the script or are of a surrounding job."""
        environ = dict(os.environ)
        for option, variable in OVERRIDE_VARIABLES.items():
            if re.search(rf"^#SBATCH --{option}(=|$)", script, re.MULTILINE):
                environ.pop(variable, None)
        if re.search(r"^#SBATCH --mem(-per-[cg]pu)?=", script, re.MULTILINE):  # they exclude each other
            for option in MEMORY_OPTIONS:
                environ.pop(OVERRIDE_VARIABLES[option], None)
        if "SLURM_JOB_ID" in environ:
            for name in list(environ):
                if name.startswith(("SLURM_", "SRUN_")) and name not in _OUTER_JOB_VARIABLES:
                    del environ[name]
        return environ

    def rejection_hint(self, error: str) -> str:
        return next(hint for words, hint in _REJECTION_HINTS if words in error.lower())

    def parse_job_id(self, job: BatchJob, answer: str) -> JobId | None:
        number, _, cluster = answer.partition(";")  # sbatch(1): "job id;cluster name"
        return JobId(number, cluster or None) if number.isdecimal() else None

    def job_arguments(self, job: JobId) -> tuple[str, ...]:
        """Return the option for the job's cluster, if any, and its number."""
        return ("-M", job.cluster, job.text) if job.cluster else (job.text,)

    def query_records(self, jobs: Sequence[JobId], deadline: Deadline) -> list[BatchJobState] | None:
        states = list[BatchJobState]()
        for cluster in dict.fromkeys(job.cluster for job in jobs):
            of_cluster = [job for job in jobs if job.cluster == cluster]
            where = ["-M", cluster] if cluster else []
            numbers = ",".join(job.text for job in of_cluster)
            words = ("--noheader", "--array", "--states=all", f"--Format={slurm_output.FIELDS}", f"--jobs={numbers}")
            done = deadline.run("squeue", *where, *words)
            if done.returncode and "Invalid job id" not in done.stderr:
                return None
            states += slurm_output.parse_squeue(done.stdout, cluster)
            known = group_by_job(of_cluster, states)
            if missing := [job for job in of_cluster if job not in known]:
                states += _query_sacct(missing, deadline)
        return states

    def query_one(self, job: JobId, seconds: float = QUERY_TIMEOUT_S) -> BatchJobState | None:
        """Return the state of a job from scontrol or, after MinJobAge of slurm.conf (300 s), from sacct."""
        deadline, words = Deadline(seconds), self.job_arguments(job)
        if self.why_unavailable(job.cluster):  # the query would take long
            return None
        self._answers = False
        try:
            done = deadline.run("scontrol", "--oneliner", *words[:-1], "show", "job", job.text)
        except (OSError, subprocess.TimeoutExpired):
            return None
        unknown = done.returncode and ("Invalid job id" in done.stderr or f"Job {job.text} not found" in done.stdout)
        self._answers = bool(unknown or not done.returncode)
        if not unknown:
            return None if done.returncode else slurm_output.parse_scontrol(done.stdout)
        ended = group_by_job([job], _query_sacct([job], deadline)).get(job)
        if ended is None:
            raise self.forgotten_error(job)
        return ended[0]

    def why_unavailable(self, cluster: str | None = None) -> str | None:
        """Return why Slurm does not answer: ``scontrol ping`` finds that out at once, other queries take long."""
        if self._answers:
            return None
        try:
            words = ["scontrol", *(["-M", cluster] if cluster else []), "ping"]
            output = run_program(*words, seconds=QUICK_TIMEOUT_S / 2).stdout
        except subprocess.TimeoutExpired:
            return "Slurm's controller does not answer"
        except OSError:
            return None
        if "is DOWN" in output and "is UP" not in output:
            return f"Slurm's controller is down: {output.splitlines()[0]}"
        return None

    def kill(self, job: JobId) -> None:
        """Send SIGKILL to the steps, then cancel: scancel alone sends it only after the site's KillWait."""
        words = self.job_arguments(job)
        listed = run_program("squeue", "--steps", "--noheader", "--format=%i", *words[:-1], f"--jobs={job.text}").stdout
        steps = re.findall(r"^\S+\.\d+$", listed, re.MULTILINE)
        for step in steps:
            subprocess.run(["scancel", "--signal=KILL", *words[:-1], step], stdin=subprocess.DEVNULL, check=False)
        try:
            self.cancel(job)
        except LaunchError:
            if not steps:  # after the SIGKILL the job may have ended already
                raise

    def step_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, everywhere: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return an srun command; by ``--overlap`` (since Slurm 20.11) it shares the job's CPUs and waits for none."""
        if job.image:
            what = f"job {state.number} runs in a container, which srun --overlap cannot enter"
            raise UsageError(what, f"ddplaunch attach {state.number} shows its log")
        count = job.nodes if everywhere else 1
        where = [] if everywhere or not state.host else [f"--nodelist={state.host}"]
        cluster = ["-M", job.cluster] if job.cluster else []
        counts = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        options = ["--overlap", f"--jobid={state.number}", *counts, *where, f"--chdir={job.cwd}", "--input=none"]
        return ["srun", *cluster, *options, *launcher_command(job.python), *words], self.environment("")

    def interactive_command(
        self, job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, terminal: bool
    ) -> tuple[list[str], Mapping[str, str]]:
        command, env = self.step_command(job, state, words, everywhere=False)
        option = "--pty" if terminal else "--input=all"
        return [option if word == "--input=none" else word for word in command], env


def _query_sacct(jobs: Sequence[JobId], deadline: Deadline) -> Iterator[BatchJobState]:
    """Yield how jobs of one cluster ended, by sacct; nothing if the site has no accounting."""
    where = ["-M", jobs[0].cluster] if jobs[0].cluster else []
    numbers = ",".join(job.text for job in jobs)
    try:
        text = deadline.run("sacct", *where, "-X", "-n", "-P", "-o", "JobID,State,ExitCode", "-j", numbers).stdout
    except (OSError, subprocess.TimeoutExpired):
        return iter(())
    return slurm_output.parse_sacct(text, jobs[0].cluster)


def _has_containers() -> bool:
    """Whether srun has the options of pyxis, by its help. True if it does not answer."""
    try:
        done = run_program("srun", "--help")
    except (OSError, subprocess.TimeoutExpired):
        return True
    return bool(done.returncode) or "--container-image" in done.stdout


def _memory_values(ctx: click.Context) -> list[str | None]:
    """The value of each option of ``MEMORY_OPTIONS``; one on the command line overrides the others from files.

    Raises UsageError if several are given.
    """
    values = {name: ctx.params[name.replace("-", "_")] for name in MEMORY_OPTIONS}
    explicit = [name for name in MEMORY_OPTIONS if value_source(ctx, name.replace("-", "_")) is OptionSource.TYPED]
    chosen = explicit or [name for name, value in values.items() if value is not None]
    if len(chosen) > 1:
        words = " and ".join(f"--{name} {values[name]}" for name in chosen)
        raise UsageError(f"{words} exclude each other", f"leave one out: --{chosen[0]} {values[chosen[0]]}")
    return [value if name in chosen else None for name, value in values.items()]


def _check(job: BatchJob) -> None:
    """Raise UsageError if options of GPUs, memory or nodes contradict each other."""
    counts = {
        name: found[1]
        for name, text in (("gpus-per-task", job.gpus_per_task), ("gpus-per-node", job.gpus_per_node))
        if text and (found := re.search(r"(\d+)$", text))
    }
    if job.gres and (found := re.search(r"(?:^|,)(?:gres[:/])?gpu(?::[^,:]+)*?(?::(\d+))?(?:\(|,|$)", job.gres)):
        counts["gres"] = found[1] or "1"
    if "gpus-per-task" in counts and len(set(counts.values())) > 1:
        other = next(name for name in ("gpus-per-node", "gres") if name in counts)
        value = job.gpus_per_node if other == "gpus-per-node" else job.gres
        differ = f"--gpus-per-task {job.gpus_per_task} and --{other} {value} differ"
        what = f"{differ}, but a node has only one task: ddplaunch"
        raise UsageError(what, f"--{other} {value} without --gpus-per-task: ddplaunch starts a rank for each GPU")
    asked = counts or any("gpu" in words for words in job.extra_options)
    of_gpus = ("gpus-per-node", "gpus-per-task", "gres")
    if job.mem_per_gpu and not asked and not any(os.environ.get(OVERRIDE_VARIABLES[each]) for each in of_gpus):
        raise UsageError(f"--mem-per-gpu {job.mem_per_gpu}: the job asks for no GPU", "add --gpus-per-node 8")
    if job.nodelist and job.exclude:
        both = set[str]()
        with suppress(UsageError):  # an unknown form is left to sbatch
            both = set(expand_hosts(job.nodelist, "--nodelist")) & set(expand_hosts(job.exclude, "--exclude"))
        if both:
            what = f"--nodelist {job.nodelist} and --exclude {job.exclude} both have {join_names(sorted(both))}"
            raise UsageError(what, "leave these nodes out of one of them")


def _expand_pattern(job: BatchJob, number: str, pattern: str) -> str:
    """Expand a file name pattern for job ``number``; what is not known yet stays: %N, and %a of an array."""
    known = {"A": number, "x": job.job_name, "%": "%"} | ({} if job.array else {"j": number})

    def fill(found: re.Match[str]) -> str:
        return known[found[2]].rjust(int(found[1] or 0), "0") if found[2] in known else found[0]

    return os.path.join(job.chdir, re.sub(r"%(\d?)([Ajx%])", fill, pattern))


def _head_lines(job: BatchJob, output: str) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: sbatch THIS_FILE"
    folder = job.chdir.replace("%", "%%") + "/" if "%" in job.chdir else ""  # else sbatch would expand it as a pattern
    for name in DIRECTIVE_OPTIONS:
        value = output if name == "output" else getattr(job, name.replace("-", "_"))
        if value and name in ("output", "error"):
            value = os.path.join(folder, value)
        if value is True:
            yield f"#SBATCH --{name}"
        elif value not in (None, False):
            yield f"#SBATCH --{name}={_quote_directive(str(value))}"
    for words in job.extra_options:
        yield f"#SBATCH {' '.join(map(_quote_directive, shlex.split(words)))}"
    yield "# One task a node: ddplaunch, which starts the ranks of its node."
    yield "#SBATCH --ntasks-per-node=1"
    yield "# A job that Slurm starts again (preempted, or its node was lost) goes on in the same log."
    yield "#SBATCH --open-mode=append"
    if job.spares:
        yield "# When a node is lost, a spare takes its place: Slurm must not end the job."
        yield "#SBATCH --no-kill"
    if job.requeue:
        again = job.requeue
        yield f"# The signal comes before a preemption or the time limit: {again.grace:g} s for a checkpoint, then"
        yield f"# {again.stop_s:g} s for ranks to stop. Slurm may send it up to a minute early."
        yield f"#SBATCH --signal={again.warning}@{again.warning_lead_s}"
        yield "#SBATCH --requeue"


SRUN_EXIT_TIMEOUT_S = 60.0
"""Seconds for srun to end after the job's exit code is known: the other launchers end within the grace or are lost."""


def _quote_directive(text: str) -> str:
    r"""Quote a word of an ``#SBATCH`` line.

    shlex does not fit: sbatch reads ``\`` as an escape within quotes of both kinds, and a bare ``#`` begins a comment
    (``_get_argument`` in Slurm's src/sbatch/opt.c).
    """
    if "\n" in text or "\r" in text or "\0" in text:
        raise UsageError(f"{text!r} does not fit in one line of a batch script", "leave the line break out")
    if re.fullmatch(r"[\w@%+=:,./\[\]*~^&|()!<>-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _teardown_lines(job: BatchJob) -> Iterator[str]:
    if not job.teardown:
        return
    yield "# At the end, on the first node, whatever the exit code, which stays the job's."
    yield "teardown() {"
    for each in job.teardown:
        yield f"  ({' ' * each.line.startswith('(')}{each.line})"  # `((` begins arithmetic
    yield "}"
    yield "trap teardown EXIT"
    yield ""


def _setup_lines(job: BatchJob) -> Iterator[str]:
    if not job.setup:
        return
    yield "# On the first node; srun passes the variables to all. A failed set-up ends the job."
    for each in job.setup:
        yield each.line_or_exit
    yield ""


def _trap_lines(job: BatchJob) -> Iterator[str]:
    yield "# Slurm signals this shell too; so it first waits for srun. A signal for the ranks does not end it."
    yield f"trap {'ended=1' if job.requeue else ':'} TERM"
    yield "trap : USR1 USR2"
    if job.requeue:
        yield "# scancel --batch signals only this shell."
        yield f"trap 'kill -{job.requeue.warning} \"$srun\" 2>/dev/null' {job.requeue.warning}"
    yield ""


def _code_lines(job: BatchJob) -> Iterator[str]:
    if job.code:
        folder = shlex.quote(job.code.run_folder)
        yield "# The code as it was when the job was submitted."
        yield f"export {CODE_VARIABLE}={shlex.quote(job.code.version.to_variable())}"
        yield f"if [ ! -d {folder} ]; then"
        yield f'  echo "ddplaunch: the copy of the code is gone: "{folder} >&2'
        yield f"  exit {EXIT_USAGE}"
        yield "fi"
        yield ""


def _step_lines(job: BatchJob) -> Iterator[str]:
    yield "# Node 0 writes the job's exit code here. srun returns that of a killed task, even if the job survived it."
    yield 'exit_file="$PWD/.ddplaunch-exit-$SLURM_JOB_ID"'
    yield 'rm -f "$exit_file"'
    yield "# All three counts, so that no variable changes them: one launcher on each node. They end together;"
    yield "# srun must not kill one because another has ended."
    yield f"# {LAUNCHER_COMMENT}"
    counts = '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
    yield f'DDPLAUNCH_EXIT_FILE="$exit_file" srun {counts} \\'
    yield f"  --kill-on-bad-exit=0 --wait=0{' --no-kill' if job.spares else ''} \\"
    if job.cpus_per_task is not None:  # since Slurm 22.05 srun does not take it from the job (srun(1))
        yield '  --cpus-per-task="$SLURM_CPUS_PER_TASK" \\'
    start = job.code.run_folder if job.code else job.chdir
    if start != job.chdir:
        yield f"  --chdir={shlex.quote(start)} \\"
    if job.srun_args:
        yield f"  {' '.join(shlex.join(shlex.split(words)) for words in job.srun_args)} \\"
    if job.container_image is not None:
        if set(job.chdir) & {",", ":"}:
            what = f"{job.chdir} cannot be mounted in a container: for pyxis a comma or a colon ends a path"
            raise UsageError(what, "submit from a folder without these in its path")
        mounts = ",".join([f"{job.chdir}:{job.chdir}", *job.container_mounts])
        yield f"  --container-image={shlex.quote(job.container_image)} \\"
        yield f"  --container-mounts={shlex.quote(mounts)} --container-workdir={shlex.quote(start)} \\"
    # --cluster: the job inherits the variables of the shell that submits it, and these may look like another system's.
    yield f"  {shlex.join(launcher_command(job.interpreter))} \\"
    yield f"  run --cluster slurm {job.command_line}{' &' if _runs_srun_in_background(job) else ''}"


def _runs_srun_in_background(job: BatchJob) -> bool:
    """Whether srun runs in the background: the script handles signals or lost nodes meanwhile."""
    return bool(job.requeue or job.spares)


def _tail_lines(job: BatchJob) -> Iterator[str]:
    if _runs_srun_in_background(job):
        yield "srun=$!"
        if job.spares:
            timeout = f"{SRUN_EXIT_TIMEOUT_S:g} s"
            yield f"# srun waits for a lost node that came back; {timeout} after the job's end it is killed."
            yield '{ until [ -s "$exit_file" ]; do sleep 5 3>&-; done'
            yield f"  sleep {SRUN_EXIT_TIMEOUT_S:g} 3>&-"
            yield '  echo "ddplaunch: the job is over; srun still waits for a lost node and is killed" >&3'
            yield '  kill -KILL "$srun"; } 3>&2 >/dev/null 2>&1 &'
            yield "limit=$!"
        yield "# A signal interrupts wait; after the end it gives the exit code again."
        quiet = " 2>/dev/null" if job.spares else ""  # bash prints the whole command of a child that is killed
        yield f'wait "$srun"{quiet}'
        yield f'while kill -0 "$srun" 2>/dev/null; do wait "$srun"{quiet}; done'
        yield f'wait "$srun"{quiet}'
    yield "code=$?"
    if job.spares:
        yield 'kill "$limit" 2>/dev/null'
    if job.requeue and job.requeue.codes:
        yield "failed= failed_node="
        yield '[ -s "$exit_file" ] && { read -r code; read -r failed_node; } <"$exit_file"'
    else:
        yield '[ -s "$exit_file" ] && read -r code <"$exit_file"'
    yield 'rm -f "$exit_file"'
    if job.requeue:
        yield from _requeue_lines(job.requeue, can_exclude=job.nodelist is None)
    yield "exit $code"


def _requeue_lines(requeue: RequeueOptions, *, can_exclude: bool) -> Iterator[str]:
    """Yield the end of a script that requeues its job. A node that ``--nodelist`` requires cannot be excluded."""
    excludes = bool(requeue.codes) and can_exclude
    yield "preempted() {  # without a signal, where neither preempt_send_user_signal nor send_user_signal is set"
    yield '  [ $code -ne 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"'
    yield "}"
    if requeue.codes:
        yield f"case $code in {'|'.join(map(str, requeue.codes))}) failed=1 ;; *) failed_node= ;; esac"
    failed = ' || [ -n "$failed" ]' if requeue.codes else ""
    yield f'if [ -z "$ended" ] && {{ [ $code -eq {EXIT_PREEMPTED} ]{failed} || preempted; }}; then'
    yield f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeue.max_times} ]; then'
    yield f'    echo "ddplaunch: requeueing, $((${{SLURM_RESTART_COUNT:-0}} + 1)) of {requeue.max_times}"'
    if excludes:
        yield "    # A job can exclude a node only while it is pending: then Slurm ends what runs in it, but not this."
        yield "    trap '' TERM"
        known = 'scontrol --oneliner show job "$SLURM_JOB_ID"'
        yield f'    others=$({known} | sed -n "s/.* ExcNodeList=\\([^ (]*\\).*/\\1/p")'
        yield '    if scontrol requeue "$SLURM_JOB_ID"; then'
        yield '      if [ -n "$failed_node" ]; then'
        yield '        echo "ddplaunch: without ${failed_node%%.*}, which has failed"'
        yield '        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${others:+$others,}${failed_node%%.*}"'
        yield "      fi"
        yield "      exit 0"
        yield "    fi"
    else:
        yield '    scontrol requeue "$SLURM_JOB_ID" && exit'
    yield "  else"
    yield f'    echo "ddplaunch: not requeued again: --requeue {requeue.max_times}"'
    yield "  fi"
    yield "fi"
