"""What the kernel says of the machine: memory, CPUs and their time, limits, InfiniBand."""

from __future__ import annotations

import os
import resource

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.control_groups import available_memory, list_cgroup_dirs
from ddplaunch.agent.limits import ResourceLimitError, check_proc
from ddplaunch.commands.doctor.checks import (
    CheckContext,
    FactReader,
    Finding,
    Findings,
    HealthCheck,
    KernelNumber,
    Severity,
)
from ddplaunch.dataclass import dataclass
from ddplaunch.devices.cpu import read_cpu
from ddplaunch.devices.sysfs import read_int
from ddplaunch.words import format_size

if TYPE_CHECKING:
    from ddplaunch.commands.doctor.facts import NodeFacts

MIN_MEMORY_BYTES = 2 << 30  # bytes
MIN_OPEN_FILES = 1024
MIN_PROCESSES = 1024


@dataclass(frozen=True)
class ProcessLimits:
    """The kernel's limits on this process; None is unlimited."""

    memlock: KernelNumber | None
    open_files: KernelNumber | None
    processes: KernelNumber | None
    processes_left: KernelNumber | None  # of the control group's


def _read(_: CheckContext) -> FactReader:
    fields = _fields()  # now: the load that follows is of our own making
    return lambda: fields


def _fields() -> dict[str, object]:
    cpu = read_cpu("/sys")
    total, available = available_memory(cpu.memory_total, cpu.memory_available)
    return {
        "kernel": os.uname().release,
        "limits": _read_limits(),
        "memory_total": total,
        "memory_available": available,
        "cpus": len(cpu.allowed),
        "quota": cpu.quota,
        "load": os.getloadavg()[0],
        "infiniband": tuple(list_dir("/sys/class/infiniband")),
        "cannot_start": _cannot_start(),
    }


def _cannot_start() -> tuple[str, str] | None:
    try:
        check_proc()
    except ResourceLimitError as error:
        return (error.message, error.hint or "")
    return None


def list_dir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _read_limits() -> ProcessLimits:
    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    left: list[int] = []
    for folder in list_cgroup_dirs("pids"):
        limit, used = read_int(f"{folder}/pids.max"), read_int(f"{folder}/pids.current")
        if limit is not None and used is not None:
            left.append(limit - used)
    return ProcessLimits(
        memlock=soft(resource.RLIMIT_MEMLOCK),
        open_files=soft(resource.RLIMIT_NOFILE),
        processes=soft(resource.RLIMIT_NPROC) if os.geteuid() else None,
        processes_left=min(left, default=None),
    )


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.cannot_start:
        what, remedy = facts.cannot_start
        yield Finding(Severity.ERROR, name, what, remedy)
    for rule in (_limits, _memory, _processors):
        yield from rule(name, facts)


def _limits(name: str, facts: NodeFacts) -> Findings:
    limits = facts.limits
    if facts.infiniband and limits.memlock is not None:
        text = (
            f"at most {format_size(limits.memlock)} of memory can be locked (ulimit -l), and InfiniBand needs no limit"
        )
        yield Finding(
            Severity.WARNING, name, text, "memlock unlimited in limits.conf, or docker run --ulimit memlock=-1"
        )
    if limits.open_files is not None and limits.open_files < MIN_OPEN_FILES:
        text = f"a process may have {limits.open_files} open files (ulimit -n), and DataLoader workers use many"
        yield Finding(Severity.WARNING, name, text, f"ulimit -n {64 * MIN_OPEN_FILES}")
    for count, what, remedy in (
        (limits.processes, "this user may have {} processes and threads (ulimit -u)", "ulimit -u unlimited"),
        (limits.processes_left, "the control group allows {} more processes and threads (pids.max)", "raise pids.max"),
    ):
        if count is not None and count < MIN_PROCESSES:
            text = f"{what.format(count)}; each rank has dozens of threads"
            yield Finding(Severity.WARNING, name, text, remedy)


def _memory(name: str, facts: NodeFacts) -> Findings:
    if facts.memory_available is not None and facts.memory_available < MIN_MEMORY_BYTES:
        text = (
            f"{format_size(facts.memory_available)} of memory are available of {format_size(facts.memory_total or 0)}"
        )
        yield Finding(Severity.WARNING, name, text, "end what uses it, or ask for more memory")


def _processors(name: str, facts: NodeFacts) -> Findings:
    if facts.quota is not None and facts.quota < facts.cpus:
        text = f"the control group allows the time of {facts.quota:g} of {facts.cpus} CPUs"
        severity = Severity.WARNING if facts.quota < max(1, len(facts.gpus)) else Severity.NOTE
        yield Finding(severity, name, text, "raise its quota: docker run --cpus, resources.limits.cpu")
    if is_overloaded(facts):
        text = f"{facts.load:.0f} processes want to run, and there are {facts.cpus} CPUs for them"
        yield Finding(Severity.WARNING, name, text, "see with `top` what else runs there")


def is_overloaded(facts: NodeFacts) -> bool:
    """Whether more wants to run there than can."""
    return facts.load > 1.5 * facts.cpus + 1


def is_cpu_throttled(facts: NodeFacts) -> bool:
    """Whether its CPUs have too little time, as a warning says: what is slow there is so for that."""
    return is_overloaded(facts) or (facts.quota is not None and facts.quota < min(facts.cpus, max(1, len(facts.gpus))))


def _cpus_row(facts: NodeFacts) -> str:
    return f"{facts.cpus}" if facts.quota is None else f"{facts.cpus}, the time of {facts.quota:g}"


def _limits_row(facts: NodeFacts) -> str:
    def told(value: int | None) -> str:
        return "unlimited" if value is None else str(value)

    limits, lock = facts.limits, facts.limits.memlock
    locked = "unlimited" if lock is None else format_size(lock)
    return f"open files {told(limits.open_files)}, processes {told(limits.processes)}, locked memory {locked}"


CHECK = HealthCheck(
    _read,
    _find_problems,
    {
        "Linux": lambda facts: facts.kernel,
        "CPUs": _cpus_row,
        "limits": _limits_row,
        "InfiniBand": lambda facts: ", ".join(facts.infiniband) or None,
    },
    {"memory": lambda facts: facts.memory_total, "  available": lambda facts: facts.memory_available},
)
