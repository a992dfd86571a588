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
from ddplaunch.job.door import MAX_ANSWER, MAX_FOLLOWERS
from ddplaunch.job.requests import Request
from ddplaunch.job.requests.status import AskStatus
from ddplaunch.rank.processes import is_suspended
from ddplaunch.wire.frames import Garbled, read_frame
from ddplaunch.wire.sockets import peer_uid
from ddplaunch.wire.typed import decode, encode

TIMEOUT = 10.0  # seconds in which a job must answer: its launcher may be suspended

RETRY = 0.05  # seconds between two tries to connect where too many ask

A = TypeVar("A")


class NoAnswer(LaunchError):
    """A job has not answered."""

    exit_code = EXIT_UNAVAILABLE


def check_suspended(path: str) -> None:
    """Raise NoAnswer where the launcher with this socket is suspended: a question would wait for its timeout."""
    run_id, _, pid = os.path.basename(path).rpartition(".")
    if pid.isdecimal() and is_suspended(int(pid)):
        raise NoAnswer(f"{run_id} is suspended: its launcher was stopped, as Ctrl-Z does", advice_to_continue(int(pid)))


def advice_to_continue(pid: int) -> str:
    """How a person lets a suspended launcher go on."""
    return f"fg in its terminal, or kill -CONT {pid}, continues it"


def ask(path: str, request: Request[A], timeout: float = TIMEOUT) -> A:
    """Ask the job whose door is at ``path``, and return its answer.

    Raises:
        NoAnswer: it gives none in ``timeout`` seconds.
    """
    with _asked(path, request, timeout) as sock:
        return _answer(sock, request, time.monotonic() + timeout)


def stream(path: str, request: Request[A], timeout: float = TIMEOUT) -> Iterator[A]:
    """Ask what is answered with the status, then with any number of answers, to the job's end if the request lasts.

    Raises:
        NoAnswer: it does not begin in ``timeout`` seconds, or too many follow it already.
    """
    with _asked(path, request, timeout) as sock:
        _admitted(sock, timeout)
        while True:
            try:
                yield _answer(sock, request, math.inf if request.lasts else time.monotonic() + timeout)
            except (EOFError, ConnectionError):  # the job has ended, its launcher may have been killed
                return


def _admitted(sock: socket.socket, timeout: float) -> None:
    try:
        _answer(sock, AskStatus(), time.monotonic() + timeout)
    except EOFError:
        what = f"{MAX_FOLLOWERS} others follow this job already, or it runs another version of ddplaunch"
        raise NoAnswer(what) from None


@contextmanager
def _asked(path: str, request: Request[object], timeout: float) -> Iterator[socket.socket]:
    """A connection on which ``request`` has been sent, and what goes wrong on it as NoAnswer."""
    check_suspended(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            _connect(sock, path, time.monotonic() + timeout)
            if peer_uid(sock) != os.geteuid():
                raise NoAnswer(f"{path} belongs to another user")
            sock.sendall(encode(request))
            yield sock
        except TimeoutError:
            what = f"{path} does not answer within {timeout:g} s"
            check_suspended(path)
            raise NoAnswer(what, "its launcher is busy, or many others ask it: try again") from None
        except (Garbled, EOFError):
            raise NoAnswer(f"{path} gives no answer that this version of ddplaunch can read") from None
        except OSError as error:
            raise NoAnswer(f"{path}: {os.strerror(error.errno or 0).lower()}", "the job may have ended") from None


def _connect(sock: socket.socket, path: str, until: float) -> None:
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # so many ask that the kernel has no room for one more
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(RETRY)


def _answer(sock: socket.socket, request: Request[A], until: float) -> A:
    if until == math.inf:
        sock.settimeout(None)
    kind: type[A] = request.answers[-1]
    return decode(read_frame(sock, MAX_ANSWER, until), [kind])
