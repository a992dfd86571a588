"""Waits for the end of a test run, then ends its leftover processes and removes its folder.

``python -IS cleanup_process.py NAME=FOLDER``: the run is over when stdin closes, as it also does if the run is killed;
its processes have the variable. Prints those that had to be killed.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_TIMEOUT_S = 5.0
"""Seconds in which the last processes may end by themselves."""

FREEZER = "/sys/fs/cgroup/freezer"
FROZEN_GROUP = "ddplaunch-test-"
"""The control groups that tests freeze processes in begin with this."""


def list_leftovers(is_ours: "Callable[[str], bool]") -> "dict[int, str]":
    """List the processes with a variable, as NAME=VALUE, for which ``is_ours`` is true, with their command lines."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", errors="replace") as file:
                if not any(map(is_ours, file.read().split("\0"))):
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found[int(name)] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended, or belongs to another user
    return found


def thaw(pid: int) -> str:
    """Thaw the control group that a test has frozen a process in; return its folder, "" for none.

    A frozen process ends by no signal, and so it would stay for good if the run was killed meanwhile.
    """
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
        folder = FREEZER + groups.get("freezer", "/")
        if os.path.basename(folder).startswith(FROZEN_GROUP):
            with open(f"{folder}/freezer.state", "w") as file:
                file.write("THAWED")
            return folder
    except OSError:
        pass  # the process has ended
    return ""


def main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    deadline, looks = time.monotonic() + EXIT_TIMEOUT_S, 0
    groups = set()
    while looks < 2 and os.path.isdir("/proc/self"):  # twice: a process has no variables for a moment after its start
        pids = list_leftovers(mark.__eq__)
        looks = 0 if pids else looks + 1
        if time.monotonic() > deadline:
            for pid, line in pids.items():
                try:
                    os.kill(pid, signal.SIGKILL)
                    groups.add(thaw(pid))
                    print(f"the tests left a process: {pid} {line[:100]}", flush=True)
                except (ProcessLookupError, BrokenPipeError):
                    pass  # it has ended, or the run was killed and reads nothing
        time.sleep(0.05)
    for group in filter(None, groups):
        with suppress(OSError):
            os.rmdir(group)
    shutil.rmtree(mark.partition("=")[2], ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
