"""Stopping all processes of a host at one moment, as if its time stood still."""

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path


def _parent() -> Path | None:
    """Our own control group of version 2, where we can make more."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [words[1] for words in mounts if words[2] == "cgroup2"]
    own = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not roots or not own:
        return None
    folder = Path(roots[0] + own[0])
    return folder if os.access(folder / "cgroup.procs", os.W_OK) else None


class Freezer:
    """Freezes processes in a control group, which they do not notice; without control groups, with SIGSTOP.

    The group is there only from freezing to thawing. (Version 1 would not do: what it froze outlives SIGKILL.)
    """

    def __init__(self, name: str) -> None:
        self._parent = _parent()
        self.group = self._parent / name if self._parent else None

    def freeze(self, processes: Callable[[], list[int]]) -> None:
        """Freeze all ``processes()``, also those that they start in the meantime."""
        if self.group is not None:
            self.group.mkdir(exist_ok=True)
            (self.group / "cgroup.freeze").write_text("1")
        seen: set[int] = set()
        while new := set(processes()) - seen:
            for pid in new:
                self._freeze(pid)
            seen |= new
        if self.group is not None:
            _wait_for(self.group / "cgroup.events", "frozen 1")
        while self.group is None and any(map(_runs, seen)):
            time.sleep(0.001)  # each thread stops when it gets to it, and nothing tells us

    def _freeze(self, pid: int) -> None:
        try:
            if self.group is None:
                os.kill(pid, signal.SIGSTOP)
            else:
                (self.group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            pass  # it ended

    def thaw(self, processes: Callable[[], list[int]]) -> None:
        """Let them run again."""
        if self.group is None:
            for pid in processes():
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass  # it ended
        elif self._parent is not None and self.group.exists():
            (self.group / "cgroup.freeze").write_text("0")
            while members := (self.group / "cgroup.procs").read_text().split():
                for member in members:
                    try:
                        (self._parent / "cgroup.procs").write_text(member)
                    except ProcessLookupError:
                        pass  # it ended
            _wait_for(self.group / "cgroup.events", "populated 0")
            self.group.rmdir()


def _runs(pid: int) -> bool:
    """Whether any of its threads is neither stopped nor at its end."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_bytes().rpartition(b")")[2].split()[0] for thread in threads]
    except OSError:
        return Path(f"/proc/{pid}").exists()  # a thread of it ended, or all
    return any(state not in (b"T", b"t", b"Z", b"X") for state in states)


def _wait_for(events: Path, line: str) -> None:
    """Wait until the events of a control group have that line."""
    with events.open() as file:
        poll = select.poll()
        poll.register(file, select.POLLPRI)
        while line not in file.read().splitlines():
            poll.poll(1000)
            file.seek(0)
