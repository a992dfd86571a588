"""The process that ``launch`` starts: ``ddplaunch run``, ended when the calling program ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys

from ddplaunch import cli
from ddplaunch.system.processes.proc_utils import die_with_parent


def main() -> None:
    """Run the command line after the first two arguments: the caller's pid, and its folder, to be removed with it."""
    caller, folder = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    die_with_parent(signal.SIGTERM)  # when the thread that started this process ends
    code = cli.run_command_line() if os.getppid() == caller else 0
    if os.getppid() != caller:  # the caller was killed, and has not removed it
        shutil.rmtree(folder, ignore_errors=True)
    cli.exit_fast(code)
