"""A job's machine that a test drives step by step, for what is no history: results, memory, features, other files."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeVar

from ddplaunch.base.options import Options
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import Feature
from ddplaunch.core.job.commands import Accept, Disconnect, Refuse, Send
from ddplaunch.core.job.job_events import (
    ConnectionLost,
    DeadlineDue,
    HelloReceived,
    MessageReceived,
    Start,
)
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.core.machine import MachineEvent
from ddplaunch.core.messages import Message, NodeHello
from ddplaunch.features.check.options import Checking
from tests.core.job.job_world import make_config, make_hello

CHECKED = Options({Checking: Checking(check=True)}, {})
"""The options of a job whose nodes check their machines."""

LEAVES = "SIGTERM on node 1 (n1): it leaves the job; stopping the ranks, to continue without it"

M = TypeVar("M", bound=Message)


class Job:
    """A job's machine with simulated nodes and a simulated clock; ``sent`` has the messages to the nodes."""

    def __init__(self, features: Iterable[tuple[str, Feature]] | None = None, **rules: Any) -> None:
        self.now = 0.0
        self.sent: list[tuple[int, Message]] = []
        self.disconnected: list[int] = []
        self.replies: list[Accept | Refuse] = []
        self.rules = make_config(**rules)
        self.start(self.hello(0), features)

    def start(self, hello: NodeHello, features: Iterable[tuple[str, Feature]] | None = None) -> None:
        self.machine = JobMachine(self.rules, hello, "id", features)
        self.on(Start())

    def on(self, event: MachineEvent) -> None:
        """Let an event happen now."""
        for command in self.machine.on(event, Now(self.now, time.time())):
            match command:
                case Send(number, message):
                    self.sent.append((number, message))
                case Disconnect(number):
                    self.disconnected.append(number)
                case Accept() | Refuse():
                    self.replies.append(command)

    def hello(self, number: int, **changed: Any) -> NodeHello:
        return make_hello(self.rules, number, **changed)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self.machine.wake_at()) is not None and at <= end:
            self.now = max(self.now, at)
            self.on(DeadlineDue())
        self.now = end

    def join(self, *numbers: int) -> None:
        for number in numbers:
            self.admit(self.hello(number))

    def admit(self, hello: NodeHello) -> NodeHello:
        """Let a node join; return its hello with the node rank that it got."""
        reply = self._reply_to(hello)
        assert isinstance(reply, Accept), reply
        return reply.hello

    def refusal(self, hello: NodeHello) -> messages.JoinRefused:
        reply = self._reply_to(hello)
        assert isinstance(reply, Refuse), reply
        return reply.refusal

    def _reply_to(self, hello: NodeHello) -> Accept | Refuse:
        connection = len(self.replies)
        self.on(HelloReceived(connection, hello))
        (reply,) = self.replies[connection:]
        assert reply.connection == connection
        return reply

    def lose(self, number: int, reason: str = "its connection closed", silent_s: float = 0.0) -> None:
        self.on(ConnectionLost(number, reason, silent_s))

    def send(self, number: int, message: messages.FromNode) -> None:
        self.on(MessageReceived(number, message))

    def fail(
        self, number: int, rank: int, attempt: int = 0, clock: float | None = None, **fields: object
    ) -> RankFailure:
        clock = time.time() if clock is None else clock
        values = {
            "rank": rank, "local_rank": 0, "host": f"n{number}", "pid": 1, "attempt": attempt, "exit_code": 3,
            "signal": None, "message": None, "traceback": None, "moment": clock, "hint": None,
        }  # fmt: skip
        failure = RankFailure(**{**values, **fields})  # type: ignore[arg-type]
        self.send(number, messages.FailureReported(attempt, failure, clock))
        return failure

    def drain(
        self,
        number: int,
        *failures: RankFailure,
        attempt: int = 0,
        stopped: int = 0,
        heeded: bool = False,
        broken: messages.LauncherFailure | None = None,
    ) -> None:
        tails = tuple((failure.rank, failure.tail) for failure in failures)
        self.send(number, messages.AttemptReport(attempt, stopped, time.time(), broken, heeded, tails))

    def take(self, kind: type[M], number: int | None = None) -> list[M]:
        """The messages of this kind that were sent since the last call."""
        found = [m for n, m in self.sent if isinstance(m, kind) and number in (None, n)]
        self.sent = [(n, m) for n, m in self.sent if not (isinstance(m, kind) and number in (None, n))]
        return found

    def outcome(self, number: int) -> messages.EndJob:
        (end,) = self.take(messages.EndJob, number)
        assert isinstance(end, messages.EndJob)
        return end


def joined(*numbers: int, **rules: Any) -> Job:
    """A job that these nodes have joined: as many as it has, where ``rules`` do not say."""
    given: dict[str, Any] = {"min_nodes": len(numbers) + 1, **rules}
    job = Job(**given)
    job.join(*numbers)
    return job


def notes_of(job: Job, number: int = 0) -> list[str]:
    return [
        message.text for message in job.take(messages.NoteMessage, number) if isinstance(message, messages.NoteMessage)
    ]
