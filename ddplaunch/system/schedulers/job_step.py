"""Runs a ddplaunch command on the nodes of a running batch job, as a job step of its scheduler; no port is opened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.system.schedulers.scheduler import BatchJobState, Scheduler, run_program
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

_COMMAND_EXIT_WORDS = (
    "Exited with exit code", "error: Terminating", "Terminated", "forcing job termination", "got SIG",
    "command terminated with exit code",
)  # fmt: skip
"""Messages of srun and kubectl where the command itself failed or was terminated: these are not shown."""


class StepNotStarted(LaunchError):
    """Raised if the scheduler did not start the job step that runs a ddplaunch command."""

    exit_code = EXIT_UNAVAILABLE


def query_node_zero(job: SubmittedJob, state: BatchJobState, words: Sequence[str], seconds: float) -> str | None:
    """Run ``ddplaunch WORDS`` on node 0 and return its output; None if it fails or takes too long."""
    argv, env = get_scheduler(job).step_command(job, state, words, everywhere=False)
    try:
        done = run_program(*argv, seconds=seconds, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def run_on_nodes(job: SubmittedJob, state: BatchJobState, words: Sequence[str], *, everywhere: bool = False) -> int:
    """Run ``ddplaunch WORDS`` on node 0, or on all nodes, and pass on its output. Return its exit code.

    Errors of some nodes are dropped if another node has printed something.
    Raises StepNotStarted if the scheduler did not start it, and UsageError if the scheduler cannot start steps in a
    running job.
    """
    scheduler = get_scheduler(job)
    argv, env = scheduler.step_command(job, state, words, everywhere=everywhere)
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches ddplaunch alone
        )
    except OSError as error:
        raise StepNotStarted(f"cannot run {argv[0]}: {error.strerror}", "it must be on PATH") from None
    command_lines: list[bytes] = []
    scheduler_lines: list[str] = []
    args = (process, scheduler, command_lines, scheduler_lines)
    stderr_reader = threading.Thread(target=_split_stderr, args=args, daemon=True)
    stderr_reader.start()
    printed = False
    try:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            printed = True
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        code = process.wait()
        stderr_reader.join()
    except BaseException:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # which ends the step; of a shell, all that it started
        process.wait()
        raise
    if everywhere and printed:
        return 0
    if code and not command_lines and scheduler_lines:
        reason = re.sub("^(srun: )?error: ", "", scheduler_lines[0])
        what = f"{scheduler.title} did not start a step in job {state.number}: {reason}"
        raise StepNotStarted(what, scheduler.step_failure_hint)
    sys.stderr.buffer.write(b"".join(dict.fromkeys(command_lines)))
    return code


def _split_stderr(
    process: subprocess.Popen[bytes], scheduler: Scheduler, command_lines: list[bytes], scheduler_lines: list[str]
) -> None:
    """Read the stderr of a job step to its end; separate the lines of the command from those of the scheduler."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        if not text.startswith(scheduler.stderr_prefixes):
            command_lines.append(line)
        elif "retrying" in text:  # else the user would see nothing while srun retries
            print(f"ddplaunch: {text}", file=sys.stderr)
        elif not any(words in text for words in _COMMAND_EXIT_WORDS):
            scheduler_lines.append(text)
