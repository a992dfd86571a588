"""The script of a Grid Engine job: a pure function, short enough to read before it is submitted.

Grid Engine gives slots, not nodes, and starts one process: the script, on the first host. So the script starts one
launcher on each host, by ``qrsh -inherit``, and these learn their node rank from variables that ``clusters/sge`` reads.
qsub(1) says what each ``#$`` line means, sge_pe(5) what a parallel environment is. ``qmaster`` calls the programs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from ddplaunch.clusters.submitted import HOSTS, NODE_RANK
from ddplaunch.errors import UsageError
from ddplaunch.plan.command import python_command
from ddplaunch.submit.hosts_job import HostsJob

_END = "END-OF-LAUNCH"
_NUMBER = "$JOB_ID"  # what qsub calls the job's number in the name of a file


def script(job: HostsJob) -> str:
    """Write the job as a script for qsub. Raises UsageError if a value cannot stand in a ``#$`` line."""
    return "\n".join([*_head(job), "", *_setup(job), *_hosts(job), "", *_launchers(job)]) + "\n"


def log_path(job: HostsJob, number: str) -> str:
    """Where the log of job ``number`` will be."""
    return os.path.join(job.chdir, _output(job).replace(_NUMBER, number).replace("$JOB_NAME", job.job_name))


def _output(job: HostsJob) -> str:
    return job.output or f"sge-{_NUMBER}.out"


def _head(job: HostsJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: qsub THIS_FILE"
    yield "#$ -S /bin/bash"
    yield f"#$ -N {_word(job.job_name)}"
    yield f"#$ -pe {_word(job.pe or '')} {job.nodes * (job.cpus_per_task or 1)}"
    if job.seconds is not None:
        yield f"#$ -l h_rt={job.seconds}"
    if job.partition is not None:
        yield f"#$ -q {_word(job.partition)}"
    for words in job.more:
        yield f"#$ {' '.join(map(_word, shlex.split(words)))}"
    yield "# Both streams go into one log; the job has the variables of the shell that submits it."
    yield "#$ -j y"
    yield f"#$ -o {_word(_output(job))}"
    yield f"#$ -wd {_word(job.chdir)}"
    yield "#$ -V"


def _word(text: str) -> str:
    """Quote a word of a ``#$`` line, which qsub splits as a shell would, without its variables and escapes."""
    if any(each in text for each in "\n\r\0") or {'"', "'"} <= set(text):
        raise UsageError(f"{text!r} does not fit in one line of a batch script", "leave line breaks and quotes out")
    if not text or set(text) & set(" \t'"):
        return f'"{text}"'
    return f"'{text}'" if '"' in text else text


def _setup(job: HostsJob) -> Iterator[str]:
    if not job.setup:
        return
    yield "# On the first node; qrsh -V hands the variables on to all. A set-up that fails ends the job."
    for each in job.setup:
        yield f"{each.line} || exit"
    yield ""


def _hosts(job: HostsJob) -> Iterator[str]:
    yield "# Its hosts, in Grid Engine's order; this script runs on the first."
    yield "hosts=($(awk '!seen[$1]++ { print $1 }' \"$PE_HOSTFILE\"))"
    yield f"if [ ${{#hosts[@]}} -ne {job.nodes} ]; then"
    what = f"--nodes {job.nodes} needs as many hosts, but $PE gave $NSLOTS slots on: ${{hosts[*]}}"
    yield f'  echo "ddplaunch: {what}" >&2'
    yield '  echo "  qconf -sp $PE shows how many slots a host gets (allocation_rule); of N: --cpus-per-task N" >&2'
    yield "  exit 2"
    yield "fi"
    yield f'export {HOSTS}="$(IFS=,; echo "${{hosts[*]}}")"'


def _launchers(job: HostsJob) -> Iterator[str]:
    yield "# One launcher on each host. qrsh does not keep quotation marks, so bash reads the command from its input."
    yield f"read -r -d '' launch <<'{_END}'"
    yield f"{NODE_RANK}=$1 \\"
    yield f"  {shlex.join(python_command(job.interpreter))} \\"
    yield f"  {shlex.join(['run', '--cluster', 'sge', *job.command])} </dev/null"
    yield _END
    yield "for ((rank = 1; rank < ${#hosts[@]}; rank++)); do"
    yield '  qrsh -inherit -V "${hosts[rank]}" /bin/bash -s "$rank" <<<"$launch" &'
    yield "done"
    yield 'bash -s 0 <<<"$launch"'
    yield "# They end together with one exit code, which becomes the job's."
    yield "code=$?"
    yield "wait"
    yield "exit $code"
