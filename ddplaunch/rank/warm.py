"""A warm zygote: it has imported what several runs need, stays between them, and forks a zygote for each.

It has no parent that waits for it and holds nothing of a launcher's. It leaves by itself: when its time is over, at the
end of the session that it was started from, when memory gets short, and when anything that it was made from has
changed. Each run gets a guardian, forked from here, and that forks the run's zygote, which serves as any other does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from ddplaunch.rank import channel, guardian, inheritance, leftovers, origins, processes
    from ddplaunch.rank.messages import ToWarm, WarmEndpoint, WarmOrder, WarmStatus, ZygoteConfig

    Born = tuple[socket.socket, ZygoteConfig]
    """What a run's zygote is to serve."""

_REQUEST_TIMEOUT_S = 1.0  # seconds for whoever has connected to say what they want
_MAX_REQUEST, _MAX_ORDER = 1 << 12, 1 << 26  # bytes
_LEADER_INTERVAL_MS = 1000.0  # between two looks at the session's leader where the kernel has no pidfds
_MIN_FREE_MEMORY = 0.1  # of all memory: with less of it available nothing is kept
_PRESSURE_TRIGGER = (
    b"some 150000 2000000\0"  # 0.15 of 2 s lost for want of memory: a trigger that any user may have (psi.rst)
)
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # what logging out sends
_UCRED = struct.Struct("iII")  # of SO_PEERCRED: pid, uid, gid
_F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC = 3, 4, 1030  # fcntl(2); the module of that name might be the user's


def load_modules(load_module: Callable[[str], Any]) -> None:
    """Load the files beside this one that it needs, as ``worker.sibling`` does."""
    for name in ("channel", "guardian", "inheritance", "origins", "processes"):
        globals()[name] = load_module(name)


class WarmZygoteServer:
    """One warm zygote, from before its imports to its end."""

    def __init__(
        self,
        config: ZygoteConfig,
        endpoint: WarmEndpoint,
        first: socket.socket,
        ignored_signals: Sequence[int],
        worker: Any,
    ) -> None:
        """``first`` is where the first run waits; ``ignored_signals`` are the signals that are for launchers to hear."""
        self.path, self.seconds, self.modules = endpoint["path"], endpoint["seconds"], config["modules"]
        self.first, self.deaf = first, ignored_signals
        self.inherited = inheritance.read_inherited_state()
        ours = sum(1 << (number - 1) for number in config["shielded"])  # as we ignore them already
        self.inherited["SigIgn"] = f"{int(self.inherited['SigIgn'], 16) & ~ours:016x}"
        self.before = dict(os.environ)
        self.listening = socket.socket(fileno=endpoint["listening"])
        self.listening.setblocking(False)
        self.leader, self.leader_pidfd, self.reserved = (
            endpoint["leader"],
            endpoint["leader_pidfd"],
            endpoint["reserved"],
        )
        for fd in (self.first.fileno(), self.listening.fileno(), self.leader_pidfd):
            if fd is not None:
                os.set_inheritable(fd, False)
        self.socket_file = _file_identity(self.path)
        self.origins = origins.FileDependencies(worker)
        self.guardians: dict[int, socket.socket] = {}  # pid to what tells the launcher that all of a run is gone
        self.fingerprint: dict[str, str] | None = None  # of the first run
        self.captured_output = {1: b"", 2: b""}
        self.is_ending = False
        self.runs_served = 0
        self.began = time.time()

    def serve(self, fit: bool, shadowed: Callable[..., str | None], left: leftovers.AtexitCleanup) -> Born:
        """Serve runs until the end; return only in forks, each of which is to be a run's zygote.

        ``fit``: other runs than the first can use this process too. ``shadowed`` names a file in a run's folder that
        has the name of a module which is loaded.
        """
        self.shadowed, self.left = shadowed, left
        after = dict(os.environ)
        self.written = {name: value for name, value in after.items() if self.before.get(name) != value}
        self.unset = [name for name in self.before if name not in after]
        changed = self.origins.record(os.path.dirname(os.path.abspath(__file__)))
        self.woken, self.wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.handlers = {number: signal.signal(number, _on_signal_noop) for number in (signal.SIGCHLD, *self.deaf)}
        self.pressure = _watch_pressure()
        self.poll = select.poll()
        self.poll.register(self.woken, select.POLLIN)
        self.poll.register(self.listening, select.POLLIN)
        if self.leader_pidfd is not None:
            self.poll.register(self.leader_pidfd, select.POLLIN)
        if self.pressure is not None:
            self.poll.register(self.pressure, select.POLLPRI)
        self.idle_since = time.monotonic()
        _clear_death_signal(self.first)
        if not fit or changed or self.capture_output():
            self.stop_accepting()
        born = self.handle_request(self.first)
        if born is None and not self.runs_served:  # whom it was made for has gone
            self.stop_accepting()
        while born is None:
            if not self.guardians and (self.is_ending or self.seconds_left() <= 0):
                self.exit()
            wait = None if self.guardians else self.seconds_left() * 1000 + 1
            if self.leader_pidfd is None and not self.is_ending:
                wait = min(wait or _LEADER_INTERVAL_MS, _LEADER_INTERVAL_MS)
            ready = {fd for fd, _ in self.poll.poll(wait)}
            if self.woken in ready:
                self.reap()
            if self.leader_pidfd is None and processes.start_ticks(self.leader[0]) != self.leader[1]:
                self.stop_accepting()
            if not ready.isdisjoint((self.leader_pidfd, self.pressure)):
                self.stop_accepting()
            if not self.is_ending and self.listening.fileno() in ready:
                born = self.accept()
        return born

    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.idle_since)

    def reap(self) -> None:
        try:
            if not set(_END_SIGNALS).isdisjoint(os.read(self.woken, 4096)):
                self.stop_accepting()
        except BlockingIOError:
            pass
        ended = processes.reap_children()
        while ended:
            pid, status, _ = ended.pop()
            if line := self.guardians.pop(pid, None):
                if status:  # it was killed, and what it guarded is ours now
                    ended += processes.kill_descendants(os.getpid(), is_excluded=self.guardians.__contains__)[1]
                line.close()
                self.idle_since = time.monotonic()

    def accept(self) -> Born | None:
        try:
            return self.handle_request(self.listening.accept()[0])
        except OSError:  # whoever it was has gone
            return None

    def handle_request(self, asking: socket.socket) -> Born | None:
        """Do what somebody asks for; where that is a run, return in its zygote what this is to serve."""
        asking.settimeout(_REQUEST_TIMEOUT_S)
        self.asking = asking
        fds: list[int] = []
        try:
            if _UCRED.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1] != os.geteuid():
                return None
            data, fds, _, _ = socket.recv_fds(asking, _MAX_REQUEST, channel.MAX_DESCRIPTORS)  # it comes in one piece
            request: ToWarm = json.loads(data[channel.HEADER.size :])
            if request["op"] == "run":
                return self.fork_run(fds)
            if request["op"] == "stop":
                self.stop_accepting()
            channel.send_message(asking, self.build_status())
        except Exception:  # it has gone, or makes no sense
            pass
        finally:
            asking.close()
            for fd in fds:
                os.close(fd)
        return None

    def build_status(self) -> WarmStatus:
        return {
            "op": "looked",
            "pid": os.getpid(),
            "began": self.began,
            "left": None if self.guardians else max(0.0, self.seconds_left()),
            "running": len(self.guardians),
            "served": self.runs_served,
            "modules": self.modules,
            "folder": self.inherited["folder"],
            "ending": self.is_ending,
        }

    def fork_run(self, fds: list[int]) -> Born | None:
        """Fork the guardian of a run, from that its zygote, and return in the zygote."""
        body, _, telling = fds
        order: WarmOrder = json.loads(os.pread(body, _MAX_ORDER, 0))  # which no pipe or terminal can make us wait for
        first = self.fingerprint is None
        self.fingerprint = self.fingerprint or order["fingerprint"]
        why = self.why_not_usable(order)
        line = socket.socket(fileno=telling)
        fds.remove(telling)
        line.settimeout(_REQUEST_TIMEOUT_S)
        if why and not first:
            channel.send_message(line, {"op": "declined", "reason": why})
            line.close()
            return None
        if why:
            self.stop_accepting()
        signal.pthread_sigmask(signal.SIG_BLOCK, self.deaf)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.deaf)
            raise  # as if we had not answered
        if pid == 0:
            return self.run_guardian(order, line, fds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.deaf)
        self.guardians[pid] = line
        self.runs_served += 1
        return None

    def why_not_usable(self, order: WarmOrder) -> str | None:
        """Say why a run cannot be forked from here; where that is not the run's doing, keep nothing any longer."""
        if order["fingerprint"] != self.fingerprint:
            return "another run's warm zygote answered"
        if shadow := self.shadowed(order["config"]["first"], *order["config"]["folders"]):
            return f"{shadow} has the name of a module that is imported already"
        try:
            now = {**inheritance.read_inherited_state(), "SigIgn": self.inherited["SigIgn"]}
        except OSError as error:
            now = {"folder": error.strerror or ""}
        differs = sorted(name for name, value in now.items() if self.fingerprint.get(f"inherited {name}") != value)
        what = ", ".join(differs) or self.origins.find_changed()
        why = f"what the warm zygote was made from has changed: {what}" if what else None
        if why is None and _is_memory_low():
            why = "memory is short"
        if why:
            self.stop_accepting()
        return why

    def run_guardian(self, order: WarmOrder, line: socket.socket, fds: list[int]) -> Born:
        """In the fork: be the guardian, and return in the zygote that it forks."""
        try:
            signal.set_wakeup_fd(-1)
            for each in (self.listening, *self.guardians.values()):
                each.close()
            for fd in (self.woken, self.wake, self.leader_pidfd, self.pressure):
                if fd is not None:
                    os.close(fd)
            os.setsid()
            processes.adopt_orphans()
            guarding = os.getpid()
            processes.set_process_title("ddplaunch: guardian of a run")
            zygote = os.fork()
            if zygote:
                self.asking.close()
                for fd in fds:
                    os.close(fd)
                for number in (1, 2):
                    os.dup2(0, number)
                guardian.run_guardian(line, zygote, channel, processes)
            line.close()
            os.setsid()
            processes.set_process_title(f"{sys.executable} {os.path.join(os.path.dirname(__file__), 'zygote.py')}")
            processes.die_with_parent(signal.SIGKILL)
            if os.getppid() != guarding:
                os._exit(1)
            processes.adopt_orphans()
            self.asking.close()
            for number, handler in self.handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            control = self.adopt_fds(socket.socket(fileno=fds.pop()), order["descriptors"])
            os.close(fds.pop())
            for number, text in self.captured_output.items():
                _write_all(number, text)
            os.environ.clear()
            os.environ.update(order["environment"])
            os.environ.update(self.written)
            for name in self.unset:
                os.environ.pop(name, None)
            return control, {**order["config"], "supervisor": guarding, "guarded": True}
        except BaseException:
            os._exit(1)

    def adopt_fds(self, control: socket.socket, numbers: list[int]) -> socket.socket:
        """In a run's zygote: have the launcher's descriptors at their ``numbers``; return the control socket anew."""
        if self.runs_served:  # the first launcher's are there: we could not have outlived it
            pidfd = processes.open_pidfd(os.getpid())
            channel.send_message(control, {"op": "take", "pid": os.getpid()}, [] if pidfd is None else [pidfd])
            if pidfd is not None:
                os.close(pidfd)
        fds = [os.dup(control.fileno()), *channel.receive_message(control)[1]]
        control.close()
        high = max(numbers) + 1  # out of the way of them all
        moved, *given = (_duplicate_fd(fd, high) for fd in fds)
        for fd in (*fds, *self.reserved):
            os.close(fd)
        if any(map(_is_open, numbers[3:])):  # a module that we have imported keeps a file open there
            os._exit(1)
        for fd, number in zip(given, numbers, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        return socket.socket(fileno=moved)

    def capture_output(self) -> bool:
        """Whether the imports have printed something, which is to come once, and kept for the first run to show."""
        import ctypes

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        ctypes.CDLL(None).fflush(None)
        for number in self.captured_output:
            self.captured_output[number] = os.pread(number, os.fstat(number).st_size, 0)
        return any(self.captured_output.values())

    def stop_accepting(self) -> None:
        """Take no more runs, and leave after those that there are."""
        if self.is_ending:
            return
        self.is_ending = True
        for fd in (self.listening.fileno(), self.leader_pidfd, self.pressure):
            if fd is not None:
                self.poll.unregister(fd)
        self.listening.close()
        if self.socket_file is not None and _file_identity(self.path) == self.socket_file:
            os.unlink(self.path)
            try:
                os.rmdir(os.path.dirname(self.path))
            except OSError:  # others are there
                pass

    def exit(self) -> NoReturn:
        self.stop_accepting()
        self.left.run()
        os._exit(0)


def _on_signal_noop(number: int, frame: object) -> None:
    """Hear a signal, for the pipe that wakes us."""


def _clear_death_signal(peer: socket.socket) -> None:
    """Until now the kernel would have killed us when the other end of ``peer`` closed: nobody listens at an import."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.fcntl(peer.fileno(), _F_SETFL, libc.fcntl(peer.fileno(), _F_GETFL) & ~os.O_ASYNC)


def _duplicate_fd(fd: int, least: int) -> int:
    import ctypes

    copy: int = ctypes.CDLL(None).fcntl(fd, _F_DUPFD_CLOEXEC, least)
    if copy < 0:
        raise OSError
    return copy


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _file_identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _watch_pressure() -> int | None:
    """A descriptor that is ready when memory gets short; None where the kernel gives none."""
    try:
        fd = os.open("/proc/pressure/memory", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.write(fd, _PRESSURE_TRIGGER)
    except OSError:
        os.close(fd)
        return None
    return fd


def _is_memory_low() -> bool:
    found: dict[str, int] = {}
    with open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0])
    return found["MemAvailable"] < _MIN_FREE_MEMORY * found["MemTotal"]


def _write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]
