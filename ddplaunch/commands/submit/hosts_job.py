"""What the scripts for Grid Engine, PBS and LSF share: the job, one launcher on each of its hosts, and the requeue.

They start one process, the script, on the first host. The script starts one launcher on each host and says to it by
words which node it is: PBS and LSF do not hand the script's variables on. ``gridengine``, ``pbs`` and ``lsf`` write the
rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ddplaunch.clusters.systems.hosts import HOSTS, NODE_RANK
from ddplaunch.commands.submit.slurm import Requeue, Setup
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError
from ddplaunch.plan.command import python_command

_END = "END-OF-LAUNCH"

AGAIN = 99
"""The exit code by which a script is requeued: Grid Engine's own, and what ``bsub -Q`` has of us."""

LEFT = 30
"""Seconds after the end of node 0 in which those on hosts that were not lost have ended."""


@dataclass(frozen=True)
class HostsJob:
    """What a job asks its scheduler for, and what it runs; None leaves it to the site's default."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    interpreter: str  # the Python that runs ddplaunch on the nodes
    chdir: str  # the absolute folder that the job runs in, on all nodes
    job_name: str
    output: str | None = None  # the log, relative to `chdir`
    nodes: int = 1  # with the spares
    spares: int = 0  # of the nodes; the job goes on without one that is lost
    array: str | None = None  # indices like 1-4 or 1-9:2%2; every one is a job of `nodes` nodes
    requeue: Requeue | None = None
    cpus_per_task: int | None = None  # on each node
    gpus_per_node: str | None = None  # a number
    mem: str | None = None  # on each node, like 200G
    seconds: int | None = None  # the limit
    partition: str | None = None  # the queue
    account: str | None = None
    exclusive: bool = False
    pe: str | None = None  # the parallel environment of Grid Engine: on each host the same number of slots
    more: Sequence[str] = ()  # further options of qsub or bsub, as typed there
    setup: Sequence[Setup] = ()


def word(text: str) -> str:
    """Quote a word of a directive: qsub and bsub split it as a shell would, without its variables.

    Raises UsageError if it fits in no line.
    """
    if any(each in text for each in "\n\r\0\\") or {'"', "'"} <= set(text):
        what = f"{text!r} does not fit in one line of a batch script"
        raise UsageError(what, "leave line breaks, backslashes and quotes out")
    if '"' in text:
        return f"'{text}'"
    return f'"{text}"' if not text or set(text) & set(" \t'[]$<>&;|") else text


def options(job: HostsJob, directive: str) -> Iterator[str]:
    """The lines of the options that were passed on."""
    for text in job.more:
        yield f"{directive} {' '.join(map(word, shlex.split(text)))}"


def hosts(job: HostsJob, variable: str, hint: str, given: str = "the job has") -> Iterator[str]:
    """Read the file of hosts that a variable names, each once; end the job if they are not as many as nodes."""
    asked = f"--nodes {job.nodes - job.spares}" + (f" --spares {job.spares}" if job.spares else "")
    yield "# Its hosts, in the scheduler's order; this script runs on the first."
    yield f"hosts=($(awk '!seen[$1]++ {{ print $1 }}' \"${variable}\"))"
    yield f"if [ ${{#hosts[@]}} -ne {job.nodes} ]; then"
    yield f'  echo "ddplaunch: {asked} needs {job.nodes} hosts, but {given}: ${{hosts[*]}}" >&2'
    yield f'  echo "  {hint}" >&2'
    yield "  exit 2"
    yield "fi"


def launch(
    job: HostsJob,
    cluster: str,
    variables: Sequence[str],
    before: Sequence[str] = (),
    *,
    as_input: bool = False,
) -> Iterator[str]:
    """Put into a variable what bash does on each node: its words are node rank, hosts, and values of ``variables``.

    Where bash gets it ``as_input``, it must have read all of it before a set-up can.
    """
    names = [NODE_RANK, HOSTS, *variables]
    yield f"read -r -d '' launch <<'{_END}'"
    if as_input:
        yield "{"
    yield f"export {' '.join(f'{name}=${number}' for number, name in enumerate(names, 1))}"
    yield f"cd {shlex.quote(job.chdir)} || exit"
    yield from before
    for each in job.setup:
        yield f"{each.line} || exit"
    yield f"exec {shlex.join(python_command(job.interpreter))} \\"
    yield f"  {shlex.join(['run', '--cluster', cluster, *job.command])} </dev/null"
    if as_input:
        yield "}"
    yield _END


def start(job: HostsJob, elsewhere: str, here: str, variables: Sequence[str], after: str = "") -> Iterator[str]:
    """Start a launcher on each host, by commands for ``$rank`` and for node 0 that lack the words of ``launch``."""
    words = " ".join(['"$all"', *(f'"${name}"' for name in variables)]) + after
    yield 'all=$(IFS=,; echo "${hosts[*]}")'
    yield "# A scheduler that warns may signal each process here: these two are for the launchers."
    yield "trap : USR1 USR2"
    if job.spares:
        yield "others=()"
    yield "for ((rank = 1; rank < ${#hosts[@]}; rank++)); do"
    yield f'  (trap "" USR1 USR2; exec {elsewhere} "$rank" {words}) &'
    if job.spares:
        yield "  others+=($!)"
    yield "done"
    yield f"{here} 0 {words}"
    yield "# They end together with one exit code, which becomes the job's."
    yield "code=$?"
    if job.spares:
        yield "# What waits for a host that was lost would never end."
        yield f"for ((left = {LEFT}; left > 0; left--)); do"
        yield '  kill -0 "${others[@]}" 2>/dev/null || break'
        yield "  sleep 1"
        yield "done"
        yield 'kill "${others[@]}" 2>/dev/null'
    else:
        yield "until wait; do :; done"


def mark(job: HostsJob, name: str) -> Iterator[str]:
    """Where ddplaunch leaves word that the job made room; ``name`` is the job's, as the shell has it."""
    if job.requeue:
        yield "# ddplaunch leaves this file where the job made room; the other counts how often it was requeued."
        yield f'export DDPLAUNCH_REQUEUE_FILE="$PWD/.ddplaunch-requeue-{name}"'
        yield f'requeued="$PWD/.ddplaunch-requeued-{name}"'
        yield 'rm -f "$DDPLAUNCH_REQUEUE_FILE"'


def finish(job: HostsJob) -> Iterator[str]:
    """End with the launchers' exit code, or so that the job is requeued."""
    if job.requeue:
        limit = job.requeue.max_times
        yield 'if [ -e "$DDPLAUNCH_REQUEUE_FILE" ]; then'
        yield '  rm -f "$DDPLAUNCH_REQUEUE_FILE"'
        yield '  times=$(cat "$requeued" 2>/dev/null || echo 0)'
        yield f'  if [ "$times" -lt {limit} ]; then'
        yield '    echo $((times + 1)) >"$requeued"'
        yield f'    echo "ddplaunch: requeueing, $((times + 1)) of {limit}"'
        yield f"    exit {AGAIN}"
        yield "  fi"
        yield f'  echo "ddplaunch: not requeued again: --requeue {limit}"'
        yield "fi"
        yield 'rm -f "$requeued"'
    yield "exit $code"
