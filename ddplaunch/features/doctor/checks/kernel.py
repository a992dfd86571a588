"""Check of memory, CPUs, load, resource limits and InfiniBand, as the kernel reports them."""

from __future__ import annotations

import os
import resource

from ddplaunch.base.safe_files import list_dir
from ddplaunch.base.text import format_size
from ddplaunch.features.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.features.doctor.node_facts import NodeFacts, ProcessLimits
from ddplaunch.system.devices.cgroups import apply_memory_limits, list_cgroup_dirs
from ddplaunch.system.devices.cpu import read_cpu
from ddplaunch.system.devices.sysfs import read_int
from ddplaunch.system.processes.process_limits import ResourceLimitError, check_proc

MIN_MEMORY_BYTES = 2 << 30
MIN_OPEN_FILES = 1024
MIN_PROCESSES = 1024


def _read(_: CheckContext) -> FactReader:
    fields = _read_facts()  # read now: the later load is the doctor's own
    return lambda: fields


def _read_facts() -> dict[str, object]:
    cpu = read_cpu("/sys")
    total, available = apply_memory_limits(cpu.memory_total, cpu.memory_available)
    return {
        "kernel": os.uname().release,
        "limits": _read_limits(),
        "memory_total": total,
        "memory_available": available,
        "cpus": len(cpu.allowed),
        "quota": cpu.quota,
        "load": os.getloadavg()[0],
        "infiniband": tuple(list_dir("/sys/class/infiniband")),
        "cannot_start": _find_process_limit(),
    }


def _find_process_limit() -> tuple[str, str] | None:
    try:
        check_proc()
    except ResourceLimitError as error:
        return (error.message, error.hint or "")
    return None


def _read_limits() -> ProcessLimits:
    def read_soft_limit(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    left: list[int] = []
    for folder in list_cgroup_dirs("pids"):
        limit, used = read_int(f"{folder}/pids.max"), read_int(f"{folder}/pids.current")
        if limit is not None and used is not None:
            left.append(limit - used)
    return ProcessLimits(
        memlock=read_soft_limit(resource.RLIMIT_MEMLOCK),
        open_files=read_soft_limit(resource.RLIMIT_NOFILE),
        processes=read_soft_limit(resource.RLIMIT_NPROC) if os.geteuid() else None,
        processes_left=min(left, default=None),
    )


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    if facts.cannot_start:
        what, remedy = facts.cannot_start
        yield Finding(Severity.ERROR, name, what, remedy)
    for rule in (_check_limits, _check_memory, _check_cpu_quota):
        yield from rule(name, facts)


def _check_limits(name: str, facts: NodeFacts) -> Findings:
    limits = facts.limits
    if facts.infiniband and limits.memlock is not None:
        text = f"at most {format_size(limits.memlock)} of memory can be locked (ulimit -l); InfiniBand needs unlimited"
        hint = "memlock unlimited in limits.conf, or docker run --ulimit memlock=-1"
        yield Finding(Severity.WARNING, name, text, hint)
    if limits.open_files is not None and limits.open_files < MIN_OPEN_FILES:
        text = f"a process may have {limits.open_files} open files (ulimit -n); DataLoader workers use many"
        yield Finding(Severity.WARNING, name, text, f"ulimit -n {64 * MIN_OPEN_FILES}")
    for count, what, remedy in (
        (limits.processes, "this user may have {} processes and threads (ulimit -u)", "ulimit -u unlimited"),
        (limits.processes_left, "the control group allows {} more processes and threads (pids.max)", "raise pids.max"),
    ):
        if count is not None and count < MIN_PROCESSES:
            text = f"{what.format(count)}; each rank has dozens of threads"
            yield Finding(Severity.WARNING, name, text, remedy)


def _check_memory(name: str, facts: NodeFacts) -> Findings:
    if facts.memory_available is not None and facts.memory_available < MIN_MEMORY_BYTES:
        text = f"{format_size(facts.memory_available)} of memory is available of {format_size(facts.memory_total or 0)}"
        yield Finding(Severity.WARNING, name, text, "end other processes, or request more memory")


def _check_cpu_quota(name: str, facts: NodeFacts) -> Findings:
    if facts.quota is not None and facts.quota < facts.cpus:
        text = f"the control group limits CPU time to {facts.quota:g} of {facts.cpus} CPUs"
        severity = Severity.WARNING if facts.quota < max(1, len(facts.gpus)) else Severity.NOTE
        yield Finding(severity, name, text, "raise the quota: docker run --cpus, resources.limits.cpu")
    if is_overloaded(facts):
        text = f"busy: {facts.load:.0f} runnable processes on {facts.cpus} CPUs"
        yield Finding(Severity.WARNING, name, text, "check with `top` what else runs there")


def is_overloaded(facts: NodeFacts) -> bool:
    """Whether there are more runnable processes than CPUs."""
    return facts.load > 1.5 * facts.cpus + 1


def is_cpu_time_short(facts: NodeFacts) -> bool:
    """Whether the machine is overloaded or its CPU quota is small; both explain slow measurements."""
    return is_overloaded(facts) or (facts.quota is not None and facts.quota < min(facts.cpus, max(1, len(facts.gpus))))


def _cpus_row(facts: NodeFacts) -> str:
    return f"{facts.cpus}" if facts.quota is None else f"{facts.cpus}, limited to the time of {facts.quota:g}"


def _limits_row(facts: NodeFacts) -> str:
    def format_limit(value: int | None) -> str:
        return "unlimited" if value is None else str(value)

    limits, lock = facts.limits, facts.limits.memlock
    locked = "unlimited" if lock is None else format_size(lock)
    files, processes = format_limit(limits.open_files), format_limit(limits.processes)
    return f"open files {files}, processes {processes}, locked memory {locked}"


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
