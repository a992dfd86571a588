"""The launcher's end of the zygote socket, with a kernel that is out of memory."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.agent.zygote_socket import ZygoteSocket
from ddplaunch.core.rank.zygote_channel import encode_message, receive_message
from ddplaunch.core.rank.zygote_messages import ToZygote


class _FullSocket(socket.socket):
    """A socket for which the kernel has no memory, until ``has_memory`` is set."""

    has_memory = False
    tries = 0

    def send(self, data: object, flags: int = 0) -> int:
        self._fail()
        return super().send(data, flags)  # type: ignore[arg-type]

    def sendmsg(self, *arguments: object) -> int:  # type: ignore[override]
        self._fail()
        return super().sendmsg(*arguments)  # type: ignore[arg-type]

    def _fail(self) -> None:
        self.tries += 1
        assert self.tries < 200, "it tries without a pause"
        if not self.has_memory:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


class _SlowSocket(socket.socket):
    """A socket from which at most three bytes can be read at once."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(min(size, 3), flags)

    def recvmsg(self, size: int, *arguments: int) -> Any:
        return super().recvmsg(min(size, 3), *arguments)


@pytest.mark.parametrize("has_descriptor", [False, True])
def test_a_message_that_the_kernel_has_no_memory_for_is_sent_later(has_descriptor: bool) -> None:
    """It waits between tries, however long that lasts; after some seconds it is sent without its descriptors."""
    near, far = socket.socketpair()
    with _FullSocket(fileno=near.detach()) as near, far:
        loop = Mock()
        timers: list[Callable[[], None]] = []
        loop.call_later = lambda seconds, callback: timers.append(callback)
        zygote = ZygoteSocket(loop, near, Mock())

        def build(fds: list[int]) -> ToZygote:
            fds += [os.open(os.devnull, os.O_RDONLY)] * has_descriptor
            return {"op": "serve_store"}

        zygote.send_built(build)
        for _ in range(99):
            timers.pop()()
        near.has_memory = True
        timers.pop()()
        assert not timers
        assert receive_message(far) == ({"op": "serve_store"}, [])


class _Listener:
    """What arrives from the zygote."""

    def __init__(self) -> None:
        self.messages: list[tuple[object, int]] = []
        self.closed = 0

    def on_zygote_message(self, message: object, fds: list[int]) -> None:
        self.messages.append((message, len(fds)))
        for fd in fds:
            os.close(fd)

    def on_zygote_closed(self) -> None:
        self.closed += 1


def _step(loop: EventLoop) -> None:
    loop.call_soon(lambda: None)  # so that it does not wait
    loop.run_once()


def test_messages_arrive_in_pieces_with_their_descriptors_and_the_end_once() -> None:
    near, far = socket.socketpair()
    loop, listener = EventLoop(), _Listener()
    zygote = ZygoteSocket(loop, near, listener)
    frame = encode_message({"op": "spawned", "rank": 1})
    with far, open(os.devnull) as file:
        socket.send_fds(far, [frame[:2]], [file.fileno()])
        for place in range(2, len(frame)):
            _step(loop)
            assert not listener.messages
            far.send(frame[place : place + 1])
        far.send(frame * 2)
        while len(listener.messages) < 3:
            loop.run_once()
    assert listener.messages == [({"op": "spawned", "rank": 1}, count) for count in (1, 0, 0)]
    while not listener.closed:
        loop.run_once()
    _step(loop)
    assert (listener.closed, zygote.is_closed) == (1, False)
    zygote.close()
    assert zygote.is_closed


def test_a_message_that_cannot_be_built_is_reported_later_and_others_wait_for_that() -> None:
    near, far = socket.socketpair()
    loop, calls = EventLoop(), list[object]()
    zygote = ZygoteSocket(loop, near, _Listener())
    before = len(os.listdir("/proc/self/fd"))

    def build(fds: list[int]) -> ToZygote:
        fds.append(os.open(os.devnull, os.O_RDONLY))
        raise OSError(errno.EMFILE, "Too many open files")

    def on_failed(error: OSError) -> None:
        calls.append(error.errno)
        calls.append(zygote.withdraw_unsent_spawns())

    zygote.send_built(build, on_failed, rank=0)
    zygote.send_built(build, on_failed, rank=1)
    zygote.send({"op": "remove_path", "path": "/x"})
    assert calls == [], "not from within the call"
    _step(loop)
    assert calls == [errno.EMFILE, [1]]
    assert len(os.listdir("/proc/self/fd")) == before
    zygote.send({"op": "serve_store"})
    with _SlowSocket(fileno=far.detach()) as slow:
        assert receive_message(slow) == ({"op": "remove_path", "path": "/x"}, [])
        assert receive_message(slow) == ({"op": "serve_store"}, [])
    zygote.close()


def test_requests_that_the_zygote_has_not_read_are_withdrawn() -> None:
    """What is partly sent is not: the zygote would wait for the rest."""
    near, far = socket.socketpair()
    loop = EventLoop()
    zygote = ZygoteSocket(loop, near, _Listener())
    before = len(os.listdir("/proc/self/fd"))

    def build(fds: list[int]) -> ToZygote:
        fds.append(os.open(os.devnull, os.O_RDONLY))
        return {"op": "spawn", "rank": 0, "job": {"path": "x" * (1 << 20)}, "fds": ["stdin"]}  # type: ignore[typeddict-item]

    for rank in range(3):
        zygote.send_built(build, rank=rank)
    assert zygote.withdraw_unsent_spawns() == [1, 2]
    assert len(os.listdir("/proc/self/fd")) == before, "the descriptors of the first one are sent"
    zygote.send({"op": "remove_path", "path": "/x"})
    received = list[object]()
    reader = threading.Thread(target=lambda: received.extend(receive_message(far)[0]["op"] for _ in range(2)))
    reader.start()
    while len(received) < 2:
        _step(loop)
    reader.join()
    assert received == ["spawn", "remove_path"]
    zygote.close()
    far.close()
