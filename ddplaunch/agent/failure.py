"""Why ranks ended, in words: reading wait statuses, error files and the kernel's counters; finding the first cause."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddplaunch.errors import EXIT_SIGNAL

_SIGNALS = {
    "SIGABRT": "aborted: a check in native code failed, or the allocator found its heap broken",
    "SIGBUS": "bus error: memory that a file backs could not be provided",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "illegal instruction: built for another processor?",
    "SIGKILL": "killed from outside",
    "SIGSEGV": "segmentation fault in native code",
    "SIGTERM": "terminated from outside",
}

_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connectFullMesh|socket.*(closed|reset)|DistBackendError"
    r"|remote process has failed|NCCL communicator was aborted|recvValue failed|failed to recv|DistNetworkError"
    r"|Timed out waiting \d+ms",
    re.IGNORECASE,
)
"""What torch.distributed says in a rank whose peer has died."""


@dataclass(frozen=True)
class Failure:
    """One rank that ended other than with 0, on its own.

    Attributes:
        exit_code, signal: exactly one is set (128+N of the shell is ``code``).
        message: the exception's last line; None where none was recorded.
        traceback: as Python printed it, the user's frames only.
        moment: seconds since the epoch, when the exception was caught, else when the process was seen to be gone.
        hint: what the kernel's counters add.
        refused: the launcher's own complaint, found inside the rank: (message, hint).
        tail: the last lines that it printed.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    attempt: int
    exit_code: int | None
    signal: int | None
    message: str | None
    traceback: str | None
    moment: float
    hint: str | None
    refused: tuple[str, str | None] | None = None
    tail: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit code that stands for this end: its own, or 128 + the signal's number."""
        return self.exit_code if self.exit_code is not None else EXIT_SIGNAL + (self.signal or 0)

    @property
    def reason(self) -> str:
        """How it ended, in words."""
        return describe_end(-self.signal if self.signal else self.exit_code or 0)

    @property
    def headline(self) -> str:
        """Who failed and why, in one line."""
        if self.message and self.message.strip() and self.signal is None:
            return f"rank {self.rank} failed with {self.message.strip().splitlines()[0]} (exit code {self.exit_code})"
        return f"rank {self.rank} {self.reason}"

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that a peer has gone."""
        return bool(self.message and _CONSEQUENCE.search(self.message))

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for ranks that failed in the same way at the same place."""
        place = [line for line in (self.traceback or "").splitlines() if line.lstrip().startswith("File ")]
        return self.exit_code, self.signal, self.message, tuple(place)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as failure.json holds them."""
        return {**asdict(self), "reason": self.reason, "code": self.code}


@dataclass(frozen=True)
class Verdict:
    """All that a report tells: the first cause, who failed alike or otherwise, how many were stopped with them."""

    first: Failure
    alike: tuple[int, ...]
    others: tuple[Failure, ...]
    stopped: int
    world_size: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that failure.json holds."""
        return {
            "first": self.first.to_json(),
            "alike": list(self.alike),
            "others": [failure.to_json() for failure in self.others],
            "stopped": self.stopped,
            "world_size": self.world_size,
        }


def describe_end(code: int) -> str:
    """Put the end of a process into words; ``code`` as os.waitstatus_to_exitcode gives it, so -N for signal N."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    words = _SIGNALS.get(name)
    return f"was ended by {name}" + (f" ({words})" if words else "")


def judge(failures: Sequence[Failure], stopped: int, world_size: int) -> Verdict:
    """Find the first cause: the earliest failure that is more than a peer's complaint of a lost connection."""
    ordered = sorted(failures, key=lambda failure: (failure.is_consequence, failure.moment))
    first = ordered[0]
    first = min((each for each in ordered if each.likeness == first.likeness), key=lambda each: each.rank)
    alike = tuple(sorted(each.rank for each in ordered if each is not first and each.likeness == first.likeness))
    others = tuple(each for each in ordered if each.likeness != first.likeness)
    return Verdict(first, alike, others, stopped, world_size)


@dataclass(frozen=True)
class Recorded:
    """What an error file says; ``moment`` is in seconds since the epoch. All None where there is no such file."""

    message: str | None = None
    traceback: str | None = None
    moment: float | None = None
    refused: tuple[str, str | None] | None = None


def read_error_file(path: str | None) -> Recorded:
    """Read what a rank, or ``@record`` in it, wrote; a file that is missing or cut short says nothing.

    Source: torch.distributed.elastic.multiprocessing.errors writes {"message": {"message", "extraInfo":
    {"py_callstack", "timestamp"}}}, or {"message": text}.
    """
    try:
        with open(path or "", encoding="utf-8") as file:
            content = json.load(file)["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return Recorded()
    if not isinstance(content, dict):
        return Recorded(str(content))
    info = content.get("extraInfo") or {}
    message = str(content.get("message"))
    try:
        moment = int(info["time_ns"]) / 1e9
    except (KeyError, ValueError, TypeError):
        moment = None
    refused = (message, info["refused"].get("hint")) if isinstance(info.get("refused"), dict) else None
    return Recorded(message, info.get("py_callstack"), moment, refused)


class Memory:
    """The kernel's counts of processes killed for want of memory, and what is left of shared memory."""

    def __init__(self) -> None:
        self._before = _oom_kills()

    def hint(self, number: int, text: str) -> str | None:
        """Say what the counters add to an end by signal ``number``, or to a message ``text`` about a killed child."""
        killed = number == signal.SIGKILL or "killed by signal: Killed" in text
        if killed and _oom_kills() > self._before:
            return "the kernel's out-of-memory killer was at work meanwhile: probably out of memory"
        if number == signal.SIGBUS or "Bus error" in text:
            return _shared_memory()
        return None


def _oom_kills() -> int:
    """oom_kill of this cgroup (v2 memory.events, v1 memory.oom_control) and of the machine (/proc/vmstat), added up."""
    total = 0
    for path in ("/proc/vmstat", *_cgroup_files()):
        try:
            with open(path, encoding="ascii") as file:
                for line in file:
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        total += int(value)
        except (OSError, ValueError):
            continue
    return total


def _cgroup_files() -> list[str]:
    files = []
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if not controllers:
                    files.append(f"/sys/fs/cgroup{path}/memory.events")
                elif "memory" in controllers.split(","):
                    files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    except (OSError, ValueError):
        pass
    return files


def _shared_memory() -> str:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return "a DataLoader's workers need /dev/shm, and there is none"
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return (
        f"/dev/shm, which DataLoader workers need, has {free >> 20} of {size >> 20} MiB free now: "
        "enlarge it (docker run --shm-size=8g), or num_workers=0"
    )


def last_lines(tail: bytes, count: int = 12) -> tuple[str, ...]:
    """The last lines that a rank printed; of a progress bar, its last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in tail.decode(errors="replace").split("\n")]
    return tuple([line for line in lines if line.strip() and not line.startswith(_OURS)][-count:])


_OURS = (f'  File "{os.path.dirname(os.path.abspath(__file__))}{os.sep}', "Extension modules:")
"""What faulthandler prints of a crash that is not the user's: our frames below theirs, and a list of libraries."""
