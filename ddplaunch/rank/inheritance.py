"""What a process hands on to its forks beside memory and variables: rights, limits, scheduling, namespaces, folders.

A launcher and a warm zygote both describe themselves, and only where the two agree does the one fork for the other.
Landlock's rules are missing: the kernel shows them to nobody.
"""

from __future__ import annotations

import os

# fmt: off
_STATUS_FIELDS = frozenset((
    "Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp",
    "Seccomp_filters", "SigIgn", "Speculation_Store_Bypass", "SpeculationIndirectBranch", "Cpus_allowed",
    "Mems_allowed", "THP_enabled",
))
# fmt: on
"""What counts of /proc/self/status (proc_pid_status(5))."""

_PROC_FILES = (
    *("cgroup", "limits", "attr/current", "oom_score_adj", "timerslack_ns", "personality", "coredump_filter"),
    *("loginuid", "sessionid"),
)

_LIBC_SIGNALS = 3 << 31  # SIGCANCEL and SIGSETXID, which posix_spawn leaves ignored and nobody else can use

_SYSCALLS = {"x86_64": (252, 250, 239), "aarch64": (31, 219, 236)}  # ioprio_get, keyctl, get_mempolicy
_SECUREBITS, _MDWE = 27, 66  # PR_GET_…, prctl(2)
_MAX_NODES = 1024  # NUMA nodes, bits of the mask that get_mempolicy(2) fills


def read_inherited_state() -> dict[str, str]:
    """Describe this process, by name; the words mean nothing beyond being equal.

    Raises:
        OSError: it cannot be told (no /proc, a folder that is gone).
        KeyError: not on this kind of machine.
    """
    found = {f"file {name}": _read_proc(name) for name in _PROC_FILES}
    with open("/proc/self/status", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in _STATUS_FIELDS:
                found[name] = value.strip()
    found["SigIgn"] = f"{int(found['SigIgn'], 16) & ~_LIBC_SIGNALS:016x}"
    for name in sorted(os.listdir("/proc/self/ns")):
        found[f"namespace {name}"] = os.readlink(f"/proc/self/ns/{name}")
    for name, path in (("root", "/"), ("cwd", ".")):
        folder = os.stat(path)
        found[name] = f"{folder.st_dev} {folder.st_ino}"
    found["folder"] = os.getcwd()
    found["host"] = os.uname().nodename
    found["scheduling"] = f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}"
    found["nice"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["affinity"] = str(sorted(os.sched_getaffinity(0)))
    return {**found, **_read_syscalls()}


def _read_proc(name: str) -> str:
    try:
        with open(f"/proc/self/{name}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:  # not every kernel has all of them
        return f"error {error.errno}"


def _read_syscalls() -> dict[str, str]:
    import ctypes

    ioprio, keyctl, mempolicy = _SYSCALLS[os.uname().machine]
    libc = ctypes.CDLL(None)
    zero, mode, nodes = ctypes.c_ulong(0), ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // 64))()
    policy = libc.syscall(mempolicy, ctypes.byref(mode), nodes, ctypes.c_ulong(_MAX_NODES), zero, zero)
    return {
        "ioprio": str(libc.syscall(ioprio, 1, 0)),  # IOPRIO_WHO_PROCESS, ourselves
        "keyring": str(libc.syscall(keyctl, 0, -3, 0)),  # KEYCTL_GET_KEYRING_ID of the session's
        "memory policy": f"{policy} {mode.value} {list(nodes)}",
        "securebits": str(libc.prctl(_SECUREBITS, zero, zero, zero, zero)),
        "write or execute": str(libc.prctl(_MDWE, zero, zero, zero, zero)),
    }
