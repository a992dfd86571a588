"""Tests of messages over real sockets: what arrives is what was sent, or nothing."""

from __future__ import annotations

import gc
import socket
import struct
import subprocess
import sys
import weakref
from functools import partial

import pytest

from ddplaunch.base.connection import Connection, format_address
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import decode, encode
from ddplaunch.core import messages
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.messages import FailureReported, HeartbeatMessage, StartAttempt, StopRequested
from ddplaunch.system.plan.node_spec import NodeSpec

FAILURE = RankFailure(3, 1, "n1", 77, 0, None, 9, None, "Traceback\n  é", 1.5, None, ("no", None), ("a", "b"))
SHARE = NodeSpec(1, "n1", ("cuda:0", "cuda:1"), "4")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"op": "HeartbeatMessage", "clock": []}',
        b'{"op": []}',
        b'{"op": "FailureReported", "attempt": "1"}',
        b'{"op": "StopRequested", "signal": 99}',
        b'{"op": "StartAttempt", "attempt": 0, "run_id": "", "assignment": {"node_rank": 0}}',
        b'{"op": "EndJob", "outcome": {"code": 0}}',  # known, but not accepted here
        b'{"op": "os.system", "command": "true"}',
    ],
)
def test_anything_else_is_a_protocol_error(body):
    with pytest.raises(ProtocolError):
        decode(body, [HeartbeatMessage, FailureReported, StopRequested, StartAttempt])


class Pair:
    """A connection of ours, and the other end as a bare socket."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.loop = EventLoop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.other = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
        self.received: list[object] = []
        self.lost: list[str] = []
        self.connection = Connection(
            self.loop, ours, [HeartbeatMessage, FailureReported], self.received.append, self.lost.append, most
        )

    def step_until(self, condition):
        while not condition():
            self.loop.run_once()


def test_frames_in_pieces_and_many_at_once():
    pair = Pair()
    frame = encode(FailureReported(0, FAILURE, 1.0))
    for i in range(len(frame)):
        pair.other.send(frame[i : i + 1])
    pair.other.send(encode(HeartbeatMessage(1e9)) * 500)
    pair.step_until(lambda: len(pair.received) == 501)
    assert pair.received[0] == FailureReported(0, FAILURE, 1.0)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it speaks another protocol"),
        (struct.pack("!I", (1 << 20) + 1), "it speaks another protocol"),
        (struct.pack("!I", 2) + b"{}", "it sent a message that is not expected here (ValidationError)"),
        (b"", "its connection closed"),
        (struct.pack("!I", 100) + b"half a", "its connection closed"),
    ],
)
def test_invalid_frames_close_the_connection(sent, why):
    pair = Pair()
    pair.other.sendall(sent)
    pair.other.shutdown(socket.SHUT_WR)
    pair.step_until(lambda: pair.lost)
    assert pair.lost == [why]
    assert not pair.connection.is_open


def test_a_peer_that_does_not_read_is_lost():
    pair = Pair()
    message = messages.NoteMessage("x" * (1 << 20))
    for _ in range(200):
        pair.connection.send(message)
    assert not pair.lost, "not from within our own call"
    pair.step_until(lambda: pair.lost)
    assert pair.lost == ["it does not read"]


def test_unsent_messages_arrive_before_the_end():
    pair = Pair()
    message = messages.NoteMessage("x" * (8 << 20))
    pair.connection.send(message)
    pair.connection.shutdown_write()
    received = bytearray()
    pair.other.setblocking(False)
    while True:
        pair.loop.call_later(0, lambda: None)
        pair.loop.run_once()
        try:
            data = pair.other.recv(1 << 20)
        except BlockingIOError:
            continue
        if not data:
            break
        received += data
    assert bytes(received) == encode(message)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (("10.0.0.1", 80), "10.0.0.1"),
        (("::ffff:10.0.0.1", 80, 0, 0), "10.0.0.1"),
        (("fd77::1", 80, 0, 0), "fd77::1"),
        (("fe80::1", 80, 0, socket.if_nametoindex("lo")), "fe80::1%lo"),
    ],
)
def test_addresses_are_formatted(name, shown):
    assert format_address(name) == shown


AT_ONCE = """
import sys, threading, time
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.messages import FailureReported
from ddplaunch.base import frames, types

failure = RankFailure(0, 0, "n0", 1, 1, 3, None, None, None, 0.0, None)
frame = types.encode(FailureReported(1, failure, time.time()))[frames.LENGTH.size :]
together = threading.Barrier(8)

def decode():
    together.wait()
    assert types.decode(frame, [FailureReported]).attempt == 1

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all read it")
"""


def test_threads_that_read_their_first_message_at_once():
    """`ddplaunch ps` does that with the replies of several jobs."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "all read it\n"), done.stderr


@pytest.mark.slow
def test_a_connection_that_is_closed_is_forgotten():
    """Its callbacks often refer to it: it is freed without the garbage collector."""
    loop = EventLoop()
    ours, theirs = socket.socketpair()
    connection: Connection[HeartbeatMessage] = Connection(
        loop, ours, [HeartbeatMessage], on_message=print, on_lost=print
    )
    connection.on_message = partial(print, connection)
    connection.on_lost = partial(print, connection)
    seen = weakref.ref(connection)
    gc.disable()
    try:
        connection.close()
        del connection
        assert seen() is None
    finally:
        gc.enable()
        theirs.close()
