"""The file of ``--metrics``: this node's share of a job, as Prometheus' textfile collector reads it.

It is replaced as a whole, so that no reader sees half of it. At the end the figures of ranks go, and the exit code
stays: what ended is not to look as if it ran.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from ddplaunch import TYPE_CHECKING
from ddplaunch.devices.processes import Used, used_by
from ddplaunch.job.status import RankState
from ddplaunch.loop import Loop
from ddplaunch.output import events

if TYPE_CHECKING:
    from ddplaunch.job.status import Status
    from ddplaunch.output.events import Event

EVERY = 15.0  # seconds between two writings

RUN = {
    "up": ("gauge", "1 while the launcher runs, 0 once the job is over."),
    "start_time_seconds": ("gauge", "When the launcher began, since the epoch."),
    "end_time_seconds": ("gauge", "When the job was over, since the epoch."),
    "exit_code": ("gauge", "The exit code of the job."),
    "world_size": ("gauge", "Ranks on all nodes."),
    "ranks_running": ("gauge", "Ranks of this node that run."),
    "restarts_total": ("counter", "Restarts of all ranks."),
    "stalls_total": ("counter", "How often the job was said to get nowhere."),
}
RANK = {
    "rank_cpu_seconds_total": ("counter", "CPU time of a rank with its descendants; a restart begins anew."),
    "rank_memory_bytes": ("gauge", "Memory of a rank with its descendants, without what is shared or in files."),
}
"""Each metric by its name without ``ddplaunch_``: its type, and what it is."""


class MetricsFile:
    def __init__(self, loop: Loop, path: str, status: Callable[[], Status], note: Callable[[str], None]) -> None:
        self._loop, self._path, self._status, self._note = loop, path, status, note
        self._begun = self._troubled = False
        self._stalls = 0
        self._code: int | None = None

    def observe(self, event: Event) -> None:
        """``status`` has heard of it."""
        match event:
            case events.Planned() if not self._begun:
                self._begun = True
                self._write_again()
            case events.Noted(stalled_since=since) if since is not None:
                self._stalls += 1
            case events.Ended(code=code):
                self._code = code
                self._write()

    def _write_again(self) -> None:
        if self._code is None:
            self._write()
            self._loop.after(EVERY, self._write_again)

    def _write(self) -> None:
        text = "".join(self._lines(self._status())).encode()
        draft = os.path.join(os.path.dirname(self._path), f".{os.path.basename(self._path)}.{os.getpid()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with open(descriptor, "wb") as file:
                file.write(text)
            os.replace(draft, self._path)
        except OSError as error:
            if not self._troubled:
                self._troubled = True
                self._note(f"--metrics {self._path} cannot be written: {error.strerror}; the job goes on")

    def _lines(self, status: Status) -> Iterator[str]:
        """The whole file, each metric's series below its name."""
        run = f'run_id="{_escaped(status.run_id)}",node_rank="{status.node_rank}"'
        running = [] if self._code is not None else [each for each in status.ranks if each.state is RankState.RUNNING]
        used = {each.rank: found for each in running if (found := used_by(each.pid))}
        for name, (kind, text) in {**RUN, **RANK}.items():
            series: list[tuple[str, float | None]]
            if name in RUN:
                series = [("", self._of_run(name, status))]
            else:
                series = [(f',rank="{rank}"', _of_rank(name, each)) for rank, each in used.items()]
            if known := [(labels, value) for labels, value in series if value is not None]:
                yield f"# HELP ddplaunch_{name} {text}\n# TYPE ddplaunch_{name} {kind}\n"
                yield from (f"ddplaunch_{name}{{{run}{labels}}} {value:.15g}\n" for labels, value in known)

    def _of_run(self, name: str, status: Status) -> float | None:
        over = self._code is not None
        match name:
            case "up":
                return not over
            case "start_time_seconds":
                return status.began
            case "end_time_seconds":
                return time.time() if over else None
            case "exit_code":
                return self._code
            case "world_size":
                return status.world_size
            case "ranks_running":
                return sum(each.state is RankState.RUNNING for each in status.ranks)
            case "restarts_total":
                return status.restarts
            case _:
                return self._stalls


def _of_rank(name: str, used: Used) -> float:
    return used.memory if name == "rank_memory_bytes" else used.cpu


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
