"""The launcher's end of the zygote socket, with a kernel that is out of memory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ddplaunch.core.node.zygote_socket import ZygoteSocket
from ddplaunch.core.rank.zygote_channel import receive_message
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
