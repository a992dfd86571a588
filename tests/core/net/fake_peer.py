"""One end of the control connection, played by a test: a node or node 0 that sends any message."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from ddplaunch.base.event_loop import EventLoop, Timer
from ddplaunch.core.messages import PROTOCOL_VERSION
from tests.scaled_timeouts import scaled_timeout

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class ManualLoop(EventLoop):
    """An event loop whose timers expire when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[tuple[float, Timer]] = []  # all of them, with their seconds

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        self.timers.append((round(seconds, 3), Timer(callback, 0.0)))
        return self.timers[-1][1]

    def step(self) -> None:
        """Handle what is ready, without a wait."""
        self.call_soon(lambda: None)
        self.run_once()

    def let_expire(self, seconds: float) -> None:
        """Call the timers of this duration that are set."""
        for at, timer in list(self.timers):
            if at == seconds and timer.callback:
                callback, timer.callback = timer.callback, None
                callback()


class FakePeer:
    """A control connection that sends any JSON as a message."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(scaled_timeout(30))

    def send(self, op: str, body: dict[str, Any] | None = None, **fields: Any) -> None:
        text = json.dumps({"op": op, **(body or {}), **fields}).encode()
        self.socket.sendall(struct.pack("!I", len(text)) + text)

    def receive(self, *wanted: str) -> dict[str, Any] | None:
        """Return the fields of the next message of these kinds; None if the peer has closed."""
        while True:
            try:
                text = self._read(struct.unpack("!I", self._read(4))[0])
            except (EOFError, ConnectionResetError):
                return None
            message = json.loads(text)
            if message["op"] in wanted:
                return {name: value for name, value in message.items() if name != "op"}

    def receive_soon(self, step: Callable[[], object], *wanted: str) -> dict[str, Any] | None:
        """As ``receive``, from a peer in this process: calls ``step`` until something has arrived."""
        self.socket.setblocking(False)
        while True:
            step()
            try:
                self.socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return None
            self.socket.settimeout(scaled_timeout(30))
            return self.receive(*wanted)

    def ended(self) -> bool:
        """Wait until the peer has closed."""
        return self.receive() is None

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = self.socket.recv(count - len(data))
            if not got:
                raise EOFError
            data += got
        return data


def make_node_spec(number: int, host: str = "evil", ranks: int = 1) -> dict[str, Any]:
    return {"node_rank": number, "host": host, "devices": ["cpu"] * ranks, "threads": "1"}


def make_assignment(number: int, nnodes: int = 2, world_size: int = 2) -> dict[str, Any]:
    """Return the node assignment of a node of one rank among others of one rank."""
    return {"node_rank": number, "nnodes": nnodes, "first_rank": number, "world_size": world_size}


def make_hello(number: int = 1, **changed: Any) -> dict[str, Any]:
    """Return a hello that fits to any job of two nodes in these tests."""
    body: dict[str, Any] = {
        "node_spec": make_node_spec(number), "nnodes": "2", "run_id": None, "target": "x.py", "fingerprint": None,
        "max_restarts": 0, "versions": {"python": PYTHON}, "gpus": [], "nonce": "0",
    }  # fmt: skip
    return {**body, **changed}


def make_failure(rank: int = 1, **changed: Any) -> dict[str, Any]:
    """Return the failure of a rank of that node."""
    body = {
        "rank": rank, "local_rank": 0, "host": "evil", "pid": 1, "attempt": 0, "exit_code": 3, "signal": None,
        "message": "ValueError: no", "traceback": None, "moment": 1e9, "hint": None,
    }  # fmt: skip
    return {**body, **changed}


def make_arrivals(rank: int = 1, **changed: Any) -> dict[str, Any]:
    """Return the last collective arrivals of a rank of that node."""
    return {"rank": rank, "group": "0", "description": "", "number": 1, "began": 1e9, "gaps": [5], **changed}


def join_as_node_1(job: Any, **changed: Any) -> FakePeer:
    """Join the launcher of node 0 of ``job`` (test_joining's Nodes) as its node 1."""
    peer = FakePeer(job.call())
    assert peer.receive("Welcome")
    peer.send("NodeHello", make_hello(**changed))
    return peer


class FakeNodeZero:
    """Plays node 0 for the launcher of node 1 of ``job``."""

    def __init__(self, job: Any) -> None:
        self._server = socket.create_server(("127.0.0.1", job.port + 1))

    def greet(self) -> FakePeer:
        """Accept the next node, send Welcome and read its hello."""
        sock, _ = self._server.accept()
        peer = FakePeer(sock)
        peer.send("Welcome", ddplaunch=PROTOCOL_VERSION, nonce="0")
        hello = peer.receive("NodeHello")
        assert hello
        self.share = hello["node_spec"]
        return peer

    def meet(self, **joined: Any) -> FakePeer:
        """Accept the next node and send JoinAccepted, with these changes."""
        peer = self.greet()
        peer.send("JoinAccepted", {"run_id": "theirs", "heartbeat_timeout_s": 15.0, **joined})
        return peer

    def close(self) -> None:
        self._server.close()


HOST = os.uname().nodename
