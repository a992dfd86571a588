"""The file of ``--metrics``: metrics of this node's ranks and GPUs for Prometheus' textfile collector.

It is written with each sample, and replaced atomically. At the end of the job the metrics of ranks are removed and the
exit code is added: a job that has ended must not look as if it ran.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from ddplaunch.core import events
from ddplaunch.core.control_socket.job_status import RankState, Status
from ddplaunch.core.events import Event
from ddplaunch.core.feature import NodeSide
from ddplaunch.observe.samples.node import CounterSnapshot
from ddplaunch.observe.samples.sample import NodeSample

RANK_METRICS = (
    ("cpu", "rank_cpu_seconds_total", "counter", "CPU time of a rank and its descendants; reset at a restart."),
    ("memory", "rank_memory_bytes", "gauge",
     "Memory of a rank and its descendants, without shared and file memory."),
    ("read", "rank_read_bytes_total", "counter",
     "Bytes that a rank and its descendants read from files and pipes."),
    ("written", "rank_written_bytes_total", "counter",
     "Bytes that a rank and its descendants wrote to files and pipes."),
)  # fmt: skip
PROGRAM_METRICS = (
    ("cpu", "program_cpu_seconds_total", "counter", "CPU time of a program and its descendants; reset at its start."),
    ("memory", "program_memory_bytes", "gauge",
     "Memory of a program and its descendants, without shared and file memory."),
    ("quiet", "program_silent_seconds", "gauge", "Time since a program printed last."),
)  # fmt: skip
GPU_METRICS = (
    ("memory_used", "gpu_memory_bytes", "gauge", "Used memory of a GPU."),
    ("power", "gpu_power_watts", "gauge", "Power draw of a GPU."),
    ("slowed", "gpu_slowed", "gauge", "1 while the clock of a GPU is reduced by heat or its power supply."),
)
"""Field of a rank's, a program's or a GPU's usage, name of its metric, type, and help text."""

STALL_MERGE_S = 1.0  # two reports of one stall may differ in its beginning by this


class PrometheusFile(NodeSide):
    """The node side of ``--metrics``: writes the metrics file after each sample of usage."""

    def __init__(self, path: str, status: Callable[[], Status], notify: Callable[[str], None]) -> None:
        self._path, self._status, self._notify = path, status, notify
        self._has_failed = False
        self._stalls, self._last_stall_at = 0, 0.0
        self._code: int | None = None
        self._snapshot: CounterSnapshot | None = None

    def on_sample(self, snapshot: CounterSnapshot, sample: NodeSample | None) -> None:
        """Called on each sample: write the metrics file."""
        self._snapshot = snapshot
        self._write()

    def observe(self, event: Event) -> None:
        """Count stalls, and write the file at the end of the job. The job's status must observe the event first."""
        match event:
            case events.JobStalled(since=since) if since > self._last_stall_at + STALL_MERGE_S:
                self._stalls, self._last_stall_at = self._stalls + 1, since
            case events.JobEnded(code=code):
                self._code = code
                self._write()

    def _write(self) -> None:
        text = "".join(self._render(self._status())).encode()
        draft = os.path.join(os.path.dirname(self._path), f".{os.path.basename(self._path)}.{os.getpid()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with open(descriptor, "wb") as file:
                file.write(text)
            os.replace(draft, self._path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(draft)
            if not self._has_failed:
                self._has_failed = True
                self._notify(f"cannot write --metrics {self._path}: {error.strerror}; the job continues")

    def _render(self, status: Status) -> Iterator[str]:
        """Yield the file: each metric with its type, its help text and its series."""
        labels = f'run_id="{_escape_label(status.run_id)}",node_rank="{status.node_rank}"'

        def render_metric(
            name: str, kind: str, text: str, series: float | Mapping[str, float | None] | None
        ) -> Iterator[str]:
            """``series``: its only value, or values by labels; None where a value is unknown."""
            values = series if isinstance(series, Mapping) else {"": series}
            if known := {more: value for more, value in values.items() if value is not None}:
                yield f"# HELP ddplaunch_{name} {text}\n# TYPE ddplaunch_{name} {kind}\n"
                yield from (f"ddplaunch_{name}{{{labels}{more}}} {value:.15g}\n" for more, value in known.items())

        over, running = self._code is not None, sum(each.state is RankState.RUNNING for each in status.ranks)
        yield from render_metric("up", "gauge", "1 while the job runs, 0 after its end.", not over)
        yield from render_metric("start_time_seconds", "gauge", "Start of the launcher, as a Unix time.", status.began)
        ended = time.time() if over else None
        yield from render_metric("end_time_seconds", "gauge", "End of the job, as a Unix time.", ended)
        yield from render_metric("exit_code", "gauge", "The exit code of the job.", self._code)
        yield from render_metric("world_size", "gauge", "Ranks on all nodes.", status.world_size)
        yield from render_metric("ranks_running", "gauge", "Running ranks of this node.", running)
        yield from render_metric("restarts_total", "counter", "Restarts of all ranks.", status.restarts)
        yield from render_metric("stalls_total", "counter", "Stalls reported.", self._stalls)
        if over:
            return
        ready = {f',program="{_escape_label(each.program)}"': each.state == "ready" for each in status.programs}
        yield from render_metric("program_ready", "gauge", "1 while a program beside the ranks is ready.", ready)
        starts = {f',program="{_escape_label(each.program)}"': each.starts for each in status.programs}
        yield from render_metric("program_starts_total", "counter", "Starts of a program.", starts)
        if self._snapshot is None:
            return

        programs = {
            f',program="{_escape_label(each.program)}"': each for each in self._snapshot.programs if each.is_running
        }
        for field, name, kind, text in PROGRAM_METRICS:
            yield from render_metric(
                name, kind, text, {program: getattr(each, field) for program, each in programs.items()}
            )

        ranks = {f',rank="{rank}"': used for rank, used in self._snapshot.usage.items()}
        for field, name, kind, text in RANK_METRICS:
            yield from render_metric(name, kind, text, {rank: getattr(used, field) for rank, used in ranks.items()})
        completed = {f',rank="{rank}"': sum(groups.values()) for rank, groups in self._snapshot.groups.items()}
        text = "Completed collectives of a rank; reset for new process groups."
        yield from render_metric("rank_collectives_total", "counter", text, completed)

        gpus = {f',gpu="{each.gpu}"': each for each in self._snapshot.gpus}
        busy = {gpu: None if each.busy is None else each.busy / 100 for gpu, each in gpus.items()}
        text = "Share of the last second in which the GPU was busy."
        yield from render_metric("gpu_busy_ratio", "gauge", text, busy)
        for field, name, kind, text in GPU_METRICS:
            yield from render_metric(name, kind, text, {gpu: getattr(each, field) for gpu, each in gpus.items()})


def _escape_label(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
