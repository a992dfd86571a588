"""Commands that start ddplaunch on other machines: for users to run, or for SSH, Slurm and Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddplaunch.base.text import shell_quote
from ddplaunch.system.plan.plan import Plan
from ddplaunch.system.target.target import TargetKind

_CWD_LAST = "import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd())"
"""Put the current folder at the end of the path, even if PYTHONPATH names it; without quotes, to be readable.

``python -m`` searches that folder first: a ``ddplaunch.py`` there would run instead of ours, and a job that trains
nothing would end with 0. ``-P`` is new in Python 3.11, PYTHONSAFEPATH would reach the ranks, and neither helps where
PYTHONPATH names the folder.
"""

LAUNCHER_STATEMENT = "from ddplaunch.cli import main; main()"

START_TIMEOUT_S = 60.0
"""For a command to connect and to start Python, possibly from a slow file server."""

MAX_QUOTED_CHARS = 300
"""Of a line from a host, its login shell or ssh, where a message quotes it."""

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


def python_command(python: str, statement: str = LAUNCHER_STATEMENT) -> list[str]:
    """Return the words that start ddplaunch with a Python (3.10 or newer) in any folder, without its arguments."""
    return [python, "-c", f"{_CWD_LAST}; {statement}"]


def explain_exit(stderr_lines: Sequence[str], last: str, code: int) -> str:
    """Explain why Python did not start on a host; ``last`` is the last informative line of stderr."""
    if any(re.search("No module named '?ddplaunch", line) for line in stderr_lines):
        return "ddplaunch is not installed for the Python on that host (--remote-python selects another)"
    # 126 and 127 are of env(1), or of a shell.
    return f"{last} (--remote-python selects another Python)" if code in (126, 127) else last


def node_command(plan: Plan, node_rank: int, options: Iterable[str]) -> str:
    """Return the command that a user runs to start ``node_rank``, with all that the nodes must agree on.

    ``options`` are the others typed here, not those about nodes, addresses and counts.
    """
    nnodes = f"{plan.min_nodes}:{plan.nnodes}" if plan.min_nodes else str(plan.nnodes)
    words = ["ddplaunch", "run", "--nnodes", nnodes, "--node-rank", str(node_rank) if plan.has_node_rank else "auto"]
    words += ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
    words += ["--nproc", plan.nproc_text, *options]
    if plan.target.kind in (TargetKind.MODULE, TargetKind.PROGRAM):
        words.append("-m" if plan.target.kind is TargetKind.MODULE else "--no-python")
    typed, args = plan.target.text, plan.target.args
    if typed.startswith("-"):
        words += ["--", typed, *args]
    else:
        words += [typed, *(("--", *args) if args else ())]
    return shell_quote(words)
