"""Client of warm zygotes: orders a run, hands over file descriptors, queries and stops them; with short timeouts."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ddplaunch.core.rank import zygote_channel
from ddplaunch.features.warm import warm_sockets
from ddplaunch.features.warm.rank.warm_messages import WarmOrder, WarmStatus
from ddplaunch.system.processes import proc_utils

REPLY_TIMEOUT_S = 0.2  # for each of the zygote's two replies; after it the run starts without a warm zygote


def send_order(sock: socket.socket, order: WarmOrder, control: socket.socket, guardian_socket: socket.socket) -> None:
    """Send the order of a run to the warm zygote at ``sock``.

    ``control`` and ``guardian_socket`` are the ends that the run's zygote and its guardian get.
    Raises OSError if the order cannot be sent without blocking.
    """
    body = os.memfd_create("order", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(body), "wb") as file:
            file.write(json.dumps(order).encode())
        sock.setblocking(False)
        zygote_channel.send_message(sock, {"op": "run"}, [body, control.fileno(), guardian_socket.fileno()])
    finally:
        os.close(body)


def hand_over_fds(
    control: socket.socket, zygote_end: socket.socket, guardian_socket: socket.socket, descriptors: Sequence[int]
) -> bool:
    """Send this process's descriptors to the run's zygote after its first message, and wait for its confirmation.

    Without a confirmation the zygote is killed, as it may be suspended, and descriptors that it has not received are
    received back from ``zygote_end``, a copy of its end of ``control``, so that no process keeps them. If a message
    comes on ``guardian_socket``, none comes on ``control``.

    Returns whether the zygote has confirmed. Raises OSError if the descriptors cannot be sent.
    """
    fds: list[int] = []
    try:
        if not _wait_for_zygote(control, guardian_socket):
            return False
        hello: Any
        hello, fds = zygote_channel.receive_message(control)
        zygote_channel.send_message(control, {"op": "fd_handover"}, descriptors)
        if _wait_for_zygote(control, guardian_socket):
            return True
        proc_utils.send_signal(hello["pid"], signal.SIGKILL, fds[0] if fds else None)
        with suppress(BlockingIOError):
            zygote_end.setblocking(False)  # recv_fds ignores its flags
            fds += socket.recv_fds(zygote_end, 1, zygote_channel.MAX_DESCRIPTORS)[1]
        return False
    finally:
        for fd in fds:
            os.close(fd)


def _wait_for_zygote(control: socket.socket, guardian_socket: socket.socket) -> bool:
    """Wait for a message; return whether it came on ``control`` in time."""
    poll = select.poll()
    for each in (control, guardian_socket):
        poll.register(each, select.POLLIN)
    return control.fileno() in dict(poll.poll(REPLY_TIMEOUT_S * 1000))


def query_all(*, stop: bool = False) -> list[WarmStatus | str]:
    """Return the status of each warm zygote of this user, or the socket's path if it is silent; ``stop`` stops all.

    Sockets of zygotes that were killed are removed.
    """
    replies: list[WarmStatus | str] = []
    for path in warm_sockets.list_socket_paths():
        try:
            sock = warm_sockets.connect(path)
        except OSError:
            replies.append(path)
            continue
        if sock is None:
            with suppress(OSError):  # another launcher is just about to listen there
                warm_sockets.remove_stale(path)
            continue
        with sock:
            try:
                sock.settimeout(10 * REPLY_TIMEOUT_S)
                zygote_channel.send_message(sock, {"op": "stop"} if stop else {"op": "status"})
                answer: Any = zygote_channel.receive_message(sock)[0]
                if answer.keys() != WarmStatus.__annotations__.keys():
                    raise ValueError("it is of another version")
                replies.append(answer)
            except (OSError, EOFError, ValueError, AttributeError):
                replies.append(path)
    warm_sockets.remove_empty_dirs()
    return replies


def receive_reply(guardian_socket: socket.socket, seconds: float) -> Any:
    """Receive the one message of a guardian or a warm zygote; None if it does not come in time."""
    poll = select.poll()
    poll.register(guardian_socket, select.POLLIN)
    if not poll.poll(seconds * 1000):
        return None
    try:
        return zygote_channel.receive_message(guardian_socket)[0]
    except (OSError, EOFError, ValueError):
        return None


def inherited_fds() -> list[int]:
    """Return the descriptors that a child process would inherit: 0, 1, 2, and those inherited by this process."""
    descriptors = [0, 1, 2]
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(OSError):  # the descriptor of /proc/self/fd itself is closed by now
            if fd > 2 and os.get_inheritable(fd):
                descriptors.append(fd)
    return descriptors
