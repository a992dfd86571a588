"""``--gpus free:2``: finds out which GPUs of this machine are free and who has the others, and chooses some."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_count, format_duration, format_size
from ddplaunch.core.options import wants_free_gpus
from ddplaunch.features.reservations.claims import ClaimFile, units_taken
from ddplaunch.features.reservations.gpu_choice import choose_neighbours
from ddplaunch.features.reservations.waiting import Need
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.gpu_links import read_gpu_distances
from ddplaunch.system.devices.visible_gpus import visible_gpus
from ddplaunch.system.plan.hardware import GPU_BUSY_BYTES, Gpu
from ddplaunch.system.plan.numbers import format_cpulist
from ddplaunch.system.processes.proc_utils import start_ticks

QUEUE = "gpus"

READ_INTERVAL_S = 1.0
"""Between two readings of the GPUs while programs that are not ddplaunch's use them."""


def parse_free_gpus(text: str | None) -> int | None:
    """Return N of ``--gpus free:N``; None for another value. Raises UsageError if N is no number from 1 to 9999."""
    if text is None or not wants_free_gpus(text):
        return None
    found = re.fullmatch(r"free:([1-9]\d{0,3})", text.strip().lower())
    if found is None:
        raise UsageError(f"--gpus {text}: expected a number of free GPUs, 1 or more", "--gpus free:2")
    return int(found[1])


class GpuNeed(Need):
    """A number of free GPUs, of those that the job may use."""

    queue = QUEUE

    def __init__(self, count: int, environ: Mapping[str, str]) -> None:
        """Raises UsageError if the job may use fewer than ``count`` GPUs."""
        self.what = format_count(count, "free GPU")
        self._count, self._environ = count, environ
        self._gpus = _read_usable_gpus(environ)
        if len(self._gpus) < count:
            masks = [f"{name}={environ[name]}" for name in ("CUDA_VISIBLE_DEVICES",) if name in environ]
            whose = f"{masks[0]} leaves" if masks else "this machine has"
            what = f"--gpus free:{count}: {whose} {format_count(len(self._gpus), 'whole GPU')}"
            raise UsageError(what, "`ddplaunch devices` lists them")
        self.units = tuple(gpu.address for gpu in self._gpus)
        self._distances = read_gpu_distances(self._gpus)
        self._read_at = time.monotonic()
        self._open: list[str] | None = None  # the GPUs without a claim, at the last reading

    @property
    def total(self) -> int:
        return len(self._gpus)

    def choose(self, taken: Mapping[str, ClaimFile]) -> tuple[str, ...] | None:
        """Return the GPUs to take; the state of all GPUs is read again if more may be free by now."""
        unclaimed = [unit for unit in self.units if unit not in taken]
        if len(unclaimed) < self._count:
            return None
        now = time.monotonic()
        if self._open is not None and (unclaimed != self._open or now - self._read_at >= READ_INTERVAL_S):
            self._gpus, self._read_at = _read_usable_gpus(self._environ), now
        elif self._open is not None:
            return None
        self._open = unclaimed
        free = {gpu.index: gpu.address for gpu in self._gpus if gpu.address in unclaimed and is_idle(gpu)}
        chosen = choose_neighbours(sorted(free), self._count, self._distances)
        return tuple(free[index] for index in chosen) if chosen else None

    def indices(self, units: Sequence[str]) -> list[int]:
        """Return the indices of the GPUs with these addresses."""
        return sorted(gpu.index for gpu in self._gpus if gpu.address in units)

    def count_free(self, files: Sequence[ClaimFile]) -> int:
        """Return how many GPUs are free now, by the last reading."""
        taken = units_taken(files)
        return sum(gpu.address not in taken and is_idle(gpu) for gpu in self._gpus)

    def describe_users(self, files: Sequence[ClaimFile]) -> Iterator[str]:
        """Yield a line for each user of GPUs: user name, program and PID, memory, since when."""
        taken, lines = units_taken(files), dict[str, list[int]]()
        for gpu in self._gpus:
            if text := _describe_user(gpu, taken.get(gpu.address)):
                lines.setdefault(text, []).append(gpu.index)
        for text, indices in lines.items():
            yield f"GPU{'s' * (len(indices) > 1)} {format_cpulist(indices)}: {text}"


def is_idle(gpu: Gpu) -> bool:
    """Whether no program uses this GPU, as far as its driver shows that."""
    return not gpu.processes and (gpu.memory_used or 0) < GPU_BUSY_BYTES


def _read_usable_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """Return the whole GPUs that the job may use, with the processes on them; not MIG instances."""
    visible = visible_gpus(read_hardware(processes=True), None, environ)
    return [each.gpu for each in visible.gpus if each.mig is None]


def _describe_user(gpu: Gpu, claim: ClaimFile | None) -> str | None:
    """Return who has this GPU; None if it is free."""
    parts = []
    for process in gpu.processes:
        memory = "" if process.memory is None else f", {format_size(process.memory)}"
        program = f"{process.name or 'process'} {process.pid}"
        parts.append(f"{process.user or 'unknown user'}, {program}{memory}{format_age(process.pid)}")
    if claim:
        using = "" if parts else ", no memory in use yet"
        parts.insert(0, f"{claim.user}, run of PID {claim.claim.pid}{using}{format_age(claim.claim.pid)}")
    if not parts and not is_idle(gpu):
        parts.append(f"{format_size(gpu.memory_used or 0)} in use by a process that is not shown here")
    return "; ".join(parts) or None


def format_age(pid: int) -> str:
    """Return for how long a process has run, ", for 3 h", by a clock that does not jump; "" if it is unknown."""
    if (ticks := start_ticks(pid)) < 0:
        return ""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return f", for {format_duration(max(0.0, age))}"
