"""Reads ``--sidecar`` and ``--tensorboard`` and checks that their programs exist."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.types import ExitStatus, Pid, TextLine
from ddplaunch.core.events import StoredEvent
from ddplaunch.core.option_values import find_program
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.spec import ProgramSpec

MAX_GRACE_S = 5.0  # between SIGTERM and SIGKILL, at most


class SidecarStarted(StoredEvent, frozen=True):
    sidecar: TextLine
    pid: Pid

    in_history = False


class SidecarListening(StoredEvent, frozen=True):
    sidecar: TextLine
    url: TextLine  # that it has printed

    in_history = False


class SidecarExited(StoredEvent, frozen=True):
    sidecar: TextLine
    code: ExitStatus  # -N for signal N

    in_history = False


class UrlPattern(NamedTuple):
    """The pattern of the line with a program's URL; output before that line is shown only if the program fails."""

    title: str
    line: re.Pattern[bytes]


TENSORBOARD = "tensorboard"

# TensorBoard 2.21.0 at http://127.0.0.1:6006/ (Press CTRL+C to quit)
_ANNOUNCEMENT = UrlPattern("TensorBoard", re.compile(rb"^TensorBoard \S+ at (?P<url>http://\S+)", re.MULTILINE))


def read_sidecars(options: ProgramOptions, grace_s: float, *, is_remote: bool = False) -> tuple[ProgramSpec, ...]:
    """Return the sidecars; ``is_remote``: they run on another machine, so nothing can be checked here.

    Raises UsageError if a program or TensorBoard is not installed, or the folder is a file.
    """
    sidecars: list[ProgramSpec] = []
    if (folder := options.tensorboard) is not None:
        check_tensorboard(folder, remote=is_remote)
        sidecars.append(_tensorboard_sidecar(folder))
    for text in options.sidecar:
        words, _ = find_program(text, "--sidecar", is_remote=is_remote)
        sidecars.append(ProgramSpec(_unique_name(words[0], sidecars), words, "sidecar"))
    return tuple(replace(each, grace_s=min(MAX_GRACE_S, grace_s)) for each in sidecars)


def read_url_patterns(options: ProgramOptions) -> dict[str, UrlPattern]:
    """Return how programs announce their URLs, by the names of the programs."""
    return {TENSORBOARD: _ANNOUNCEMENT} if options.tensorboard is not None else {}


def check_tensorboard(logdir: str, *, remote: bool = False) -> None:
    """Check that TensorBoard is installed and that the folder, which need not exist yet, is not a file."""
    if not logdir:
        raise UsageError("--tensorboard '': expected a folder", "--tensorboard runs")
    if remote:
        return
    folder = os.path.expanduser(logdir)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"--tensorboard {logdir} is a file, not a folder", "name its folder")
    spec = find_spec("tensorboard")
    if spec is None or spec.origin is None:  # a folder of that name is not a package
        what = f"--tensorboard {logdir}: the package tensorboard is not installed for {sys.executable}"
        raise UsageError(what, "pip install tensorboard")


def _tensorboard_sidecar(logdir: str) -> ProgramSpec:
    """Return TensorBoard as a sidecar, with this interpreter, reachable from this machine only.

    Its port is the first free one from 6006 on, TensorBoard's default (tensorboard/program.py).
    """
    return ProgramSpec(
        name=TENSORBOARD,
        command=(sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1"),
        kind="sidecar",
        # If TensorFlow is installed, it would take GPU memory of the ranks; and it must not import a user's queue.py.
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"},
    )


def _unique_name(program: str, others: Sequence[ProgramSpec]) -> str:
    """Return an unused name for a sidecar: the program's file name, numbered from the second one on."""
    base = os.path.basename(program)
    taken = {other.name for other in others}
    names = (base if count == 1 else f"{base}-{count}" for count in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def format_tunnel_hint(url: str, environ: Mapping[str, str], host: str) -> str | None:
    """Describe how to reach a local URL from the user's machine, if the launcher seems to run on another one."""
    if not ("SSH_CONNECTION" in environ or "SLURM_JOB_ID" in environ):
        return None
    port = url.rstrip("/").rpartition(":")[2]
    return f"from your own machine: ssh -N -L {port}:127.0.0.1:{port} {host}"
