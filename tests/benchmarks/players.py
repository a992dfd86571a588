"""Simulates many nodes in this process: each sends what a launcher would send, and runs no rank.

They read no more of a message than its name, so that the time goes into node 0, which is real.
"""

import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from ddplaunch.base.event_loop import EventLoop
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
from ddplaunch.features.inspect.diagnosis.inspection import Inspection, ProcessCondition, RankInspection, Thread
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions

AGAIN = 0.5
"""Seconds after which a player that node 0 has dropped calls again."""

DEVICES = ("cpu",)


class Player:
    """One simulated node."""

    def __init__(self, loop: EventLoop, hello: NodeHello, received: Counter[str]) -> None:
        """``received`` counts messages of all players by their names, and "dropped" and "refused" connections."""
        self._loop = loop
        self._hello = hello
        self._received = received
        self._stopped = 1
        self._drained = False
        self.joined = self.over = False
        self._socket: socket.socket | None = None

    def call(self, port: int) -> None:
        self._coming = bytearray()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(("127.0.0.1", port))
        self._loop.watch_fd(self._socket.fileno(), partial(self._readable, port))

    def close(self) -> None:
        if self._socket is not None:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def say(self, message: Message) -> None:
        self.say_frame(encode(message))

    def say_frame(self, frame: bytes) -> None:
        """Small enough that the kernel takes all of it, or the connection is lost."""
        try:
            if self._socket is not None:
                self._socket.send(frame)
        except OSError:
            pass

    def fail(self) -> None:
        """Report what a launcher does when its rank is killed."""
        share = self._hello.node_spec
        failure = RankFailure(share.node_rank, 0, share.host, 1, 0, None, 9, None, None, time.time(), None)
        self._stopped = 0
        self.say(FailureReported(0, failure, time.time()))

    def _found(self, serial: int) -> RpcReply:
        """Return its inspection of its rank, which waits."""
        share = self._hello.node_spec
        frame = Frame("wait", "train.py", 7, own=True)
        ranks = (RankInspection(share.node_rank, share.host, 1, ProcessCondition.ALIVE, threads=(Thread((frame,)),)),)
        return RpcReply(serial, "inspect", Inspection(time.time(), ranks, 1))

    def _readable(self, port: int) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            if not self.over:
                self._received["dropped"] += 1
                self._loop.call_later(AGAIN, partial(self.call, port))
            return
        self._coming += data
        while len(self._coming) >= 4:
            (length,) = struct.unpack_from("!I", self._coming)
            if len(self._coming) < 4 + length:
                return
            name = bytes(self._coming[11:64]).partition(b'"')[0].decode()  # behind the length and {"op":"
            body = bytes(self._coming[4 : 4 + length]) if name == "RpcRequest" else b""
            del self._coming[: 4 + length]
            self._received[name] += 1
            match name:
                case "Welcome":
                    self.say(self._hello)
                case "JoinAccepted":
                    self.joined = True
                case "RpcRequest":
                    self.say(self._found(json.loads(body)["serial"]))
                case "StopAttempt" if not self._drained:
                    self._drained = True
                    self.say(AttemptReport(0, self._stopped, time.time()))
                case "EndJob" | "JoinRefused":
                    self.over = True


class Players:
    """Nodes 1 to ``nodes`` - 1 of a job, on a loop of their own."""

    def __init__(self, nodes: int, heartbeat_timeout: float = 15.0) -> None:
        """``heartbeat_timeout`` is node 0's."""
        self.received: Counter[str] = Counter()
        self._loop = EventLoop()
        self._beat_every = heartbeat_timeout / 4
        python = Versions(f"{sys.version_info.major}.{sys.version_info.minor}")
        hellos = [
            NodeHello(
                NodeSpec(rank, f"host-{rank:05}", DEVICES), str(nodes), None, "/bin/sh", None, 0, python, (), "0" * 32
            )
            for rank in range(1, nodes)
        ]
        self.all = [Player(self._loop, hello, self.received) for hello in hellos]
        self._loop.call_later(self._beat_every, self._beat)
        self._tick()

    def call(self, port: int) -> None:
        """All call node 0's control port at once, as a cluster's nodes do that were all started."""
        for player in self.all:
            player.call(port)

    def close(self) -> None:
        for player in self.all:
            player.close()

    def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Play until ``done``, at most ``seconds``; return whether it was."""
        over = time.monotonic() + seconds
        while not (there := done()) and time.monotonic() < over:
            self._loop.run_once()
        return there

    def _tick(self) -> None:
        """Let ``until`` look at the clock."""
        self._loop.call_later(0.02, self._tick)

    def _beat(self) -> None:
        self._loop.call_later(self._beat_every, self._beat)
        frame = encode(HeartbeatMessage(time.time()))
        for player in self.all:
            if player.joined:  # node 0 drops who speaks before
                player.say_frame(frame)
