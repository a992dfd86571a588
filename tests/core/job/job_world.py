"""A ``JobMachine`` in a simulated world: nodes with two ranks each, a clock, and its commands as short texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from ddplaunch.base.text import signal_name
from ddplaunch.core import messages
from ddplaunch.core.failures import JobResult, RankFailure
from ddplaunch.core.feature import Feature
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.job_attempt import JobPhase
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Command, MachineEvent
from ddplaunch.core.messages import NodeHello
from ddplaunch.core.options import Stopping
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions
from tests.core.job_configs import make_job_config
from tests.core.machine_histories import WALL, MachineWorld, Step


def make_config(**rules: Any) -> JobConfig:
    """A job of one node without inspection, but for ``rules``."""
    return make_job_config(**{"max_nodes": rules.get("min_nodes", 1), "inspect": False, **rules})


def make_hello(config: JobConfig, number: int, **changed: Any) -> NodeHello:
    """The hello of a node with two ranks, on the host "n" and its number."""
    fields = {
        "node_spec": NodeSpec(number, f"n{number}", ("cpu", "cpu")), "nnodes": config.nnodes_text, "run_id": None,
        "target": "train.py", "fingerprint": "abc", "max_restarts": config.options[Stopping].max_restarts,
        "versions": Versions("3.11", "2.13"), "gpus": (),
    }  # fmt: skip
    return NodeHello(**{**fields, **changed})


class World(MachineWorld):
    """The nodes around a machine. ``now`` is the monotonic clock, in seconds."""

    def __init__(
        self, joined: Iterable[int] = (), *, features: Iterable[tuple[str, Feature]] | None = (), **rules: Any
    ) -> None:
        """``joined``: nodes that have joined already; what followed is left out. ``features``: None for all."""
        numbers = tuple(joined)
        self.config = make_config(**{"min_nodes": len(numbers) + 1, **rules})
        self.machine = JobMachine(self.config, make_hello(self.config, 0), "id", features)
        self._connections = 0
        self.nodes = {0}
        self.attempt_ends: list[tuple[int, int | None, str]] = []  # attempt, exit code and why, as observers see them
        self.on(ev.Start())
        for number in numbers:
            self.describe_all(self.on(joins(number)(self)))

    @property
    def wall(self) -> float:
        return WALL + self.now

    def next_connection(self) -> int:
        self._connections += 1
        return self._connections

    def on(self, event: MachineEvent) -> list[Command]:
        """Let an event happen now."""
        if isinstance(event, ev.ConnectionLost):
            self.nodes.discard(event.node_rank)
        return super().on(event)

    def at(self, seconds: float, event: Happening, *expected: str) -> None:
        """Let time pass, then something happen; assert all commands since the last call."""
        found = self.play(seconds, event)
        assert found == list(expected), f"at {seconds:g} s: {found}"

    def play(self, seconds: float, event: Happening) -> list[str]:
        """As of any world; a tuple is the message of a node."""
        if isinstance(event, tuple):
            event = ev.MessageReceived(*event)
        return super().play(seconds, event)

    def describe_all(self, commands: Sequence[Command]) -> list[str]:
        """The commands in a few words; what goes to several nodes is one line, with them in their order."""
        receivers: dict[str, list[int]] = {}
        for command in commands:
            match command:
                case do.Send(number, messages.AttemptEnded() as ended):  # only observers see it
                    if number == 0:
                        self.attempt_ends.append((ended.attempt, ended.code, ended.why))
                case do.Send(number, message):
                    receivers.setdefault(describe(message), []).append(number)
                case do.Accept(_, hello, late):
                    self.nodes.add(hello.node_spec.node_rank)
                    receivers["accept" + ", late" * late] = [hello.node_spec.node_rank]
                case do.Refuse(_, refusal):
                    receivers[f"refuse: {refusal.message}"] = []
                case do.Disconnect(number):
                    self.nodes.discard(number)
                    receivers["disconnect"] = [number]
        return [self._name(text, numbers) + text for text, numbers in receivers.items()]

    def _name(self, text: str, numbers: list[int]) -> str:
        """Name the receivers; those of a start in the order of their ranks."""
        order = numbers if text.startswith("start") else sorted(numbers)
        if len(self.nodes) > 1 and order == sorted(self.nodes):
            return "all: "
        return f"{', '.join(map(str, order))}: " if numbers else ""


Happening = MachineEvent | Callable[[World], MachineEvent] | tuple[int, messages.Message] | None
"""An event, also one that depends on the world; or the message of a node; or nothing: time passes."""


def describe(message: messages.Message) -> str:
    """A message in a few words."""
    match message:
        case messages.StartAttempt(attempt=attempt):
            return f"start attempt {attempt}"
        case messages.StopAttempt(signal=number, grace_s=grace_s):
            return f"stop, {signal_name(number)}, {grace_s:g} s"
        case messages.Restarting(text=text):
            return f"restart: {'; '.join(text.splitlines())}"
        case messages.EndJob(outcome=outcome):
            return f"end, {_describe_result(outcome)}"
        case messages.NoteMessage(text=text):
            return f"note: {text}"
        case messages.JoinStatus():
            return f"status: {message.describe()}"
    return type(message).__name__


def _describe_result(result: JobResult) -> str:
    words = [str(result.code)]
    if result.verdict is not None:
        words.append(f"rank {result.verdict.first.rank} failed, {result.verdict.stopped} stopped")
    if result.usage_error is not None:
        words.append(f"error {result.usage_error[0]}")
    return ", ".join(words) + (f": {result.remark}" if result.remark else "")


class Rules(Struct, frozen=True):
    """The job of a history: nodes that have joined already, and the settings of ``JobConfig`` that are not as usual."""

    joined: tuple[int, ...]
    settings: dict[str, Any]


def job(nodes: int = 1, **settings: Any) -> Rules:
    """The job of a history, which this number of nodes has joined at 0: if it needs no more, the first attempt runs."""
    return Rules((*range(1, nodes),), settings)


History = tuple[Rules | Step, ...]
"""A job and what happens to it, in order."""


def replay(history: History) -> World:
    """Replay a history; assert the commands of each step."""
    rules, *steps = history
    assert isinstance(rules, Rules)
    world = World(rules.joined, **rules.settings)
    world.replay(each for each in steps if isinstance(each, Step))
    return world


# ------------------------------------------------------------------------------------------------- events, in few words


def joins(number: int, **changed: Any) -> Callable[[World], ev.HelloReceived]:
    return lambda world: ev.HelloReceived(world.next_connection(), make_hello(world.config, number, **changed))


def lost(node: int, reason: str = "it went", silent_s: float = 0.0) -> ev.ConnectionLost:
    return ev.ConnectionLost(node, reason, silent_s)


def failed(
    node: int, rank: int, attempt: int = 0, *, ago: float = 0.0, behind: float = 0.0, **fields: Any
) -> Callable[[World], ev.MessageReceived]:
    """A rank has failed ``ago`` seconds before; the clock of its node is ``behind`` by this."""
    values = {"exit_code": 1, "signal": None, "message": None, "traceback": None, "hint": None, **fields}

    def make(world: World) -> ev.MessageReceived:
        clock = world.wall - behind
        failure = RankFailure(rank, rank % 2, f"n{node}", 1, attempt=attempt, moment=clock - ago, **values)
        return ev.MessageReceived(node, messages.FailureReported(attempt, failure, clock))

    return make


def finished(node: int, attempt: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(node, messages.RanksFinished(attempt))


def reported(
    node: int, attempt: int = 0, *, stopped: int = 0, broken: str = "", **fields: Any
) -> Callable[[World], ev.MessageReceived]:
    """The ranks of a node have ended; ``broken``: because of a process of the launcher that has ended now."""

    def make(world: World) -> ev.MessageReceived:
        failure = messages.LauncherFailure(broken, world.wall) if broken else None
        return ev.MessageReceived(node, messages.AttemptReport(attempt, stopped, world.wall, failure, **fields))

    return make


def signalled(node: int, number: int, *, again: bool = False, reason: str = "") -> ev.MessageReceived:
    return ev.MessageReceived(node, messages.StopRequested(number, again, reason))


def noticed(node: int, number: int) -> ev.MessageReceived:
    """The scheduler's notice that the job is preempted."""
    return ev.MessageReceived(node, messages.PreemptionNotice(number))


def passed(node: int, attempt: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(node, messages.CheckPassed(attempt))


def check_goes_on(node: int, attempt: int = 0) -> ev.MessageReceived:
    return ev.MessageReceived(node, messages.CheckContinues(attempt))


def cannot_start(node: int, message: str) -> ev.MessageReceived:
    """The check of a node has failed, or it cannot start its ranks."""
    return ev.MessageReceived(node, messages.NodeStartError(message))


def is_over(world: World) -> bool:
    """Whether the job has ended, and nothing is left to do."""
    return world.machine.phase is JobPhase.ENDED and world.machine.wake_at() is None
