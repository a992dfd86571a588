"""The warm zygote: keeps preloaded modules for later runs, and forks a zygote for each run.

It has no parent that waits for it, and holds no resource of a launcher. It exits by itself: after its lifetime without
a run, at the end of the login session that started it, when memory gets short, and when a file it was loaded from has
changed. For each run it forks a guardian, which forks the run's zygote.
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

    from ddplaunch.core.rank import atexit_cleanup, file_dependencies, import_recorder, zygote_channel
    from ddplaunch.core.rank.zygote_messages import ZygoteConfig
    from ddplaunch.features.warm.rank import guardian, inherited_state
    from ddplaunch.features.warm.rank.warm_messages import ToWarm, WarmEndpoint, WarmOrder, WarmStatus
    from ddplaunch.system.processes import proc_utils

    RunZygote = tuple[socket.socket, ZygoteConfig]
    """Control socket and configuration of a run's zygote."""

_REQUEST_TIMEOUT_S = 1.0  # for the request on a new connection
_MAX_REQUEST_BYTES, _MAX_ORDER_BYTES = 1 << 12, 1 << 26
_LEADER_INTERVAL_MS = 1000.0  # between two checks of the session leader, if the kernel has no pidfds
_MIN_FREE_MEMORY = 0.1  # fraction of all memory: with less available the warm zygote exits
_PRESSURE_TRIGGER = b"some 150000 2000000\0"  # tasks stalled for 0.15 of 2 s: allowed for any user (psi.rst)
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # sent at logout
_UCRED = struct.Struct("iII")  # of SO_PEERCRED: pid, uid, gid
_F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC = 3, 4, 1030  # fcntl(2); a user's file could shadow the module fcntl


def _load_modules(load_module: Callable[[str], Any]) -> None:
    """Load the modules that this file needs; ``load_module``: ``rank_runner.load_private_module``."""
    global atexit_cleanup, file_dependencies, guardian, inherited_state, proc_utils, zygote_channel
    atexit_cleanup = load_module("core/rank/atexit_cleanup")
    file_dependencies = load_module("core/rank/file_dependencies")
    guardian = load_module("features/warm/rank/guardian")
    inherited_state = load_module("features/warm/rank/inherited_state")
    proc_utils = load_module("system/processes/proc_utils")
    zygote_channel = load_module("core/rank/zygote_channel")


class WarmZygoteServer:
    """The server in a warm zygote: runs from before the zygote's imports until its end."""

    def __init__(
        self,
        config: ZygoteConfig,
        endpoint: WarmEndpoint,
        first: socket.socket,
        ignored_signals: Sequence[int],
        rank_runner: Any,
    ) -> None:
        """Make this process a warm zygote; called by the zygote before its imports.

        ``first``: connection of the first run; ``ignored_signals``: those that only launchers handle.
        """
        _load_modules(rank_runner.load_private_module)
        proc_utils.set_process_title("ddplaunch: warm zygote")
        self.path, self.seconds, self.modules = endpoint["path"], endpoint["idle_timeout_s"], config["modules"]
        self.first, self.ignored_signals = first, ignored_signals
        self.inherited = inherited_state.read_inherited_state()
        shielded = sum(1 << (number - 1) for number in config["shielded_signals"])  # ignored by this process already
        self.inherited["SigIgn"] = f"{int(self.inherited['SigIgn'], 16) & ~shielded:016x}"
        self.initial_environment = dict(os.environ)
        self.listening = socket.socket(fileno=endpoint["listening_fd"])
        self.listening.setblocking(False)
        self.leader, self.leader_pidfd, self.reserved = (
            endpoint["session_leader"],
            endpoint["leader_pidfd"],
            endpoint["reserved_fds"],
        )
        for fd in (self.first.fileno(), self.listening.fileno(), self.leader_pidfd):
            if fd is not None:
                os.set_inheritable(fd, False)
        self.socket_file = _file_identity(self.path)
        self.origins = file_dependencies.FileDependencies(rank_runner)
        self.rank_runner = rank_runner
        self.guardians: dict[int, socket.socket] = {}  # by pid: the socket that reports the run's end to the launcher
        self.fingerprint: dict[str, str] | None = None  # of the first run
        self.captured_output = {1: b"", 2: b""}
        self.is_ending = False
        self.runs_served = 0
        self.began = time.time()

    def serve(
        self, fit: bool, cleanup: atexit_cleanup.AtexitCleanup, recorder: import_recorder.ImportRecorder
    ) -> RunZygote:
        """Serve runs until the end; return only in forks, each of which becomes a run's zygote.

        ``fit``: whether later runs can use this process, too.
        """
        self.cleanup = cleanup
        after, before = dict(os.environ), self.initial_environment
        self.changed_variables = {name: value for name, value in after.items() if before.get(name) != value}
        self.unset_variables = [name for name in before if name not in after]
        changed = self.origins.record(self.rank_runner.PACKAGE_DIR)
        self.woken, self.wake = proc_utils.open_wakeup_pipe()
        self.handlers = {
            number: signal.signal(number, proc_utils.on_signal_noop)
            for number in (signal.SIGCHLD, *self.ignored_signals)
        }
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
        if not fit or changed or self.read_import_output():
            self.stop_accepting()
        run = self.handle_request(self.first)
        if run is None and not self.runs_served:  # the first run's launcher has ended
            self.stop_accepting()
        while run is None:
            if not self.guardians and (self.is_ending or self.seconds_left() <= 0):
                self.exit()
            wait = None if self.guardians else self.seconds_left() * 1000 + 1
            if self.leader_pidfd is None and not self.is_ending:
                wait = min(wait or _LEADER_INTERVAL_MS, _LEADER_INTERVAL_MS)
            ready = {fd for fd, _ in self.poll.poll(wait)}
            if self.woken in ready:
                self.reap()
            if self.leader_pidfd is None and proc_utils.start_ticks(self.leader[0]) != self.leader[1]:
                self.stop_accepting()
            if not ready.isdisjoint((self.leader_pidfd, self.pressure)):
                self.stop_accepting()
            if not self.is_ending and self.listening.fileno() in ready:
                run = self.accept()
        return run

    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.idle_since)

    def reap(self) -> None:
        try:
            if not set(_END_SIGNALS).isdisjoint(os.read(self.woken, 4096)):
                self.stop_accepting()
        except BlockingIOError:
            pass
        ended = proc_utils.reap_children()
        while ended:
            pid, status, _ = ended.pop()
            if connection := self.guardians.pop(pid, None):
                if status:  # it was killed, and its descendants were reparented to this process
                    ended += proc_utils.kill_descendants(os.getpid(), is_excluded=self.guardians.__contains__)[1]
                connection.close()
                self.idle_since = time.monotonic()

    def accept(self) -> RunZygote | None:
        try:
            return self.handle_request(self.listening.accept()[0])
        except OSError:  # the client has closed already
            return None

    def handle_request(self, client: socket.socket) -> RunZygote | None:
        """Handle one request; in a run's zygote, return its control socket and configuration."""
        client.settimeout(_REQUEST_TIMEOUT_S)
        self.client = client
        fds: list[int] = []
        try:
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            if _UCRED.unpack(credentials)[1] != os.geteuid():
                return None
            data, fds, _, _ = socket.recv_fds(
                client, _MAX_REQUEST_BYTES, zygote_channel.MAX_DESCRIPTORS
            )  # it is one packet
            request: ToWarm = json.loads(data[zygote_channel.HEADER.size :])
            if request["op"] == "run":
                return self.fork_run(fds)
            if request["op"] == "stop":
                self.stop_accepting()
            zygote_channel.send_message(client, self.build_status())
        except Exception:  # the client has closed, or the request is malformed
            pass
        finally:
            client.close()
            for fd in fds:
                os.close(fd)
        return None

    def build_status(self) -> WarmStatus:
        return {
            "op": "warm_status",
            "pid": os.getpid(),
            "started_at": self.began,
            "remaining_s": None if self.guardians else max(0.0, self.seconds_left()),
            "current_runs": len(self.guardians),
            "runs_served": self.runs_served,
            "modules": self.modules,
            "working_dir": self.inherited["folder"],
            "is_ending": self.is_ending,
        }

    def fork_run(self, fds: list[int]) -> RunZygote | None:
        """Fork the guardian of a run, which forks the run's zygote; return in the zygote only."""
        order_fd, _, launcher_fd = fds
        order: WarmOrder = json.loads(os.pread(order_fd, _MAX_ORDER_BYTES, 0))  # never blocks, even on a pipe
        first = self.fingerprint is None
        self.fingerprint = self.fingerprint or order["fingerprint"]
        why = self.why_not_usable(order)
        launcher = socket.socket(fileno=launcher_fd)
        fds.remove(launcher_fd)
        launcher.settimeout(_REQUEST_TIMEOUT_S)
        if why and not first:
            zygote_channel.send_message(launcher, {"op": "declined", "reason": why})
            launcher.close()
            return None
        if why:
            self.stop_accepting()
        signal.pthread_sigmask(signal.SIG_BLOCK, self.ignored_signals)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.ignored_signals)
            raise  # the client gets no reply
        if pid == 0:
            return self.run_guardian(order, launcher, fds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.ignored_signals)
        self.guardians[pid] = launcher
        self.runs_served += 1
        return None

    def why_not_usable(self, order: WarmOrder) -> str | None:
        """Return why a run cannot use this zygote; accept no more runs if the reason applies to all of them."""
        if order["fingerprint"] != self.fingerprint:
            return "another run's warm zygote answered"
        try:
            now = {**inherited_state.read_inherited_state(), "SigIgn": self.inherited["SigIgn"]}
        except OSError:  # its folder was deleted, say
            now = {"folder": ""}
        differs = sorted(name for name, value in now.items() if self.fingerprint.get(f"inherited {name}") != value)
        what = ", ".join(differs) or self.origins.find_changed()
        why = f"changed since the warm zygote started: {what}" if what else None
        if why is None and _is_memory_low():
            why = "little memory is available"
        if why:
            self.stop_accepting()
        return why

    def run_guardian(self, order: WarmOrder, launcher: socket.socket, fds: list[int]) -> RunZygote:
        """In the fork: fork the run's zygote and be its guardian; return in the zygote only."""
        try:
            signal.set_wakeup_fd(-1)
            for each in (self.listening, *self.guardians.values()):
                each.close()
            for fd in (self.woken, self.wake, self.leader_pidfd, self.pressure):
                if fd is not None:
                    os.close(fd)
            os.setsid()
            proc_utils.adopt_orphans()
            guardian_pid = os.getpid()
            proc_utils.set_process_title("ddplaunch: guardian of a run")
            zygote = os.fork()
            if zygote:
                self.client.close()
                for fd in fds:
                    os.close(fd)
                for number in (1, 2):
                    os.dup2(0, number)
                guardian.run_guardian(launcher, zygote, zygote_channel, proc_utils)
            launcher.close()
            os.setsid()
            proc_utils.set_process_title(
                f"{sys.executable} {os.path.join(os.path.dirname(self.rank_runner.__file__), 'zygote.py')}"
            )
            proc_utils.die_with_parent(signal.SIGKILL)
            if os.getppid() != guardian_pid:
                os._exit(1)
            proc_utils.adopt_orphans()
            self.client.close()
            for number, handler in self.handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            control = self.adopt_fds(socket.socket(fileno=fds.pop()), order["fd_numbers"])
            os.close(fds.pop())
            for number, text in self.captured_output.items():
                _write_all(number, text)
            os.environ.clear()
            os.environ.update(order["environment"])
            os.environ.update(self.changed_variables)
            for name in self.unset_variables:
                os.environ.pop(name, None)
            return control, {**order["config"], "parent_pid": guardian_pid, "has_guardian": True}
        except BaseException:
            os._exit(1)

    def adopt_fds(self, control: socket.socket, numbers: list[int]) -> socket.socket:
        """In a run's zygote: move the launcher's descriptors to their ``numbers``; return the moved control socket."""
        if self.runs_served:  # the first launcher has sent its descriptors already, or this process would have ended
            pidfd = proc_utils.open_pidfd(os.getpid())
            zygote_channel.send_message(
                control, {"op": "zygote_offer", "pid": os.getpid()}, [] if pidfd is None else [pidfd]
            )
            if pidfd is not None:
                os.close(pidfd)
        fds = [os.dup(control.fileno()), *zygote_channel.receive_message(control)[1]]
        control.close()
        free = max(numbers) + 1  # above all of them
        moved, *inherited = (_duplicate_fd(fd, free) for fd in fds)
        for fd in (*fds, *self.reserved):
            os.close(fd)
        if any(map(_is_open, numbers[3:])):  # a preloaded module has a file open there
            os._exit(1)
        for fd, number in zip(inherited, numbers, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        return socket.socket(fileno=moved)

    def read_import_output(self) -> bool:
        """Read what the imports have printed, for the first run to show; return whether there was output."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _load_libc().fflush(None)
        for number in self.captured_output:
            self.captured_output[number] = os.pread(number, os.fstat(number).st_size, 0)
        return any(self.captured_output.values())

    def stop_accepting(self) -> None:
        """Accept no more runs, and exit after the current ones."""
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
            except OSError:  # other files are in the folder
                pass

    def exit(self) -> NoReturn:
        self.stop_accepting()
        self.cleanup.run()
        os._exit(0)


make_server = WarmZygoteServer  # called by the zygote


def _load_libc() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def _clear_death_signal(peer: socket.socket) -> None:
    """Clear O_ASYNC: during the imports it let the kernel kill this process when ``peer``'s other end closed."""
    libc = _load_libc()
    libc.fcntl(peer.fileno(), _F_SETFL, libc.fcntl(peer.fileno(), _F_GETFL) & ~os.O_ASYNC)


def _duplicate_fd(fd: int, least: int) -> int:
    copy: int = _load_libc().fcntl(fd, _F_DUPFD_CLOEXEC, least)
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
    """Return a descriptor that is ready under memory pressure; None if the kernel has no PSI triggers."""
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
    values: dict[str, int] = {}
    with open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            values[name] = int(value.split()[0])
    return values["MemAvailable"] < _MIN_FREE_MEMORY * values["MemTotal"]


def _write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]
