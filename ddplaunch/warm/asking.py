"""What a launcher, or a person, asks a warm zygote for; none has more than a moment for its answer."""

from __future__ import annotations

import json
import os
import select
import socket
from contextlib import suppress

from ddplaunch import TYPE_CHECKING
from ddplaunch.rank import channel
from ddplaunch.warm import place

if TYPE_CHECKING:
    from typing import Any

    from ddplaunch.rank.messages import Looked, Order

PATIENCE = 0.2  # seconds until a run starts without it


def send(sock: socket.socket, order: Order, control: socket.socket, line: socket.socket) -> None:
    """Order a run at ``sock``; our own descriptors go along.

    Raises:
        OSError: it cannot be sent, or not at once.
    """
    body = os.memfd_create("order", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(body), "wb") as file:
            file.write(json.dumps(order).encode())
        sock.setblocking(False)
        channel.send(sock, {"op": "run"}, [body, control.fileno(), line.fileno(), *order["descriptors"]])
    finally:
        os.close(body)


def is_heard(control: socket.socket) -> bool:
    """Whether a zygote says something on ``control``, our end, within PATIENCE."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    try:
        return bool(poll.poll(PATIENCE * 1000)) and bool(control.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def look(*, stop: bool = False) -> list[Looked | str]:
    """What each warm zygote of this user says of itself, or the socket of one that does not answer; ``stop`` ends all.

    What killed ones have left is removed.
    """
    from ddplaunch.rank.messages import Looked

    found: list[Looked | str] = []
    for path in place.all_sockets():
        try:
            sock = place.connect(path)
        except OSError:
            found.append(path)
            continue
        if sock is None:
            with suppress(OSError):
                place.claim(path).close()
                os.unlink(path)
            continue
        with sock:
            try:
                sock.settimeout(10 * PATIENCE)
                channel.send(sock, {"op": "stop"} if stop else {"op": "look"})
                answer: Any = channel.receive(sock)[0]
                if answer.keys() != Looked.__annotations__.keys():
                    raise ValueError("it is of another version")
                found.append(answer)
            except (OSError, EOFError, ValueError, AttributeError):
                found.append(path)
    return found


def receive(line: socket.socket, seconds: float) -> Any:
    """The one message of a guardian or a warm zygote, a ``FromWarm``; None where it does not come."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if not poll.poll(seconds * 1000):
        return None
    try:
        return channel.receive(line)[0]
    except (OSError, EOFError, ValueError):
        return None


def handed_on() -> list[int]:
    """The descriptors that a child of ours would have: 0, 1, 2, and what somebody left open for us."""
    found = [0, 1, 2]
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the one of the folder itself
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return found
