"""Asks the door of a running job, from another process of the same user on the same machine."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.job.door import MAX_REPLY_BYTES, MAX_STREAMING_CLIENTS
from ddplaunch.job.requests import Request
from ddplaunch.job.requests.status import StatusQuery
from ddplaunch.rank.processes import is_suspended
from ddplaunch.wire.frames import ProtocolError, read_frame
from ddplaunch.wire.sockets import peer_uid
from ddplaunch.wire.typed import decode, encode

REPLY_TIMEOUT_S = 10.0  # seconds in which a job must answer: its launcher may be suspended

CONNECT_RETRY_S = 0.05  # seconds between two tries to connect where too many ask

A = TypeVar("A")


class JobNotResponding(LaunchError):
    """A job has not answered."""

    exit_code = EXIT_UNAVAILABLE


def check_suspended(path: str) -> None:
    """Raise JobNotResponding where the launcher with this socket is suspended: a question would wait for its timeout."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    if pid.isdecimal() and is_suspended(int(pid)):
        raise JobNotResponding(
            f"{run_id} is suspended: its launcher was stopped, as Ctrl-Z does", advice_to_continue(int(pid))
        )


def advice_to_continue(pid: int) -> str:
    """How a person lets a suspended launcher go on."""
    return f"fg in its terminal, or kill -CONT {pid}, continues it"


def send_request(path: str, request: Request[A], timeout: float = REPLY_TIMEOUT_S) -> A:
    """Ask the job whose door is at ``path``, and return its answer.

    Raises:
        JobNotResponding: it gives none in ``timeout`` seconds.
    """
    with _open_request(path, request, timeout) as sock:
        return _read_reply(sock, request, time.monotonic() + timeout)


def stream_replies(path: str, request: Request[A], timeout: float = REPLY_TIMEOUT_S) -> Iterator[A]:
    """Ask what is answered with the status, then with any number of answers, to the job's end if the request lasts.

    Raises:
        JobNotResponding: it does not begin in ``timeout`` seconds, or too many follow it already.
    """
    with _open_request(path, request, timeout) as sock:
        _check_accepted(sock, timeout)
        while True:
            try:
                yield _read_reply(sock, request, math.inf if request.is_streaming else time.monotonic() + timeout)
            except (EOFError, ConnectionError):  # the job has ended, its launcher may have been killed
                return


def _check_accepted(sock: socket.socket, timeout: float) -> None:
    try:
        _read_reply(sock, StatusQuery(), time.monotonic() + timeout)
    except EOFError:
        what = f"{MAX_STREAMING_CLIENTS} others follow this job already, or it runs another version of ddplaunch"
        raise JobNotResponding(what) from None


@contextmanager
def _open_request(path: str, request: Request[object], timeout: float) -> Iterator[socket.socket]:
    """A connection on which ``request`` has been sent, and what goes wrong on it as JobNotResponding."""
    check_suspended(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            _connect(sock, path, time.monotonic() + timeout)
            if peer_uid(sock) != os.geteuid():
                raise JobNotResponding(f"{path} belongs to another user")
            sock.sendall(encode(request))
            yield sock
        except TimeoutError:
            what = f"{path} does not answer within {timeout:g} s"
            check_suspended(path)
            raise JobNotResponding(what, "its launcher is busy, or many others ask it: try again") from None
        except (ProtocolError, EOFError):
            raise JobNotResponding(f"{path} gives no answer that this version of ddplaunch can read") from None
        except OSError as error:
            raise JobNotResponding(
                f"{path}: {os.strerror(error.errno or 0).lower()}", "the job may have ended"
            ) from None


def _connect(sock: socket.socket, path: str, until: float) -> None:
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # so many ask that the kernel has no room for one more
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(CONNECT_RETRY_S)


def _read_reply(sock: socket.socket, request: Request[A], until: float) -> A:
    if until == math.inf:
        sock.settimeout(None)
    kind: type[A] = request.answers[-1]
    return decode(read_frame(sock, MAX_REPLY_BYTES, until), [kind])
