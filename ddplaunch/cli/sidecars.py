"""``--sidecar`` and ``--tensorboard``: from what was typed to programs that are there."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ddplaunch.agent.sidecar import Sidecar, tensorboard
from ddplaunch.errors import UsageError


def split(text: str) -> list[str]:
    """Split a command line as a shell would, without any other thing that a shell does.

    Raises:
        UsageError: it is empty, or its quotes are not in pairs.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--sidecar {text}: {str(error).lower()}", "quotes must come in pairs") from None
    if not words or not words[0]:
        raise UsageError(f"--sidecar {text!r}: expected a program", "--sidecar 'PROGRAM ARGUMENTS'")
    return words


def read(logdir: str | None, commands: Sequence[str], *, remote: bool = False) -> tuple[Sidecar, ...]:
    """Return what is to run beside rank 0; ``remote``: on another machine, of which nothing can be said here.

    Raises:
        UsageError: a program, or TensorBoard, is not there, or its folder is none.
    """
    found: list[Sidecar] = []
    if logdir is not None:
        check_tensorboard(logdir, remote=remote)
        found.append(tensorboard(logdir))
    for text in commands:
        words = split(text)
        path = shutil.which(words[0])
        if path is None and not remote:
            raise UsageError(
                f"--sidecar {text}: program {words[0]} not found",
                "name one on PATH, or ./NAME; for a shell: --sidecar \"sh -c '…'\"",
            )
        found.append(Sidecar(_name(words[0], found), tuple(words), path or words[0]))
    return tuple(found)


def check_tensorboard(logdir: str, *, remote: bool = False) -> None:
    """Look whether TensorBoard can be run on this folder, which need not be there yet.

    Raises:
        UsageError: it is not installed, or the folder is none.
    """
    if not logdir:
        raise UsageError("--tensorboard '': expected a folder", "--tensorboard runs")
    if remote:
        return
    if os.path.isfile(os.path.expanduser(logdir)):
        raise UsageError(f"--tensorboard {logdir} is a file, not a folder", "name its folder")
    spec = find_spec("tensorboard")
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise UsageError(
            f"--tensorboard {logdir}: the package tensorboard is not installed for {sys.executable}",
            "pip install tensorboard",
        )


def _name(program: str, others: Sequence[Sidecar]) -> str:
    """What its lines are marked by: the program's name, numbered from the second on."""
    base = os.path.basename(program)
    taken = {other.name for other in others}
    names = (base if count == 1 else f"{base}-{count}" for count in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
