"""A command of ours on the nodes of a running job: Slurm's ``srun --overlap`` starts it there, and no port is opened.

With ``--overlap`` (srun(1), since Slurm 20.11) the step shares CPUs, memory and GPUs of the job, and waits for none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.job.submitted import Submitted
from ddplaunch.plan.command import python_command
from ddplaunch.submit.queue import JobRecord, outside

SOON = 10.0  # seconds in which a look must be over

_OF_THE_COMMAND = ("Exited with exit code", "error: Terminating", "Terminated", "forcing job termination", "got SIG")
"""What srun says where the command itself has ended with an error, or we have ended it."""


class NoStep(LaunchError):
    """Slurm does not start the step."""

    exit_code = EXIT_UNAVAILABLE


def ask(job: Submitted, seen: JobRecord, words: Sequence[str]) -> str | None:
    """Run ``ddplaunch WORDS`` on node 0 and return what it prints; None where it fails or takes too long."""
    try:
        done = subprocess.run(
            _srun(job, seen, words, everywhere=False),
            env=outside(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SOON,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def relay(job: Submitted, seen: JobRecord, words: Sequence[str], *, everywhere: bool = False) -> int:
    """Run ``ddplaunch WORDS`` on node 0, or on all nodes; what it prints is ours. Return its exit code.

    Of all nodes, those that have nothing to show are silent where another has.

    Raises:
        NoStep: Slurm does not start it.
    """
    try:
        process = subprocess.Popen(
            _srun(job, seen, words, everywhere=everywhere),
            env=outside(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours
        )
    except OSError as error:
        raise NoStep(f"cannot run srun: {error.strerror}", "it must be on PATH") from None
    ours: list[bytes] = []
    slurms: list[str] = []
    reading = threading.Thread(target=_sort, args=(process, ours, slurms), daemon=True)
    reading.start()
    printed = False
    try:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            printed = True
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        code = process.wait()
        reading.join()
    except BaseException:
        process.terminate()  # which ends the step
        process.wait()
        raise
    if everywhere and printed:
        return 0
    if code and not ours and slurms:
        hint = "the site or its Slurm (before 20.11) may not allow srun --overlap; on the node itself ddplaunch works"
        raise NoStep(f"srun started no step in job {seen.number}: {slurms[0].removeprefix('srun: error: ')}", hint)
    sys.stderr.buffer.write(b"".join(dict.fromkeys(ours)))
    return code


def _sort(process: subprocess.Popen[bytes], ours: list[bytes], slurms: list[str]) -> None:
    """Read stderr to its end: what srun says, and what the command says."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        if not text.startswith(("srun: ", "slurmstepd")):
            ours.append(line)
        elif "retrying" in text:  # it would wait in silence
            print(f"ddplaunch: {text}", file=sys.stderr)
        elif not any(words in text for words in _OF_THE_COMMAND):
            slurms.append(text)


def _srun(job: Submitted, seen: JobRecord, words: Sequence[str], *, everywhere: bool) -> list[str]:
    count = job.nodes if everywhere else 1
    where = [] if everywhere or not seen.host else [f"--nodelist={seen.host}"]
    cluster = ["-M", job.cluster] if job.cluster else []
    counts = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    options = ["--overlap", f"--jobid={seen.number}", *counts, *where, f"--chdir={job.cwd}", "--input=none"]
    return ["srun", *cluster, *options, *python_command(job.python), *words]
