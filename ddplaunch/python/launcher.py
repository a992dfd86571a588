"""The process that ``launch`` starts: ``ddplaunch run``, tied to the program that wants its results."""

from __future__ import annotations

import os
import shutil
import signal
import sys

from ddplaunch import cli
from ddplaunch.rank.processes import die_with_parent


def main() -> None:
    """Run the command line behind the first two words: the caller's pid, and the folder that goes with it."""
    caller, folder = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    die_with_parent(signal.SIGTERM)  # of the thread that started us
    code = cli.run_command_line() if os.getppid() == caller else 0
    if os.getppid() != caller:  # killed: nobody else removes it
        shutil.rmtree(folder, ignore_errors=True)
    cli.exit_fast(code)
