"""What a launcher, or a person, asks a warm zygote for; none has more than a moment for its answer."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from contextlib import suppress

from ddplaunch import TYPE_CHECKING
from ddplaunch.rank import channel, processes
from ddplaunch.warm import place

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ddplaunch.rank.messages import WarmOrder, WarmStatus

REPLY_TIMEOUT_S = 0.2  # seconds for each of its two answers, until a run starts without it


def send_order(sock: socket.socket, order: WarmOrder, control: socket.socket, line: socket.socket) -> None:
    """Order a run at ``sock``.

    Raises:
        OSError: it cannot be sent, or not at once.
    """
    body = os.memfd_create("order", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(body), "wb") as file:
            file.write(json.dumps(order).encode())
        sock.setblocking(False)
        channel.send_message(sock, {"op": "run"}, [body, control.fileno(), line.fileno()])
    finally:
        os.close(body)


def hand_over_fds(
    control: socket.socket, theirs: socket.socket, line: socket.socket, descriptors: Sequence[int]
) -> bool:
    """Give our descriptors to the run's zygote that says on ``control`` that it is there, and await its first word.

    Where it has none for us nobody keeps them: it is killed, as it may be stopped, and what it has not taken is taken
    back at ``theirs``, our copy of its end. No word comes on ``control`` once something does on ``line``.

    Raises:
        OSError: they cannot be sent.
    """
    fds: list[int] = []
    try:
        if not _wait_for_zygote(control, line):
            return False
        taken: Any
        taken, fds = channel.receive_message(control)
        channel.send_message(control, {"op": "given"}, descriptors)
        if _wait_for_zygote(control, line):
            return True
        processes.send_signal(taken["pid"], signal.SIGKILL, fds[0] if fds else None)
        with suppress(BlockingIOError):
            theirs.setblocking(False)  # the flags of recv_fds go nowhere
            fds += socket.recv_fds(theirs, 1, channel.MAX_DESCRIPTORS)[1]
        return False
    finally:
        for fd in fds:
            os.close(fd)


def _wait_for_zygote(control: socket.socket, line: socket.socket) -> bool:
    poll = select.poll()
    for each in (control, line):
        poll.register(each, select.POLLIN)
    return control.fileno() in dict(poll.poll(REPLY_TIMEOUT_S * 1000))


def query_all(*, stop: bool = False) -> list[WarmStatus | str]:
    """What each warm zygote of this user says of itself, or the socket of one that does not answer; ``stop`` ends all.

    What killed ones have left is removed.
    """
    from ddplaunch.rank.messages import WarmStatus

    found: list[WarmStatus | str] = []
    for path in place.all_sockets():
        try:
            sock = place.connect(path)
        except OSError:
            found.append(path)
            continue
        if sock is None:
            with suppress(OSError):  # somebody claims it at this moment
                place.remove_stale(path)
            continue
        with sock:
            try:
                sock.settimeout(10 * REPLY_TIMEOUT_S)
                channel.send_message(sock, {"op": "stop"} if stop else {"op": "look"})
                answer: Any = channel.receive_message(sock)[0]
                if answer.keys() != WarmStatus.__annotations__.keys():
                    raise ValueError("it is of another version")
                found.append(answer)
            except (OSError, EOFError, ValueError, AttributeError):
                found.append(path)
    place.remove_empty_dirs()
    return found


def receive_reply(line: socket.socket, seconds: float) -> Any:
    """The one message of a guardian or a warm zygote, a ``FromWarm``; None where it does not come."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if not poll.poll(seconds * 1000):
        return None
    try:
        return channel.receive_message(line)[0]
    except (OSError, EOFError, ValueError):
        return None


def inherited_fds() -> list[int]:
    """The descriptors that a child of ours would have: 0, 1, 2, and what somebody left open for us."""
    found = [0, 1, 2]
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the one of the folder itself
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return found
