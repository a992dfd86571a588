"""The script of an LSF job: a pure function, short enough to read before it is submitted.

LSF gives slots; ``span[ptile=N]`` puts N of them on each host. The script starts one launcher on each host by blaunch,
which hands words to a shell as rsh does, so bash reads the command from its input. bsub(1) says what each ``#BSUB``
line means. ``lsf_batch`` calls the programs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from ddplaunch.submit.hosts_job import HostsJob, hosts, launch, options, start, word

JOB_ID = "LSB_JOBID"
HOSTFILE = "LSB_DJOB_HOSTFILE"

_NUMBER = "%J"  # what bsub calls the job's number in the name of a file
_HINT = "bjobs -l $LSB_JOBID shows what the job was given"


def script(job: HostsJob) -> str:
    """Write the job as a script for bsub. Raises UsageError if a value cannot stand in a ``#BSUB`` line."""
    return "\n".join([*_head(job), "", *_log(job), "", *hosts(job, HOSTFILE, _HINT), "", *_launchers(job)]) + "\n"


def log_path(job: HostsJob, number: str) -> str:
    """Where the log of job ``number`` will be."""
    return os.path.join(job.chdir, (job.output or f"lsf-{_NUMBER}.out").replace(_NUMBER, number))


def _head(job: HostsJob) -> Iterator[str]:
    slots = job.cpus_per_task or 1
    yield "#!/bin/bash"
    yield "# Written by ddplaunch submit. To submit it again: bsub < THIS_FILE"
    yield f"#BSUB -J {word(job.job_name)}"
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
        yield f"#BSUB -q {word(job.partition)}"
    if job.account is not None:
        yield f"#BSUB -P {word(job.account)}"
    yield from options(job, "#BSUB")
    yield "#BSUB -o /dev/null"


def _log(job: HostsJob) -> Iterator[str]:
    yield "# The log, as it grows: LSF would write it at the end of the job, with a report."
    parts = [shlex.quote(part) if part else "" for part in log_path(job, _NUMBER).split(_NUMBER)]
    number = f'"${JOB_ID}"'
    yield f"exec >{number.join(parts)} 2>&1"


def _launchers(job: HostsJob) -> Iterator[str]:
    yield "# One launcher on each host. blaunch keeps no quotation marks, so bash reads the command from its input."
    yield from launch(job, "lsf", JOB_ID, as_input=True)
    yield "# bkill sends SIGINT and SIGTERM. They are for the launchers: this script waits for them."
    yield "trap : INT TERM USR2"
    yield from start('blaunch -z "${hosts[rank]}" /bin/bash -s', "/bin/bash -s", JOB_ID, ' <<<"$launch"')
