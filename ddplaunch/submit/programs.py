"""Calling a scheduler's own programs. ``queue``, ``qmaster``, ``pbs_server`` and ``lsf_batch`` read what they print."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import LaunchError, UsageError


@dataclass(frozen=True)
class Record:
    """What one of them says of a job."""

    words: str  # what to say about it, after "job 7"
    log: str
    waits: bool = False
    code: int | None = None  # our exit code; None until it is known
    errors: str | None = None  # its stderr has no file of its own
    gone: bool = False  # it has ended, and how is not known yet


def ended(log: str, code: int, how: str) -> Record:
    """A job that has ended: with our exit code for it, and in words, how."""
    return Record(f"{how} (exit code {code})", log, code=code)


def check_on_path(program: str, system: str, environ: Mapping[str, str]) -> None:
    """Check that this machine has a program. Raises UsageError if it is not on PATH."""
    if shutil.which(program, path=environ.get("PATH")) is None:
        what = f"{program} is not on PATH: this machine has no commands of {system}"
        raise UsageError(what, "submit from a login node; --dry-run shows the script on any machine")


def submit(words: list[str], script: str, environ: Mapping[str, str], hint: str) -> str:
    """Hand a script to a program, whose stderr goes to ours; return what it prints. Raises UsageError if it refuses."""
    done = subprocess.run(words, input=os.fsencode(script), capture_output=True, env=dict(environ), check=False)
    if done.stderr:
        os.write(2, done.stderr)
    if done.returncode:
        what = f"{words[0]} refused the job (exit code {done.returncode})"
        raise UsageError(what, f"{words[0]} says why above; {hint}")
    return done.stdout.decode(errors="replace").strip()


def cancel(program: str, number: str) -> None:
    """Cancel a job; what the program prints goes to our stderr. Raises LaunchError if it failed."""
    done = subprocess.run([program, number], stdin=subprocess.DEVNULL, stdout=2, check=False)
    if done.returncode:
        raise LaunchError(f"{program} did not delete job {number} (exit code {done.returncode})")


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """Ask a program something. Raises OSError if it cannot be started, TimeoutExpired after a minute."""
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
        start_new_session=True,  # Ctrl-C is ours
    )
