"""What the scripts for Grid Engine, PBS and LSF share: the job; for the last two, one launcher on each of its hosts.

Both start one process, the script, on the first host. The script starts one launcher on each host and says to it by
words which node it is: neither system hands the script's variables on. ``pbs`` and ``lsf`` write the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ddplaunch.clusters.submitted import HOSTS, NODE_RANK
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import UsageError
from ddplaunch.plan.command import python_command
from ddplaunch.submit.slurm import Setup

_END = "END-OF-LAUNCH"


@dataclass(frozen=True)
class HostsJob:
    """What a job asks its scheduler for, and what it runs; None leaves it to the site's default."""

    command: Sequence[str]  # the words after `ddplaunch run`: its options, the target and the target's arguments
    interpreter: str  # the Python that runs ddplaunch on the nodes
    chdir: str  # the absolute folder that the job runs in, on all nodes
    job_name: str
    output: str | None = None  # the log, relative to `chdir`
    nodes: int = 1
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


def hosts(job: HostsJob, variable: str, hint: str) -> Iterator[str]:
    """Read the file of hosts that a variable names, each once; end the job if they are not as many as nodes."""
    yield "# Its hosts, in the scheduler's order; this script runs on the first."
    yield f"hosts=($(awk '!seen[$1]++ {{ print $1 }}' \"${variable}\"))"
    yield f"if [ ${{#hosts[@]}} -ne {job.nodes} ]; then"
    yield f'  echo "ddplaunch: --nodes {job.nodes} needs as many hosts, but the job has: ${{hosts[*]}}" >&2'
    yield f'  echo "  {hint}" >&2'
    yield "  exit 2"
    yield "fi"


def launch(
    job: HostsJob, cluster: str, job_id: str, before: Sequence[str] = (), *, as_input: bool = False
) -> Iterator[str]:
    """Put into a variable what bash does on each node: its words are node rank, hosts and the job's id.

    Where bash gets it ``as_input``, it must have read all of it before a set-up can.
    """
    yield f"read -r -d '' launch <<'{_END}'"
    if as_input:
        yield "{"
    yield f"export {NODE_RANK}=$1 {HOSTS}=$2 {job_id}=$3"
    yield f"cd {shlex.quote(job.chdir)} || exit"
    yield from before
    for each in job.setup:
        yield f"{each.line} || exit"
    yield f"exec {shlex.join(python_command(job.interpreter))} \\"
    yield f"  {shlex.join(['run', '--cluster', cluster, *job.command])} </dev/null"
    if as_input:
        yield "}"
    yield _END


def start(elsewhere: str, here: str, job_id: str, after: str = "") -> Iterator[str]:
    """Start a launcher on each host, by commands for ``$rank`` and for node 0 that lack the three words."""
    words = f'"$all" "${job_id}"{after}'
    yield 'all=$(IFS=,; echo "${hosts[*]}")'
    yield "for ((rank = 1; rank < ${#hosts[@]}; rank++)); do"
    yield f'  {elsewhere} "$rank" {words} &'
    yield "done"
    yield f"{here} 0 {words}"
    yield "# They end together with one exit code, which becomes the job's."
    yield "code=$?"
    yield "wait"
    yield "exit $code"
