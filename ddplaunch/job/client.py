"""Asks the door of a running job, from another process of the same user on the same machine."""

from __future__ import annotations

import os
import socket
import time
from typing import TypeVar

from ddplaunch.control.messages import Garbled
from ddplaunch.control.wire import LENGTH, decode, encode
from ddplaunch.errors import EXIT_UNAVAILABLE, LaunchError
from ddplaunch.job.door import MAX_ANSWER
from ddplaunch.job.folder import peer_uid
from ddplaunch.job.requests import Answer, Look, Looked, Request, Show, Stop, Stopping
from ddplaunch.job.status import Status

TIMEOUT = 10.0  # seconds in which a job must answer: its launcher may be suspended

A = TypeVar("A", bound=Answer)


class Unanswered(LaunchError):
    """A job has not answered."""

    exit_code = EXIT_UNAVAILABLE


def show(path: str, timeout: float = TIMEOUT) -> Status:
    """Return the status of the job whose door is at ``path``; Unanswered if it gives none in ``timeout`` seconds."""
    return _ask(path, Show(), Status, timeout)


def look(path: str, *, stacks: bool = False, timeout: float = TIMEOUT) -> Looked:
    """Return the status of that job and what its ranks are doing; ``stacks``: and where in their code they are.

    Raises:
        Unanswered: it gives none in ``timeout`` seconds.
    """
    return _ask(path, Look(stacks), Looked, timeout)


def stop(path: str, *, now: bool = False, timeout: float = TIMEOUT) -> None:
    """End the job whose door is at ``path``; ``now``: without its grace. Returns when it has begun to stop.

    Raises:
        Unanswered: it does not confirm that in ``timeout`` seconds.
    """
    _ask(path, Stop(now), Stopping, timeout)


def _ask(path: str, request: Request, kind: type[A], timeout: float) -> A:
    until = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            sock.connect(path)
            if peer_uid(sock) != os.geteuid():
                raise Unanswered(f"{path} belongs to another user")
            sock.sendall(encode(request))
            (length,) = LENGTH.unpack(_receive(sock, LENGTH.size, until))
            if length > MAX_ANSWER:
                raise Garbled
            return decode(_receive(sock, length, until), [kind])
        except TimeoutError:
            raise Unanswered(f"{path} does not answer within {timeout:g} s") from None
        except (Garbled, EOFError):
            raise Unanswered(f"{path} gives no answer that this version of ddplaunch can read") from None
        except OSError as error:
            raise Unanswered(f"{path}: {os.strerror(error.errno or 0).lower()}", "the job may have ended") from None


def _receive(sock: socket.socket, count: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        if not (got := sock.recv(min(count - len(data), 1 << 18))):
            raise EOFError
        data += got
    return bytes(data)
