"""Gets the zygotes of a run as forks of a warm zygote, and starts a warm zygote if there is none."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from ddplaunch.core.agent.zygote_process import ZYGOTE_SCRIPT, spawn_zygote
from ddplaunch.core.rank import zygote_channel
from ddplaunch.core.rank.zygote_messages import ZygoteConfig
from ddplaunch.features.warm import warm_client, warm_sockets
from ddplaunch.features.warm.fingerprint import compute_fingerprint, fingerprint_id
from ddplaunch.features.warm.rank.warm_messages import WarmEndpoint, WarmOrder
from ddplaunch.features.warm.warm_process import WarmStart, WarmZygote
from ddplaunch.system.processes import proc_utils, process_limits

_TITLE_BYTES = 4096  # for the command line of ranks of any later run
_SERVER = "features/warm/rank/warm_zygote"  # the file that the zygote loads
_NO_SHELL = "the shell that it was started from has ended"


class WarmZygoteStarter:
    """Connects to the warm zygote of this program and environment, or starts it."""

    child_pid = None

    def __init__(self, idle_timeout_s: float, unavailable_reason: str | None) -> None:
        """``idle_timeout_s``: how long an idle warm zygote lives; 0: this run uses none, for ``unavailable_reason``."""
        self._idle_timeout_s = idle_timeout_s
        self._first = True
        self.unavailable_reason = unavailable_reason  # why the last zygote is not a fork of a warm one

    def get_zygote(
        self, config: ZygoteConfig, environment: Mapping[str, str]
    ) -> tuple[WarmZygote, socket.socket] | None:
        """Return a fork of a warm zygote and a socket to it; None: the caller starts a zygote in the usual way.

        A warm zygote may be started on the first request only: later the launcher would adopt it, as an orphan.
        """
        if not self._idle_timeout_s:
            return None
        first, self._first = self._first, False
        self.unavailable_reason = _why_not_warm(config)
        if self.unavailable_reason:
            return None
        control, zygote_control = socket.socketpair()
        guardian_socket, guardian_end = socket.socketpair()
        zygote: WarmZygote | None = None
        try:
            with process_limits.original_nofile_limit():
                known = compute_fingerprint(ZYGOTE_SCRIPT, config, environment)
            path = os.path.join(warm_sockets.warm_socket_dir(), fingerprint_id(known))
            order: WarmOrder = {
                "config": config,
                "environment": dict(environment),
                "fingerprint": dict(known),
                "fd_numbers": warm_client.inherited_fds(),
            }
            if (connection := warm_sockets.connect(path)) is not None:
                with connection:
                    warm_client.send_order(connection, order, zygote_control, guardian_end)
                guardian_end.close()
                if warm_client.hand_over_fds(control, zygote_control, guardian_socket, order["fd_numbers"]):
                    zygote = WarmZygote(guardian_socket, None)
                else:
                    self.unavailable_reason = _read_decline_reason(guardian_socket)
            elif first:
                # By this socket, as no process that may outlive the launcher must have these descriptors.
                zygote_channel.send_message(control, {"op": "fd_handover"}, order["fd_numbers"])
                start = self._start_warm_zygote(path, order, zygote_control, guardian_end)
                zygote = WarmZygote(guardian_socket, start)
            else:
                self.unavailable_reason = "the warm zygote has ended"
        except (OSError, KeyError) as error:
            self.unavailable_reason = f"cannot connect to a warm zygote: {error}"
        finally:
            zygote_control.close()
            guardian_end.close()
            if zygote is None:  # a late reply finds closed sockets
                control.close()
                guardian_socket.close()
        return (zygote, control) if zygote else None

    def _start_warm_zygote(
        self, path: str, order: WarmOrder, zygote_control: socket.socket, guardian_end: socket.socket
    ) -> WarmStart:
        """Start a warm zygote as a detached process, with this run's order in its socket.

        Raises OSError if it cannot be started, or another launcher is starting it.
        """
        listening = warm_sockets.listen_at(path)
        lifeline, lifeline_end = socket.socketpair()
        fds: list[int] = []
        try:
            warm_client.send_order(lifeline, order, zygote_control, guardian_end)
            leader = _session_leader()
            started, leader_pidfd = proc_utils.start_ticks(leader), proc_utils.open_pidfd(leader)
            if started < 0:
                raise OSError(_NO_SHELL)
            fds += [] if leader_pidfd is None else [leader_pidfd]
            fds.append(devnull := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            fds += [stdout := os.memfd_create("stdout"), stderr := os.memfd_create("stderr")]
            endpoint: WarmEndpoint = {
                "listening_fd": listening.fileno(),
                "path": path,
                "reserved_fds": order["fd_numbers"][3:],
                "session_leader": (leader, started),
                "leader_pidfd": leader_pidfd,
                "idle_timeout_s": self._idle_timeout_s,
            }
            for fd in (listening.fileno(), leader_pidfd):
                if fd is not None:
                    os.set_inheritable(fd, True)
            middle = os.fork()
            if middle == 0:
                _fork_warm_zygote(order, endpoint, lifeline_end, (devnull, stdout, stderr))
            os.waitpid(middle, 0)
            pid, pidfds, _, _ = socket.recv_fds(lifeline, 16, 1)
            return WarmStart(int(pid), pidfds[0] if pidfds else None, lifeline, path)
        except OSError:
            lifeline.close()
            with suppress(OSError):
                os.unlink(path)
            warm_sockets.remove_empty_dirs()
            raise
        finally:
            listening.close()
            lifeline_end.close()
            for fd in fds:
                os.close(fd)


def _why_not_warm(config: ZygoteConfig) -> str | None:
    """Why this run cannot use a warm zygote; None if it can."""
    if not config["modules"]:
        return "nothing is preloaded" if config["forks"] else "each rank is a new interpreter"
    if config["user_modules"]:
        return f"modules named with --preload are not kept warm: {','.join(config['user_modules'])}"
    if not hasattr(os, "memfd_create"):
        return "this Python or this system has no memfd_create"
    inherited = warm_client.inherited_fds()
    if len(inherited) > zygote_channel.MAX_DESCRIPTORS:
        return "ranks inherit too many descriptors"
    if inherited[-1] + len(inherited) + 1 >= _count_open_files():
        return f"ranks inherit descriptor {inherited[-1]}, too close to the limit of open files (ulimit -n)"
    return None


def _read_decline_reason(guardian_socket: socket.socket) -> str:
    reply = warm_client.receive_reply(guardian_socket, 0)
    return str(reply["reason"]) if reply and reply["op"] == "declined" else "the warm zygote was busy"


def _count_open_files() -> int:
    with process_limits.original_nofile_limit():
        soft = process_limits.read_rlimit(resource.RLIMIT_NOFILE)[0]
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _session_leader() -> int:
    """The process that ends when the user logs out: the leader of this session, or of the parent's session.

    If that has ended or is invisible (in a container, behind nsenter): the outermost visible process of the session.
    Raises OSError if there is none but the launcher itself.
    """
    own_pid = os.getpid()
    leader = os.getppid() if os.getsid(0) == own_pid else own_pid
    session = os.getsid(leader)
    if proc_utils.read_state(session)[0] not in "ZX":
        leader = session
    else:
        while (above := proc_utils.read_state(leader)[1]) and os.getsid(above) == session:
            leader = above
    if leader == own_pid:
        raise OSError(_NO_SHELL)
    return leader


def _fork_warm_zygote(
    order: WarmOrder, endpoint: WarmEndpoint, lifeline: socket.socket, streams: Sequence[int]
) -> NoReturn:
    """In a fork, which then exits: start a warm zygote, and send its pid to the launcher.

    The kernel kills the zygote, even a stopped one, when the launcher's end of ``lifeline`` is closed.
    """
    try:
        for fd in endpoint["reserved_fds"]:
            os.dup2(streams[0], fd)
        config: ZygoteConfig = {**order["config"], "server": {"file": _SERVER, "settings": endpoint}}
        pid = spawn_zygote(config, lifeline, order["environment"], _TITLE_BYTES, streams)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        pidfd = proc_utils.open_pidfd(pid)
        try:
            socket.send_fds(lifeline, [str(pid).encode()], [] if pidfd is None else [pidfd])
        except OSError:  # the launcher has gone already
            os.kill(pid, signal.SIGKILL)
    finally:
        os._exit(0)
