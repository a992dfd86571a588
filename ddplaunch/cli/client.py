"""Client of a running job's control socket, for other processes of the same user on the same machine."""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.base.frames import ProtocolError, read_frame
from ddplaunch.base.local_sockets import peer_uid
from ddplaunch.base.types import decode, encode
from ddplaunch.core.control_socket.request import Request
from ddplaunch.core.control_socket.server import MAX_REPLY_BYTES, MAX_STREAMING_CLIENTS
from ddplaunch.core.control_socket.status_request import StatusQuery
from ddplaunch.system.processes.proc_utils import is_suspended

REPLY_TIMEOUT_S = 10.0  # for a reply: the launcher may be suspended

CONNECT_RETRY_S = 0.05  # between two tries to connect while the socket's backlog is full

A = TypeVar("A")


class JobNotResponding(LaunchError):
    """A running job did not reply."""

    exit_code = EXIT_UNAVAILABLE


class JobEnded(JobNotResponding):
    """A job ended before it replied: it has removed its control socket, or its launcher was killed."""


def check_not_suspended(path: str) -> None:
    """Raise JobNotResponding if the launcher of this socket is suspended: a request would wait for its timeout."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    if pid.isdecimal() and is_suspended(int(pid)):
        raise JobNotResponding(f"run {run_id} is suspended (PID {pid})", advice_to_continue(int(pid)))


def advice_to_continue(pid: int) -> str:
    """Return the hint how to continue a suspended launcher."""
    return f"continue it with fg in its terminal, or kill -CONT {pid}"


def send_request(path: str, request: Request[A], timeout: float = REPLY_TIMEOUT_S) -> A:
    """Send a request to the control socket at ``path``, and return the job's reply.

    Raises JobNotResponding if there is no reply in ``timeout`` seconds.
    """
    with open_request(path, request, timeout) as sock:
        return _read_reply(sock, request, time.monotonic() + timeout)


def stream_replies(path: str, request: Request[A], timeout: float = REPLY_TIMEOUT_S) -> Iterator[A]:
    """Send a request and yield its replies, without the status that comes first; a streaming one until the job ends.

    Raises JobNotResponding if there is no status in ``timeout`` seconds, or the job has too many streaming clients;
    JobEnded if the job has ended before.
    """
    with open_request(path, request, timeout) as sock:
        _check_stream_accepted(sock, path, timeout)
        while True:
            try:
                yield _read_reply(sock, request, math.inf if request.is_streaming else time.monotonic() + timeout)
            except (EOFError, ConnectionError):  # the job has ended, its launcher may have been killed
                return


def _check_stream_accepted(sock: socket.socket, path: str, timeout: float) -> None:
    try:
        _read_reply(sock, StatusQuery(), time.monotonic() + timeout)
    except EOFError:
        _check_exists(path)
        what = f"{MAX_STREAMING_CLIENTS} clients already follow this job, or it runs another version of ddplaunch"
        raise JobNotResponding(what) from None


@contextmanager
def open_request(path: str, request: Request[object], timeout: float) -> Iterator[socket.socket]:
    """Yield a connection on which ``request`` has been sent; its errors are raised as JobNotResponding."""
    check_not_suspended(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            _connect(sock, path, time.monotonic() + timeout)
            if peer_uid(sock) != os.geteuid():
                raise JobNotResponding(f"{path} belongs to another user")
            sock.sendall(encode(request))
            yield sock
        except TimeoutError:
            what = f"{path} did not reply within {timeout:g} s"
            check_not_suspended(path)
            raise JobNotResponding(what, "the launcher may be suspended or busy; try again") from None
        except (ProtocolError, EOFError):
            _check_exists(path)
            raise JobNotResponding(f"{path}: invalid reply; the job may run another version of ddplaunch") from None
        except OSError as error:
            _check_exists(path)
            kind = JobEnded if isinstance(error, ConnectionRefusedError) else JobNotResponding
            raise kind(f"{path}: {os.strerror(error.errno or 0).lower()}", "the job may have ended") from None


def _check_exists(path: str) -> None:
    """Raise JobEnded if the launcher has removed its control socket: it does that first when it ends."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        raise JobEnded(f"{path}: {os.strerror(errno.ENOENT).lower()}", "the job may have ended") from None


def _connect(sock: socket.socket, path: str, deadline: float) -> None:
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # the backlog is full
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(CONNECT_RETRY_S)


def _read_reply(sock: socket.socket, request: Request[A], deadline: float) -> A:
    if deadline == math.inf:
        sock.settimeout(None)
    kind: type[A] = request.answers[-1]
    return decode(read_frame(sock, MAX_REPLY_BYTES, deadline), [kind])
