"""The state a process passes on to its forks: credentials, limits, scheduling, namespaces, folders.

The launcher and the warm zygote each describe themselves; the zygote serves a run only if both descriptions are equal.
Landlock rules are missing: the kernel does not expose them.
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
"""The inherited fields of /proc/self/status (proc_pid_status(5))."""

_PROC_FILES = (
    *("cgroup", "limits", "attr/current", "oom_score_adj", "timerslack_ns", "personality", "coredump_filter"),
    *("loginuid", "sessionid"),
)

_LIBC_SIGNALS = 3 << 31  # SIGCANCEL and SIGSETXID, which posix_spawn leaves ignored and programs cannot use

_SYSCALLS = {"x86_64": (252, 250, 239), "aarch64": (31, 219, 236)}  # ioprio_get, keyctl, get_mempolicy
_SECUREBITS, _MDWE = 27, 66  # PR_GET_…, prctl(2)
_MAX_NODES = 1024  # NUMA nodes: bits of the mask of get_mempolicy(2)


def read_inherited_state() -> dict[str, str]:
    """Describe this process as names and opaque values, which are only compared for equality.

    Raises:
        OSError: the state cannot be read (no /proc, a deleted working folder).
        KeyError: unsupported CPU architecture.
    """
    state = {f"file {name}": _read_proc(name) for name in _PROC_FILES}
    with open("/proc/self/status", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in _STATUS_FIELDS:
                state[name] = value.strip()
    state["SigIgn"] = f"{int(state['SigIgn'], 16) & ~_LIBC_SIGNALS:016x}"
    for name in sorted(os.listdir("/proc/self/ns")):
        state[f"namespace {name}"] = os.readlink(f"/proc/self/ns/{name}")
    for name, path in (("root", "/"), ("cwd", ".")):
        folder = os.stat(path)
        state[name] = f"{folder.st_dev} {folder.st_ino}"
    state["folder"] = os.readlink("/proc/self/cwd")  # also of one that was removed
    state["host"] = os.uname().nodename
    state["scheduling"] = f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}"
    state["nice"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    state["affinity"] = str(sorted(os.sched_getaffinity(0)))
    return {**state, **_read_syscalls()}


def _read_proc(name: str) -> str:
    try:
        with open(f"/proc/self/{name}", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:  # some kernels lack some of these files
        return f"error {error.errno}"


def _read_syscalls() -> dict[str, str]:
    import ctypes

    ioprio, keyctl, mempolicy = _SYSCALLS[os.uname().machine]
    libc = ctypes.CDLL(None)
    zero, mode, nodes = ctypes.c_ulong(0), ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // 64))()
    policy = libc.syscall(mempolicy, ctypes.byref(mode), nodes, ctypes.c_ulong(_MAX_NODES), zero, zero)
    return {
        "ioprio": str(libc.syscall(ioprio, 1, 0)),  # IOPRIO_WHO_PROCESS, this process
        "keyring": str(libc.syscall(keyctl, 0, -3, 0)),  # KEYCTL_GET_KEYRING_ID of the session keyring
        "memory policy": f"{policy} {mode.value} {list(nodes)}",
        "securebits": str(libc.prctl(_SECUREBITS, zero, zero, zero, zero)),
        "write or execute": str(libc.prctl(_MDWE, zero, zero, zero, zero)),
    }
