"""What runs beside the ranks: any program, or TensorBoard, of which we know how it is run and what it says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping

from ddplaunch.dataclass import dataclass, field


@dataclass(frozen=True)
class Sidecar:
    """A program that begins and ends with the job.

    ``announces`` is the title and the pattern of the line in which it says where it answers. What it prints before
    that is of interest only if it fails.
    """

    name: str  # what its lines and its log are marked by; no two of a job have the same
    words: tuple[str, ...]
    path: str
    variables: Mapping[str, str] = field(default_factory=dict)  # beside our own environment
    announces: tuple[str, re.Pattern[bytes]] | None = None

    @property
    def command(self) -> str:
        return shlex.join(self.words)


_ANNOUNCEMENT = re.compile(rb"^TensorBoard \S+ at (?P<url>http://\S+)", re.MULTILINE)
"""TensorBoard 2.21.0 at http://127.0.0.1:6006/ (Press CTRL+C to quit)"""


def tensorboard(logdir: str) -> Sidecar:
    """TensorBoard of this interpreter, for this machine alone.

    Its port is the first free one from 6006 on, as it is where nobody says which (tensorboard/program.py).
    """
    return Sidecar(
        name="tensorboard",
        words=(sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1"),
        path=sys.executable,
        # With TensorFlow beside it, it would take memory of the ranks' GPUs; and a user's queue.py is not its own.
        variables={"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"},
        announces=("TensorBoard", _ANNOUNCEMENT),
    )


def way_in(url: str, environ: Mapping[str, str], host: str) -> str | None:
    """How to reach an address of this machine's own from where the user sits, if that seems to be elsewhere."""
    if not ("SSH_CONNECTION" in environ or "SLURM_JOB_ID" in environ):
        return None
    port = url.rstrip("/").rpartition(":")[2]
    return f"from your own machine: ssh -N -L {port}:127.0.0.1:{port} {host}"
