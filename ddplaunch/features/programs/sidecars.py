"""Parses ``--sidecar`` and ``--tensorboard`` and checks that their programs exist."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from msgspec import Struct, field

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.option_values import find_program
from ddplaunch.features.programs.options import SidecarPrograms


class Sidecar(Struct, frozen=True):
    """A program that starts and ends with the job.

    ``url_pattern``: a title, and a pattern of the line in which it prints its URL. What it prints before that is shown
    only if it fails.
    """

    name: str  # unique in the job; the prefix of its lines, and in the name of its log
    argv: tuple[str, ...]
    path: str
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's environment
    url_pattern: tuple[str, re.Pattern[bytes]] | None = None

    @property
    def command_text(self) -> str:
        return shlex.join(self.argv)


_ANNOUNCEMENT = re.compile(rb"^TensorBoard \S+ at (?P<url>http://\S+)", re.MULTILINE)
"""TensorBoard 2.21.0 at http://127.0.0.1:6006/ (Press CTRL+C to quit)"""


def read_sidecars(options: SidecarPrograms, *, is_remote: bool = False) -> tuple[Sidecar, ...]:
    """Return the sidecars; ``is_remote``: they run on another machine, so nothing can be checked here.

    Raises UsageError if a program or TensorBoard is not installed, or the folder is a file.
    """
    found: list[Sidecar] = []
    if (folder := options.tensorboard) is not None:
        check_tensorboard(folder, remote=is_remote)
        found.append(_tensorboard_sidecar(folder))
    for text in options.sidecar:
        words, path = find_program(text, "--sidecar", is_remote=is_remote)
        found.append(Sidecar(_unique_name(words[0], found), words, path))
    return tuple(found)


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


def _tensorboard_sidecar(logdir: str) -> Sidecar:
    """Return TensorBoard as a sidecar, with this interpreter, reachable from this machine only.

    Its port is the first free one from 6006 on, TensorBoard's default (tensorboard/program.py).
    """
    return Sidecar(
        name="tensorboard",
        argv=(sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1"),
        path=sys.executable,
        # If TensorFlow is installed, it would take GPU memory of the ranks; and it must not import a user's queue.py.
        variables={"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"},
        url_pattern=("TensorBoard", _ANNOUNCEMENT),
    )


def _unique_name(program: str, others: Sequence[Sidecar]) -> str:
    """Return the prefix of its lines: the program's name, numbered from the second one on."""
    base = os.path.basename(program)
    taken = {other.name for other in others}
    names = (base if count == 1 else f"{base}-{count}" for count in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
