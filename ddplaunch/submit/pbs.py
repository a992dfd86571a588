"""The script of a PBS job: a pure function, short enough to read before it is submitted.

For PBS Professional and OpenPBS: Torque has other words for resources. qsub(1B) says what each ``#PBS`` line means,
pbs_resources(7B) what a chunk of ``select`` may have, pbsdsh(1B) how a task starts on another host: by the words of a
command, without the script's variables, folder and input. ``pbs_server`` calls the programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ddplaunch.submit.hosts_job import HostsJob, hosts, launch, options, start, word

JOB_ID = "PBS_JOBID"
NODEFILE = "PBS_NODEFILE"

_HINT = "qstat -f $PBS_JOBID shows what the job was given (exec_host)"
_PER_NODE = '/bin/bash -c "$launch" node'


def script(job: HostsJob) -> str:
    """Write the job as a script for qsub. Raises UsageError if a value cannot stand in a ``#PBS`` line."""
    return "\n".join([*_head(job), "", *hosts(job, NODEFILE, _HINT), "", *_launchers(job)]) + "\n"


def log_path(job: HostsJob, number: str) -> str:
    """Where the log of job ``number`` will be; 1234.pbs01 has the sequence number 1234."""
    name = job.output or f"{job.job_name}.o{number.partition('.')[0]}"
    return os.path.join(job.chdir, name)


def _head(job: HostsJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: qsub THIS_FILE"
    yield "#PBS -S /bin/bash"
    yield f"#PBS -N {word(job.job_name)}"
    yield f"#PBS -l select={_select(job)}"
    yield f"#PBS -l place=scatter{':exclhost' if job.exclusive else ''}"
    if job.seconds is not None:
        yield f"#PBS -l walltime={job.seconds // 3600}:{job.seconds // 60 % 60:02}:{job.seconds % 60:02}"
    if job.partition is not None:
        yield f"#PBS -q {word(job.partition)}"
    if job.account is not None:
        yield f"#PBS -A {word(job.account)}"
    yield from options(job, "#PBS")
    yield "# Both streams go into one log as they come; the job has the variables of the shell that submits it."
    yield "#PBS -j oe"
    yield "#PBS -k doe"
    if job.output:
        yield f"#PBS -o {word(os.path.join(job.chdir, job.output))}"
    yield "#PBS -V"


def _select(job: HostsJob) -> str:
    """The chunks, each a node; mpiprocs is how many lines each has in the file of hosts, and how many tasks."""
    chunk = [f"ncpus={job.cpus_per_task or 1}", "mpiprocs=1"]
    if job.gpus_per_node is not None:
        chunk.append(f"ngpus={job.gpus_per_node}")
    if job.mem is not None:
        chunk.append(f"mem={_size(job.mem)}")
    return ":".join([str(job.nodes), *chunk])


def _size(text: str) -> str:
    """A size as PBS has it, 200gb for 200G; without a unit it is megabytes, as for sbatch."""
    number, unit = re.fullmatch(r"(\d+)([A-Z]?)B?", text.upper()).groups()  # type: ignore[union-attr] # was checked
    return f"{number}{(unit or 'M').lower()}b"


def _launchers(job: HostsJob) -> Iterator[str]:
    yield "# One launcher on each host. pbsdsh starts it in the home folder, with the variables of qsub alone."
    yield from launch(job, "pbs", JOB_ID, ("unset OMP_NUM_THREADS  # PBS has set it to the CPUs of the whole node",))
    yield "# At the time limit and for qdel PBS sends SIGTERM. It is for the launchers: this script waits for them."
    yield "trap : TERM"
    yield from start(f'pbsdsh -n "$rank" -- {_PER_NODE}', _PER_NODE, JOB_ID)
