"""Linux process control: parent-death signal, subreaper, pidfds, signalfd, the process tree, killing descendants.

Zygotes load this file by its path, so it is bound by the rules of ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

FORWARDED_SIGNALS = frozenset(
    {
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGXCPU),
        *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
    }
)
"""Signals whose meaning a program may define. The others end it, or report an error of its own."""

Usage = tuple[int, float, float]
"""Resource usage of an ended process and the children it waited for (getrusage(2)): peak memory in bytes (the maximum
of them), user and system CPU time in seconds."""

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # PR_SET_…, prctl(2)
_GET_PDEATHSIG = 2
_PTRACE_CONT = 7  # ptrace(2)
KILL_TIMEOUT_S = 5.0  # after SIGKILL, processes that remain (mostly in state D) are reported and no longer waited for
CLEANER_TIMEOUT_S = 4.0  # for those that remove the shared memory of killed processes: milliseconds, if it is not busy


def _ctypes() -> Any:
    import ctypes  # here, because a start may not need it

    return ctypes


def _prctl(option: int, value: int) -> None:
    ctypes = _ctypes()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def check_prctl() -> None:
    """Raise OSError where prctl(2) is forbidden; changes nothing."""
    c = _ctypes()
    number = c.c_int()
    _prctl(_GET_PDEATHSIG, c.addressof(number))
    _prctl(_PDEATHSIG, number.value)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Set this process's parent-death signal (PR_SET_PDEATHSIG); 0 clears it. Only on Linux.

    The kernel sends it when the thread that forked this process ends. The setting survives exec, children do not get it
    (prctl(2)). A parent that is already dead is not noticed: compare ``os.getppid()`` afterwards. Has no effect where
    the call is forbidden: no rank starts there (``check_prctl``).
    """
    if sys.platform == "linux":
        with suppress(OSError):
            _prctl(_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (PR_SET_CHILD_SUBREAPER). Only on Linux."""
    if sys.platform == "linux":
        _prctl(_CHILD_SUBREAPER, 1)


def set_process_title(title: str) -> None:
    """Set the command line that ``ps`` shows by overwriting the argument area, as setproctitle does (proc(5), cmdline).

    The launcher has padded this process's command line to make room. If the last byte is not NUL, the kernel shows the
    text up to the first NUL.
    """
    try:
        fields = read_stat("self")
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
        room = end - start - 2
        text = title.encode(errors="replace")[:room]
        import ctypes

        ctypes.memmove(start, text + b"\0" * (end - start - 1 - len(text)) + b" ", end - start)
    except Exception:
        pass  # the title is optional


def read_proc_file(pid: int | str, name: str) -> bytes:
    """Read a file of a process in /proc; b"" if the process is gone or there is no such file."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_stat(pid: int | str) -> list[bytes]:
    """Read the fields of a process after its name, the state first (proc_pid_stat(5)); [] if it is gone."""
    return read_proc_file(pid, "stat").rpartition(b")")[2].split()


def list_children(pid: int | None = None) -> list[int]:
    """Return the pids of the children of a process's main thread, by default ours; empty if the system has no list."""
    pid = os.getpid() if pid is None else pid
    return [int(child) for child in read_proc_file(pid, f"task/{pid}/children").split()]


def list_descendants(root: int, *, is_excluded: Callable[[int], bool] | None = None) -> list[int]:
    """Return the pids of all descendants of ``root``, parents before children, without zombies.

    Children for which ``is_excluded`` is true are omitted, with their descendants. A process adopted by a subreaper is
    its child. Empty if the system does not provide the process tree.
    """
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        try:  # not Linux: there are no processes to exclude
            import psutil

            return [child.pid for child in psutil.Process(root).children(recursive=True)]
        except Exception:
            return []
    dead = set[int]()
    below: dict[int, list[int]] = {}
    for pid in pids:
        state, parent = read_state(pid)
        if state in "ZX":
            dead.add(pid)
        below.setdefault(parent, []).append(pid)
    descendants, todo = [], deque(pid for pid in below.get(root, []) if is_excluded is None or not is_excluded(pid))
    while todo:
        pid = todo.popleft()
        if pid not in dead:
            descendants.append(pid)
        todo.extend(below.get(pid, []))
    return descendants


def read_state(pid: int) -> tuple[str, int]:
    """Return the state and parent of a process; ("X", 0) if it is gone."""
    return _read_process_state(pid)[:2]


def start_ticks(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; -1 if it has ended, reaped or not."""
    state, _, ticks = _read_process_state(pid)
    return -1 if state in "ZX" else ticks


def is_suspended(pid: int) -> bool:
    """Whether a signal has stopped this process: Ctrl-Z in its terminal, or SIGSTOP."""
    return _read_process_state(pid)[0] == "T"


def _read_process_state(pid: int) -> tuple[str, int, int]:
    """Return the state, parent and start time of a process; ("X", 0, -1) if it is gone.

    A process whose main thread has ended counts as running while it has other threads: the kernel shows it as a zombie,
    but it is not dead and cannot be reaped.
    """
    if not (fields := read_stat(pid)):
        return "X", 0, -1
    state = "R" if fields[0] == b"Z" and int(fields[17]) > 1 else fields[0].decode()
    return state, int(fields[1]), int(fields[19])


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd of a process; None if it is gone or pidfds are unavailable.

    Linux has pidfds since 5.3, Python only if built with such headers. Old container runtimes forbid them (EPERM).
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def wait_for_end(pid: int, timeout_s: float | None) -> bool:
    """Wait for the end of a process, at most ``timeout_s`` (None: no limit); return whether it has ended."""
    if (pidfd := open_pidfd(pid)) is not None:
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
        finally:
            os.close(pidfd)
    ticks, delay_s = start_ticks(pid), 0.001
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while ticks >= 0 and start_ticks(pid) == ticks:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(delay_s)
        delay_s = min(delay_s * 2, 0.05)
    return True


def describe_process(pid: int) -> str:
    """Describe a process for the user: "python3 (pid 4711)", with its wait channel if it is in state D."""
    if not (name := read_proc_file(pid, "comm").decode(errors="replace").strip()):
        return f"pid {pid}"
    if read_state(pid)[0] != "D":
        return f"{name} (pid {pid})"
    waits = read_proc_file(pid, "wchan").decode().strip("0") or "the kernel"
    return f"{name} (pid {pid}, in uninterruptible sleep in {waits})"


def is_multiprocessing_helper(pid: int) -> bool:
    """Whether a process is multiprocessing's forkserver or resource tracker (by its command line), or has ended."""
    words = read_proc_file(pid, "cmdline")  # also empty once the main thread has ended
    names = (b"forkserver", b"resource_tracker")
    return start_ticks(pid) < 0 or any(b"from multiprocessing.%s import main" % name in words for name in names)


def removes_shared_memory(pid: int) -> bool:
    """Whether a process removes the shared memory of other processes after they have ended.

    That is the resource tracker of multiprocessing, and torch's manager of shared files.
    """
    words = read_proc_file(pid, "cmdline")
    return b"from multiprocessing.resource_tracker import main" in words or b"torch_shm_manager" in words


def catches_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal; False if unknown."""
    with suppress(OSError, ValueError):
        return contains_signal(read_signal_sets(pid, b"SigCgt")[0], number)
    return False


def blocks_forwarded_signals(pid: int) -> bool:
    """Whether the main thread of a process blocks all of ``FORWARDED_SIGNALS``; False if unknown."""
    with suppress(OSError, ValueError):
        blocked = read_signal_sets(pid, b"SigBlk")[0]
        return all(contains_signal(blocked, number) for number in FORWARDED_SIGNALS)
    return False


def read_signal_sets(pid: int, *names: bytes) -> list[int]:
    """Read signal sets of a process as bit masks (proc_pid_status(5)); fast, for many ranks.
    Raises OSError if the process is gone, and ValueError if the kernel does not have them.
    """
    with open(f"/proc/{pid}/status", "rb", 0) as file:
        status = file.read()
    starts = [status.index(name) + len(name) + 1 for name in names]
    return [int(status[start : status.index(b"\n", start)], 16) for start in starts]


def contains_signal(signals: int, number: int) -> bool:
    """Whether a signal is in a signal set, which is a bit mask as in /proc/PID/status."""
    return bool(signals >> (number - 1) & 1)


_SIGNALFD_FLAGS = 0o4000 | 0o2000000  # SFD_NONBLOCK | SFD_CLOEXEC
_SIGNALFD_SIGINFO = struct.Struct("IiiI112x")  # signalfd(2): number, errno, code, pid of the sender


def open_wakeup_pipe() -> tuple[int, int]:
    """Open a pipe to which Python writes the number of each handled signal; return its two ends."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    return ends


def on_signal_noop(number: int, frame: object) -> None:
    """A signal handler that does nothing: the wakeup pipe gets the signal."""


def open_signalfd(numbers: Iterable[int]) -> int | None:
    """Return a signalfd for these signals, which must be blocked; None if the system has no signalfd."""
    ctypes = _ctypes()
    mask = (ctypes.c_uint64 * 16)()  # sigset_t
    for number in numbers:
        mask[0] |= 1 << (number - 1)
    try:
        fd: int = ctypes.CDLL(None).signalfd(-1, mask, _SIGNALFD_FLAGS)
    except AttributeError:
        return None
    return fd if fd >= 0 else None


def read_signalfd(fd: int) -> list[tuple[int, int]]:
    """Return the pending signals, each with the pid of its sender, 0 if the kernel sent it."""
    try:
        data = os.read(fd, 64 * _SIGNALFD_SIGINFO.size)
    except BlockingIOError:
        return []
    return [(number, pid if code <= 0 else 0) for number, _, code, pid in _SIGNALFD_SIGINFO.iter_unpack(data)]


def send_signal(pid: int, number: int, pidfd: int | None = None) -> None:
    """Send a signal; a process that is gone, or that may not be signalled, is ignored.

    With ``pidfd`` the signal cannot reach another process that has got the pid meanwhile.
    """
    try:
        if pidfd is not None:
            try:
                return signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                return
            except (AttributeError, OSError):  # as in ``open_pidfd``: a system may have one call without the other
                pass
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def reap_children() -> list[tuple[int, int, Usage]]:
    """Reap every child that has ended, adopted ones included: pid, wait status and usage of each, in no order."""
    ctypes = _ctypes()  # os.wait4 would import ``resource``, and could find a user's module of that name
    libc, status, usage = ctypes.CDLL(None), ctypes.c_int(), (ctypes.c_long * 64)()  # struct rusage, with spare room
    ended: list[tuple[int, int, Usage]] = []
    while (pid := libc.wait4(-1, ctypes.byref(status), os.WNOHANG, usage)) > 0:
        if os.WIFSTOPPED(status.value):  # it has called PTRACE_TRACEME, and stops at each signal for its parent
            number = os.WSTOPSIG(status.value)
            libc.ptrace(_PTRACE_CONT, pid, None, ctypes.c_ulong(0 if number == signal.SIGTRAP else number))
            continue
        peak = usage[4] if sys.platform == "darwin" else usage[4] << 10  # ru_maxrss
        ended.append((pid, status.value, (peak, usage[0] + usage[1] / 1e6, usage[2] + usage[3] / 1e6)))
    return ended


def kill_descendants(
    root: int, *, is_excluded: Callable[[int], bool] | None = None
) -> tuple[list[str], list[tuple[int, int, Usage]]]:
    """Send SIGKILL to all descendants of ``root``, the caller, until none is left, even if they fork meanwhile.

    Waits at most KILL_TIMEOUT_S. Returns descriptions of the processes that remain, and the reaped children. Children
    for which ``is_excluded`` is true are left alone, with their descendants. Processes that
    remove shared memory are killed only after CLEANER_TIMEOUT_S, because nobody else removes it.
    """
    deadline, cleaners_until = (time.monotonic() + timeout_s for timeout_s in (KILL_TIMEOUT_S, CLEANER_TIMEOUT_S))
    ended: list[tuple[int, int, Usage]] = []
    delay_s = 0.001
    while True:
        left = list_descendants(root, is_excluded=is_excluded)
        spares_cleaners = time.monotonic() < cleaners_until
        for pid in left:
            if not (spares_cleaners and removes_shared_memory(pid)):
                send_signal(pid, signal.SIGKILL)
        ended += reap_children()
        if not left:
            return [], ended
        if time.monotonic() > deadline:
            return [describe_process(pid) for pid in left], ended
        time.sleep(delay_s)  # a killed process needs a moment to end; for one that is not our child there is no event
        delay_s = min(delay_s * 2, 0.05)
