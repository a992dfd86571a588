"""Starts Python on another machine: the command, the variables that it gets, and why Python did not start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_CWD_LAST = "import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd())"
"""Put the current folder at the end of ``sys.path``, even if PYTHONPATH names it; without quotes, to be readable.

``python -m`` searches that folder first: a ``ddplaunch.py`` there would run instead of ours, and a job that trains
nothing would end with 0. ``-P`` is new in Python 3.11, PYTHONSAFEPATH would reach the ranks, and neither helps where
PYTHONPATH names the folder.
"""

START_TIMEOUT_S = 60.0
"""For a command to connect and to start Python, possibly from a slow file server."""

MAX_QUOTED_CHARS = 300
"""The length at which a message cuts a line that it quotes: from a host, its login shell or ssh."""

FORWARDED_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
"""The variables that are passed to other machines by default."""


def forwarded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are passed to other machines by default."""
    return {
        name: value
        for name, value in environ.items()
        if name in FORWARDED_VARIABLES or name.startswith(FORWARDED_PREFIXES)
    }


def python_command(python: str, statement: str) -> list[str]:
    """Return the words with which a Python (3.10 or newer) runs a statement in any folder; its arguments follow."""
    return [python, "-c", f"{_CWD_LAST}; {statement}"]


def explain_failed_start(stderr_lines: Sequence[str], last: str, code: int) -> str:
    """Explain why Python did not start on a host; ``last`` is the last informative line of stderr."""
    if any(re.search("No module named '?ddplaunch", line) for line in stderr_lines):
        return "ddplaunch is not installed for the Python on that host (--remote-python selects another)"
    # 126 and 127 are of env(1), or of a shell.
    return f"{last} (--remote-python selects another Python)" if code in (126, 127) else last
