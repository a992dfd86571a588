"""Reads processes of others from /proc: descendants, memory, context switches, processor time."""

import ctypes
import os
import re
import signal
import subprocess
import time

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def adopt_orphans(wanted: bool = True) -> None:
    """Become the parent of every descendant that loses its own, so that none escapes our wait; or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Every process below ``root``, parents first, without zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def describe(pid: int) -> str:
    """The start of a process's command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()[:80] or f"pid {pid}"
    except OSError:
        return f"pid {pid}"


def kill_all_below(root: int) -> None:
    """SIGKILL until nothing is left below ``root``, for ten seconds at most."""
    deadline = time.monotonic() + 10
    while (left := descendants(root)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                return
        time.sleep(0.005)


def proportional_memory(pids: list[int]) -> float:
    """MB of all ``pids`` together, a page that N processes share counted 1/N in each (PSS, proc(5), smaps_rollup)."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):  # it has just ended
            continue
    return total * 1024 / 1e6


def resident_memory(pid: int) -> float:
    """MB of a process that are in memory, shared ones in full (VmRSS)."""
    return _status(f"/proc/{pid}/status", "VmRSS") * 1024 / 1e6


def switches(pid: int) -> int:
    """How often the threads of a process went to sleep or were interrupted (context switches of both kinds)."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        path = f"/proc/{pid}/task/{thread}/status"
        total += _status(path, "voluntary_ctxt_switches") + _status(path, "nonvoluntary_ctxt_switches")
    return total


def processor_ms(pid: int) -> float:
    """Milliseconds that the threads of a process have run; from the scheduler's nanoseconds, not from ticks."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e6


def _status(path: str, name: str) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


def peak_memory(pid: int) -> float:
    """MB of a process that were in memory at most (VmHWM)."""
    return _status(f"/proc/{pid}/status", "VmHWM") * 1024 / 1e6


def listens(port: int) -> bool:
    """Whether anybody listens on a TCP port of this machine."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as file:
                if any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in file):
                    return True
        except OSError:  # no IPv6
            continue
    return False


def traffic(port: int) -> tuple[int, int]:
    """Bytes sent and received on all open connections that ``port`` of this machine has accepted; asks ss."""
    command = ["ss", "-tinH", "state", "established", "sport", "=", f":{port}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sent, received = (
        sum(map(int, re.findall(rf"\b{name}:(\d+)", output))) for name in ("bytes_sent", "bytes_received")
    )
    return sent, received
