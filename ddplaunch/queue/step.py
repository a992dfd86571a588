"""A command of ours on the nodes of a running job: its scheduler starts it there, and no port is opened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence

from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.queue.scheduler import BatchJobState, Scheduler, run_program
from ddplaunch.queue.submitted import SubmittedJob
from ddplaunch.queue.table import scheduler_of

_COMMAND_EXIT_WORDS = (
    "Exited with exit code",
    "error: Terminating",
    "Terminated",
    "forcing job termination",
    "got SIG",
)
"""What srun says where the command itself has ended with an error, or we have ended it."""


class StepNotStarted(LaunchError):
    """The scheduler does not start it."""

    exit_code = EXIT_UNAVAILABLE


def query_node_zero(job: SubmittedJob, seen: BatchJobState, words: Sequence[str], seconds: float) -> str | None:
    """Run ``ddplaunch WORDS`` on node 0 and return what it prints; None where it fails or takes too long."""
    typed, env = scheduler_of(job).step_command(job, seen, words, everywhere=False)
    try:
        done = run_program(*typed, seconds=seconds, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def run_on_nodes(job: SubmittedJob, seen: BatchJobState, words: Sequence[str], *, everywhere: bool = False) -> int:
    """Run ``ddplaunch WORDS`` on node 0, or on all nodes; what it prints is ours. Return its exit code.

    Of all nodes, those that have nothing to show are silent where another has.

    Raises:
        StepNotStarted: the scheduler does not start it.
        UsageError: it never does.
    """
    scheduler = scheduler_of(job)
    typed, env = scheduler.step_command(job, seen, words, everywhere=everywhere)
    try:
        process = subprocess.Popen(
            typed,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours
        )
    except OSError as error:
        raise StepNotStarted(f"cannot run {typed[0]}: {error.strerror}", "it must be on PATH") from None
    ours: list[bytes] = []
    theirs: list[str] = []
    reading = threading.Thread(target=_split_stderr, args=(process, scheduler, ours, theirs), daemon=True)
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
    if code and not ours and theirs:
        said = re.sub("^(srun: )?error: ", "", theirs[0])
        raise StepNotStarted(
            f"{scheduler.title} started nothing in job {seen.number}: {said}", scheduler.step_failure_hint
        )
    sys.stderr.buffer.write(b"".join(dict.fromkeys(ours)))
    return code


def _split_stderr(process: subprocess.Popen[bytes], scheduler: Scheduler, ours: list[bytes], theirs: list[str]) -> None:
    """Read stderr to its end: what the scheduler says, and what the command says."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        if not text.startswith(scheduler.stderr_prefixes):
            ours.append(line)
        elif "retrying" in text:  # it would wait in silence
            print(f"ddplaunch: {text}", file=sys.stderr)
        elif not any(words in text for words in _COMMAND_EXIT_WORDS):
            theirs.append(text)
