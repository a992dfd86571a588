"""How Python is told to run ddplaunch on another machine, whose current folder is the job's or a home.

``python -m`` looks for modules in that folder first: a ``ddplaunch.py`` there would be run instead of ours, and a job
that trains nothing end with 0. ``-P`` is new in Python 3.11, PYTHONSAFEPATH would reach the ranks, and neither helps
where PYTHONPATH names the folder.
"""

from __future__ import annotations

_BEHIND = "import os, sys; sys.path.sort(key=lambda p: os.path.realpath(p) == os.getcwd())"
"""The current folder goes behind all others, whoever put it there; in this process alone. Without a quotation mark, so
that it stays readable in scripts."""

LAUNCHER = "from ddplaunch.cli import main; main()"
FAR_END = "from ddplaunch.ssh.far_end import main; sys.exit(main())"


def called(python: str, statement: str = LAUNCHER) -> list[str]:
    """The words, from the interpreter on, that run ddplaunch; its own words stand behind them.

    Args:
        python: the interpreter, Python 3.10 or newer.
        statement: what to run of ours.
    """
    return [python, "-c", f"{_BEHIND}; {statement}"]
