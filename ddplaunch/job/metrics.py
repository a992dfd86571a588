"""The file of ``--metrics``: this node's share of a job, as Prometheus' textfile collector reads it.

It is written with each look at the ranks, and replaced as a whole, so that no reader sees half of it. At the end the
figures of ranks go, and the exit code stays: what ended is not to look as if it ran.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from ddplaunch import TYPE_CHECKING
from ddplaunch.job.status import RankState
from ddplaunch.output import events

if TYPE_CHECKING:
    from ddplaunch.agent.readings import Look
    from ddplaunch.devices.gpu_usage import GpuUsage
    from ddplaunch.diagnosis.readings import Reading
    from ddplaunch.job.status import Status
    from ddplaunch.output.events import Event

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
    "rank_read_bytes_total": ("counter", "Bytes that a rank with its descendants has read from files and pipes."),
    "rank_written_bytes_total": ("counter", "Bytes that a rank with its descendants has written to files and pipes."),
    "rank_collectives_total": ("counter", "Collectives that a rank has completed; new process groups begin anew."),
}
GPU = {
    "gpu_busy_ratio": ("gauge", "Share of the last second or so in which something ran on a GPU."),
    "gpu_memory_bytes": ("gauge", "Memory of a GPU that is in use."),
    "gpu_power_watts": ("gauge", "Power that a GPU draws."),
    "gpu_slowed": ("gauge", "1 while heat or the power supply holds the clocks of a GPU down."),
}
"""Each metric by its name without ``ddplaunch_``: its type, and what it is."""


class MetricsFile:
    def __init__(self, path: str, status: Callable[[], Status], note: Callable[[str], None]) -> None:
        self._path, self._status, self._note = path, status, note
        self._troubled = False
        self._stalls = 0
        self._code: int | None = None
        self._look: Look | None = None

    def hear(self, look: Look, reading: Reading | None) -> None:
        """Write what was found at a look."""
        self._look = look
        self._write()

    def observe(self, event: Event) -> None:
        """``status`` has heard of it."""
        match event:
            case events.Stalled():
                self._stalls += 1
            case events.Ended(code=code):
                self._code = code
                self._write()

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
        look = self._look if self._code is None else None
        for name, (kind, text) in {**RUN, **RANK, **GPU}.items():
            series: list[tuple[str, float | None]] = []
            if name in RUN:
                series = [("", self._of_run(name, status))]
            elif look and name in RANK:
                series = [(f',rank="{rank}"', _of_rank(name, rank, look)) for rank in look.used]
            elif look:
                series = [(f',gpu="{each.gpu}"', _of_gpu(name, each)) for each in look.gpus]
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


def _of_rank(name: str, rank: int, look: Look) -> float | None:
    used = look.used[rank]
    match name:
        case "rank_cpu_seconds_total":
            return used.cpu
        case "rank_memory_bytes":
            return used.memory
        case "rank_read_bytes_total":
            return used.read
        case "rank_written_bytes_total":
            return used.written
        case _:
            return sum(look.groups[rank].values()) if rank in look.groups else None


def _of_gpu(name: str, gpu: GpuUsage) -> float | None:
    match name:
        case "gpu_busy_ratio":
            return None if gpu.busy is None else gpu.busy / 100
        case "gpu_memory_bytes":
            return gpu.memory_used
        case "gpu_power_watts":
            return gpu.power
        case _:
            return gpu.slowed


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
