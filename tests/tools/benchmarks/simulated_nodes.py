"""Simulated nodes: each sends what a launcher would send, and runs no rank; all are in this process.

They read only the names of messages, so that the CPU time is left to node 0, which is real.
"""

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.frames import LENGTH
from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.types import encode
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.messages import (
    AttemptReport,
    FailureReported,
    HeartbeatMessage,
    Message,
    NodeHello,
    RpcReply,
)
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection, Thread
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions

RETRY_S = 0.5
"""After which a node that node 0 has dropped connects again."""

HEARTBEAT_INTERVAL_S = 15.0 / 4


class SimulatedNode:
    def __init__(self, loop: EventLoop, hello: NodeHello, received: Counter[str]) -> None:
        """``received`` counts the messages of all nodes by their names, "bytes", and "dropped" connections."""
        self._loop, self._hello, self._received = loop, hello, received
        self._stopped = 1
        self._has_reported = self._is_job_over = self.joined = False
        self._socket: socket.socket | None = None

    def connect(self, port: int) -> None:
        self._buffer = bytearray()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(("127.0.0.1", port))
        self._loop.watch_fd(self._socket.fileno(), partial(self._on_readable, port))

    def close(self) -> None:
        if self._socket is not None:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def send(self, message: Message) -> None:
        """Send a message, which is small enough for the socket's buffer, unless the connection is lost."""
        with suppress(OSError):
            if self._socket is not None:
                self._socket.send(encode(message))

    def fail(self) -> None:
        """Report what a launcher reports when its rank is killed."""
        spec = self._hello.node_spec
        failure = RankFailure(spec.node_rank, 0, spec.host, 1, 0, None, 9, None, None, time.time(), None)
        self._stopped = 0
        self.send(FailureReported(0, failure, time.time()))

    def _inspect(self, serial: int) -> RpcReply:
        """The inspection of its rank, which waits."""
        spec = self._hello.node_spec
        threads = (Thread((Frame("wait", "train.py", 7, own=True),)),)
        ranks = (RankInspection(spec.node_rank, spec.host, 1, ProcessCondition.ALIVE, threads=threads),)
        return RpcReply(serial, "inspect", Inspection(time.time(), ranks, 1))

    def _on_readable(self, port: int) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            if not self._is_job_over:
                self._received["dropped"] += 1
                self._loop.call_later(RETRY_S, partial(self.connect, port))
            return
        self._received["bytes"] += len(data)
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            self._on_message(body)

    def _on_message(self, body: bytes) -> None:
        name = body[7:64].partition(b'"')[0].decode()  # behind {"op":"
        self._received[name] += 1
        match name:
            case "Welcome":
                self.send(self._hello)
            case "JoinAccepted":
                self.joined = True
            case "RpcRequest":
                self.send(self._inspect(json.loads(body)["serial"]))
            case "StopAttempt" if not self._has_reported:
                self._has_reported = True
                self.send(AttemptReport(0, self._stopped, time.time()))
            case "EndJob" | "JoinRefused":
                self._is_job_over = True


class SimulatedNodes:
    """Nodes 1 to ``count`` - 1 of a job, on a loop of their own."""

    def __init__(self, count: int) -> None:
        self.received: Counter[str] = Counter()
        self._loop = EventLoop()
        python = Versions(f"{sys.version_info.major}.{sys.version_info.minor}")
        self.nodes = []
        for rank in range(1, count):
            spec = NodeSpec(rank, f"host-{rank:05}", ("cpu",))
            hello = NodeHello(spec, str(count), None, "/bin/sh", None, 0, python, (), "0" * 32)
            self.nodes.append(SimulatedNode(self._loop, hello, self.received))
        self._loop.call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeats)
        self._schedule_wake_up()

    def connect(self, port: int) -> None:
        """Connect all nodes to node 0's control port at once."""
        for node in self.nodes:
            node.connect(port)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Run until a condition is true, or the timeout; return whether it was."""
        deadline = time.monotonic() + timeout_s
        while not (holds := condition()) and time.monotonic() < deadline:
            self._loop.run_once()
        return holds

    def _schedule_wake_up(self) -> None:
        """Let ``run_until`` check its deadline."""
        self._loop.call_later(0.02, self._schedule_wake_up)

    def _send_heartbeats(self) -> None:
        self._loop.call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeats)
        for node in self.nodes:
            if node.joined:  # node 0 drops a node that sends one before
                node.send(HeartbeatMessage(time.time()))
