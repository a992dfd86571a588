"""Base class for Grid Engine, PBS and LSF, which start one process per job: the script, on its first host.

The script starts one launcher on each host and passes the node rank as an argument: PBS and LSF do not export the
script's variables to other hosts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator

import click

from ddplaunch.base.errors import UsageError
from ddplaunch.cli import LAUNCHER_COMMENT, launcher_command
from ddplaunch.cli.cluster_detection import TOKEN_VARIABLE
from ddplaunch.features.submit.batch_job import BatchJob
from ddplaunch.features.submit.batch_scheduler import BatchScheduler
from ddplaunch.system.clusters.systems.host_lists import SUBMIT_HOSTS_VARIABLE, SUBMIT_NODE_RANK_VARIABLE

_HEREDOC_END = "END-OF-LAUNCH"

REQUEUE_EXIT_CODE = 99
"""The exit code that requeues a job: Grid Engine's own, and the one that ``bsub -Q`` gets."""

LOST_HOST_GRACE_S = 30
"""How long after the end of node 0 the launchers on hosts that were not lost may take to end."""


class HostsScheduler(BatchScheduler):
    """A scheduler whose jobs are scripts that start a launcher on each host."""

    directive: str  # prefix of the lines that the scheduler reads
    cluster_name: str  # its name in ``clusters``
    resubmit_command: str  # the command to submit a script by hand
    token_warning: str  # who can see the variables of a job, and how
    hosts_file: str  # the variable with the path of the host file
    hosts_hint: str  # hint that shows the hosts of a job
    hosts_given_text = "the job has"
    job_id: str  # variables with the job's number, and its index in an array
    index: str
    remote_start_command: str  # starts a launcher on another host, with node rank ``$rank``
    local_start: str  # starts it on this host
    start_comment: str  # comment on that in the script
    reads_stdin = True  # bash gets the command on stdin, as quotes are lost on the way
    forwards_job_id = True  # the script must pass on job_id and index
    forbidden_chars = "\n\r\0\\"  # cannot be written in a line of the script
    quoted_chars = " \t'[]$<>&;|"  # need quotes

    def job_notes(self, job: BatchJob) -> Iterator[str]:
        yield from super().job_notes(job)
        if TOKEN_VARIABLE in os.environ:
            yield f"{TOKEN_VARIABLE} is not secret in this job: {self.token_warning}"

    def log_name(self, job: BatchJob) -> str:
        return job.output or os.path.basename(self.log_path(job, "NUMBER")).replace("%a", "INDEX")

    def script_parts(self, job: BatchJob) -> Iterator[Iterable[str]]:
        yield "#!/bin/bash", f"# Written by ddplaunch submit. To submit it again: {self.resubmit_command} THIS_FILE"
        yield from (self.directive_lines(job), [""])
        yield from (self.preamble_lines(job), self._hosts(job), [""])
        yield from (
            self._requeue_file_lines(job),
            self._launch_script_lines(job),
            self.trap_lines(job),
            self._start(job),
        )
        yield from (self.exit_code_lines(job), _finish(job))

    def directive_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield the lines that the scheduler reads."""
        raise NotImplementedError

    def preamble_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield the first commands of the script."""
        yield from ()

    def node_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield the commands that bash runs on each node before the launcher."""
        for each in job.setup:
            yield each.line_or_exit

    def trap_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield traps against the scheduler's signals: the script waits for its launchers."""
        yield from ()

    def local_start_command(self, job: BatchJob) -> str:
        """Return the command that starts the launcher of node 0."""
        return self.local_start

    def exit_code_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield commands that change the exit code ``$code``."""
        yield from ()

    def pass_through_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield the directives of options that the user passes on to the scheduler."""
        for text in job.extra_options:
            yield f"{self.directive} {' '.join(map(self.quote_word, shlex.split(text)))}"

    def quote_word(self, text: str) -> str:
        """Quote a word of a directive: the programs split words like a shell, but expand no variables.

        Raises UsageError if it cannot be written in a line.
        """
        if any(each in text for each in self.forbidden_chars) or {'"', "'"} <= set(text):
            backslashes = ", backslashes" * ("\\" in self.forbidden_chars)
            what = f"{text!r} does not fit in one line of a batch script"
            raise UsageError(what, f"leave line breaks{backslashes} and quotes out")
        if '"' in text:
            return f"'{text}'"
        return f'"{text}"' if not text or set(text) & set(self.quoted_chars) else text

    def _hosts(self, job: BatchJob) -> Iterator[str]:
        """Yield commands that read the host file, each host once, and exit if their number is not that of the nodes."""
        requested = f"--nodes {job.nodes - job.spares}" + (f" --spares {job.spares}" if job.spares else "")
        yield "# Its hosts, in the scheduler's order; this script runs on the first."
        yield f"hosts=($(awk '!seen[$1]++ {{ print $1 }}' \"${self.hosts_file}\"))"
        yield f"if [ ${{#hosts[@]}} -ne {job.nodes} ]; then"
        yield f'  echo "ddplaunch: {requested} needs {job.nodes} hosts, but {self.hosts_given_text}: ${{hosts[*]}}" >&2'
        yield f'  echo "  {self.hosts_hint}" >&2'
        yield "  exit 2"
        yield "fi"

    def _requeue_file_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield the variables for the file that marks a preempted job."""
        if job.requeue:
            name = f"${self.job_id}.${self.index}" if job.array else f"${self.job_id}"
            yield "# ddplaunch creates this file when the job is preempted; the other one counts the requeues."
            yield f'export DDPLAUNCH_REQUEUE_FILE="$PWD/.ddplaunch-requeue-{name}"'
            yield f'requeued="$PWD/.ddplaunch-requeued-{name}"'
            yield 'rm -f "$DDPLAUNCH_REQUEUE_FILE"'

    def _forwarded_variables(self, job: BatchJob) -> list[str]:
        """Names of the variables that must be passed to launchers on other hosts."""
        return [] if not self.forwards_job_id else [self.job_id, self.index] if job.array else [self.job_id]

    def _launch_script_lines(self, job: BatchJob) -> Iterator[str]:
        """Yield the definition of ``$launch``, each node's bash script; its arguments: node rank, hosts, variables.

        If bash gets it on stdin, braces make it read all of it before a set-up command can read stdin.
        """
        names = [SUBMIT_NODE_RANK_VARIABLE, SUBMIT_HOSTS_VARIABLE, *self._forwarded_variables(job)]
        yield f"# One launcher on each host. {self.start_comment}"
        yield f"read -r -d '' launch <<'{_HEREDOC_END}'"
        if self.reads_stdin:
            yield "{"
        yield f"export {' '.join(f'{name}=${number}' for number, name in enumerate(names, 1))}"
        yield f"cd {shlex.quote(job.chdir)} || exit"
        yield from self.node_lines(job)
        yield f"# {LAUNCHER_COMMENT}"
        yield f"exec {shlex.join(launcher_command(job.interpreter))} \\"
        yield f"  {shlex.join(['run', '--cluster', self.cluster_name, *job.command])} </dev/null"
        if self.reads_stdin:
            yield "}"
        yield _HEREDOC_END

    def _start(self, job: BatchJob) -> Iterator[str]:
        """Yield the commands that start a launcher on each host, and wait for them."""
        words = " ".join(['"$all"', *(f'"${name}"' for name in self._forwarded_variables(job))])
        words += ' <<<"$launch"' * self.reads_stdin
        yield 'all=$(IFS=,; echo "${hosts[*]}")'
        yield "# The scheduler may send its warning to each process here: these signals are for the launchers."
        yield "trap : USR1 USR2"
        if job.spares:
            yield "others=()"
        yield "for ((rank = 1; rank < ${#hosts[@]}; rank++)); do"
        yield f'  (trap "" USR1 USR2; exec {self.remote_start_command} "$rank" {words}) &'
        if job.spares:
            yield "  others+=($!)"
        yield "done"
        yield f"{self.local_start_command(job)} 0 {words}"
        yield "# They end together with one exit code, which becomes the job's."
        yield "code=$?"
        if job.spares:
            yield "# A launcher that waits for a lost host would never end."
            yield f"for ((left = {LOST_HOST_GRACE_S}; left > 0; left--)); do"
            yield '  kill -0 "${others[@]}" 2>/dev/null || break'
            yield "  sleep 1"
            yield "done"
            yield 'kill "${others[@]}" 2>/dev/null'
        else:
            yield "until wait; do :; done"


def _finish(job: BatchJob) -> Iterator[str]:
    """Yield the end of the script: exit with the launchers' exit code, or with the one that requeues the job."""
    if job.requeue:
        limit = job.requeue.max_times
        yield 'if [ -e "$DDPLAUNCH_REQUEUE_FILE" ]; then'
        yield '  rm -f "$DDPLAUNCH_REQUEUE_FILE"'
        yield '  times=$(cat "$requeued" 2>/dev/null || echo 0)'
        yield f'  if [ "$times" -lt {limit} ]; then'
        yield '    echo $((times + 1)) >"$requeued"'
        yield f'    echo "ddplaunch: requeueing, $((times + 1)) of {limit}"'
        yield f"    exit {REQUEUE_EXIT_CODE}"
        yield "  fi"
        yield f'  echo "ddplaunch: not requeued again: --requeue {limit}"'
        yield "fi"
        yield 'rm -f "$requeued"'
    yield "exit $code"


def slurm_only_options(program: str) -> dict[str, str]:
    """Options that only Slurm supports, by click's names, with hints for a scheduler whose ``program`` submits."""
    return {
        "error": "stderr is in the log",
        "grid": "--array 1-6, and read the arguments of each from its index",
        **dict.fromkeys(("sbatch_args", "srun_args"), f"--{program}-arg is for options of {program}"),
        **dict.fromkeys(("teardown", "code", "requeue_on"), "it needs Slurm"),
        **dict.fromkeys(("container_image", "container_mounts"), "it needs Slurm's srun"),
    }


def check_pass_through(option: str, texts: Iterable[str], example: str, reserved: Collection[str], hint: str) -> None:
    """Check --qsub-arg or --bsub-arg. Raises UsageError for a non-option, or one that ddplaunch sets itself."""
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError:
            raise UsageError(f"{option} {text}: a quotation mark is missing") from None
        if not words or not words[0].startswith("-"):
            program = option.removeprefix("--").removesuffix("-arg")
            raise UsageError(f"{option} {text}: expected an option of {program}", f"{option}='{example}'")
        if words[0] in reserved:
            raise UsageError(f"{option} {text}: ddplaunch sets {words[0]} itself", hint)


def check_array(ctx: click.Context, *, first: int = 1, lists: bool = False, alone: bool = True) -> None:
    """Check --array: lowest index ``first``; ``lists``: 1,5 is allowed; ``alone``: a single index is allowed."""
    array, scheduler = ctx.params["array"], ctx.params["scheduler"]
    if array is None:
        return
    indices = array.partition("%")[0]
    if "," in indices and not lists:
        what = f"--array {array}: --scheduler {scheduler} accepts one range only"
        raise UsageError(what, "--array 1-4, or --array 1-9:2")
    if min(int(part.partition("-")[0] or 0) for part in indices.split(",")) < first:
        raise UsageError(f"--array {array}: indices start at {first} here", "--array 1-4")
    if not alone and "-" not in indices:
        raise UsageError(f"--array {array}: expected a range of two or more", "--array 1-4, or leave it out")
