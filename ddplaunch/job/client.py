"""Asks the door of a running job, from another process of the same user on the same machine."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.job.door import MAX_ANSWER, MAX_FOLLOWERS
from ddplaunch.job.requests import (
    Answer,
    InspectJob,
    JobInspected,
    Over,
    Printed,
    Request,
    Show,
    StopJob,
    Stopping,
    TailRanks,
    WaitForEnd,
)
from ddplaunch.job.status import Status
from ddplaunch.wire.frames import Garbled, read_frame
from ddplaunch.wire.sockets import peer_uid
from ddplaunch.wire.typed import decode, encode

TIMEOUT = 10.0  # seconds in which a job must answer: its launcher may be suspended

RETRY = 0.05  # seconds between two tries to connect where too many ask

A = TypeVar("A", bound=Answer)


class Unanswered(LaunchError):
    """A job has not answered."""

    exit_code = EXIT_UNAVAILABLE


def show(path: str, timeout: float = TIMEOUT) -> Status:
    """Return the status of the job whose door is at ``path``; Unanswered if it gives none in ``timeout`` seconds."""
    return _ask(path, Show(), Status, timeout)


def look(path: str, *, stacks: bool = False, pace: bool = False, timeout: float = TIMEOUT) -> JobInspected:
    """Return the status of that job and what its ranks are doing; ``stacks``: and where in their code they are.

    ``pace`` instead: who is slow, which takes some time of each rank, so every 10 s is often enough.

    Raises:
        Unanswered: it gives none in ``timeout`` seconds.
    """
    return _ask(path, InspectJob(stacks, pace), JobInspected, timeout)


def stop(path: str, *, now: bool = False, timeout: float = TIMEOUT) -> None:
    """End the job whose door is at ``path``; ``now``: without its grace. Returns when it has begun to stop.

    Raises:
        Unanswered: it does not confirm that in ``timeout`` seconds.
    """
    _ask(path, StopJob(now), Stopping, timeout)


def tail(path: str, ranks: Sequence[int] = (), *, follow: bool = False, timeout: float = TIMEOUT) -> Iterator[Printed]:
    """What these ranks of that job printed last, all of its node for none; ``follow``: and what they print, to its end.

    Raises:
        Unanswered: it does not begin in ``timeout`` seconds, or too many follow it already.
    """
    with _asked(path, TailRanks(tuple(ranks), follow), timeout) as sock:
        _admitted(sock, timeout)
        while True:
            try:
                yield _answer(sock, Printed, math.inf if follow else time.monotonic() + timeout)
            except (EOFError, ConnectionError):  # the job has ended, its launcher may have been killed
                return


def wait(path: str, *, timeout: float = TIMEOUT) -> int | None:
    """Wait for the end of that job; return its exit code, None where its launcher was killed.

    Raises:
        Unanswered: it does not begin to answer in ``timeout`` seconds, or too many wait for it already.
    """
    with _asked(path, WaitForEnd(), timeout) as sock:
        _admitted(sock, timeout)
        try:
            return _answer(sock, Over, math.inf).code
        except (EOFError, ConnectionError):
            return None


def _admitted(sock: socket.socket, timeout: float) -> None:
    try:
        _answer(sock, Status, time.monotonic() + timeout)
    except EOFError:
        what = f"{MAX_FOLLOWERS} others follow this job already, or it runs another version of ddplaunch"
        raise Unanswered(what) from None


def _ask(path: str, request: Request, kind: type[A], timeout: float) -> A:
    with _asked(path, request, timeout) as sock:
        return _answer(sock, kind, time.monotonic() + timeout)


@contextmanager
def _asked(path: str, request: Request, timeout: float) -> Iterator[socket.socket]:
    """A connection on which ``request`` has been sent, and what goes wrong on it as Unanswered."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            _connect(sock, path, time.monotonic() + timeout)
            if peer_uid(sock) != os.geteuid():
                raise Unanswered(f"{path} belongs to another user")
            sock.sendall(encode(request))
            yield sock
        except TimeoutError:
            what = f"{path} does not answer within {timeout:g} s"
            raise Unanswered(what, "its launcher is suspended, or many others ask it: try again") from None
        except (Garbled, EOFError):
            raise Unanswered(f"{path} gives no answer that this version of ddplaunch can read") from None
        except OSError as error:
            raise Unanswered(f"{path}: {os.strerror(error.errno or 0).lower()}", "the job may have ended") from None


def _connect(sock: socket.socket, path: str, until: float) -> None:
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # so many ask that the kernel has no room for one more
            if time.monotonic() > until:
                raise TimeoutError from None
            time.sleep(RETRY)


def _answer(sock: socket.socket, kind: type[A], until: float) -> A:
    if until == math.inf:
        sock.settimeout(None)
    return decode(read_frame(sock, MAX_ANSWER, until), [kind])
