"""Runs py-spy, if it is installed: its stacks have C and C++ frames, which Python's own stacks do not have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from ddplaunch.base.errors import UsageError, sanitize_line

DUMP_TIMEOUT_S = 30.0  # seconds


def find_py_spy(option: str) -> str:
    """Return the path of the py-spy program; raise UsageError if it is not installed."""
    tool = shutil.which("py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    if tool is None:
        raise UsageError(f"{option} needs py-spy, which is not installed", "pip install py-spy")
    return tool


def dump_stacks(tool: str, pid: int, more: list[str]) -> str:
    """Return the stacks of a process as text, or why there are none."""
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid), *more],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DUMP_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"  py-spy did not answer within {DUMP_TIMEOUT_S:g} s\n"
    return done.stdout if done.returncode == 0 else f"  {done.stderr.strip() or 'py-spy failed'}\n"


class PySpyRecording:
    """Recordings of some ranks by py-spy, one file for speedscope each; they run in the background until ``wait``."""

    def __init__(self, tool: str, pids: Mapping[int, int], seconds: float, title: str) -> None:
        """Start the recordings; ``pids`` maps ranks to PIDs, ``title`` begins the name of each file."""
        self._seconds = max(1, round(seconds))  # py-spy takes whole seconds
        self._files = {rank: f"{title}.rank-{rank}.py-spy.json" for rank in pids}
        words = [tool, "record", "--native", "--format", "speedscope", "--duration", str(self._seconds)]
        self._children = {
            rank: subprocess.Popen(
                [*words, "--pid", str(pid), "--output", self._files[rank]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank, pid in pids.items()
        }

    def wait(self) -> tuple[list[str], list[str]]:
        """Wait for the recordings; return the files, and a note for each rank without one."""
        files, notes = [], []
        for rank, child in self._children.items():
            try:
                _, stderr = child.communicate(timeout=self._seconds + DUMP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                _, stderr = child.communicate()
            if child.returncode == 0 and os.path.exists(self._files[rank]):
                files.append(self._files[rank])
            else:
                why = stderr.decode(errors="replace").strip().rpartition("\n")[2]
                notes.append(
                    f"no profile by py-spy of rank {rank}: {sanitize_line(why, 200) or 'it did not end in time'}"
                )
        return files, notes

    def stop(self) -> None:
        """Kill the recordings that still run."""
        for child in self._children.values():
            child.kill()
