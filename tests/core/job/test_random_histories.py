"""Random histories of a job: in any order of what nodes may do, the machine asserts nothing, and the job ends for all.

``DDPLAUNCH_HISTORIES=100000 pytest -s tests/core/job/test_random_histories.py -k many`` checks more of them. A history
that fails is printed, with the seed that repeats it: ``check(SEED)``.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, deque
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.base.options import OptionGroup, Options
from ddplaunch.core import messages
from ddplaunch.core.clock_offset import ClockOffset
from ddplaunch.core.deadlines import Now
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import Feature, JobContext, JobSide
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job import commands as do
from ddplaunch.core.job import job_events as ev
from ddplaunch.core.job.job_attempt import JobPhase, StopCause
from ddplaunch.core.job.machine import JobMachine
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Command, MachineEvent
from ddplaunch.core.messages import NodeHello, RpcReply, RpcRequest
from ddplaunch.core.options import Stopping
from ddplaunch.features.check.messages import CheckNode
from ddplaunch.features.check.options import Checking
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.messages import ArrivalsReported, StallSuspected, StragglersFound
from ddplaunch.observe.options import Hangs
from ddplaunch.system.plan.node_spec import NodeSpec
from ddplaunch.system.target.versions import Versions
from tests.core.job_configs import make_job_config

HISTORIES = int(os.environ.get("DDPLAUNCH_HISTORIES", "2500"))
STEPS = 150
"""The most random steps of a history; then all nodes finish what they do."""

WALL = 1e9
"""The time since 1970 at the start."""


class Unreliable(Feature, JobSide):
    """A feature that requests at random what a feature may request, and raises at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def make_job_side(self, context: JobContext) -> JobSide:
        self._context = context
        return self

    def _act(self, *arguments: object) -> None:
        chance = self._random.random()
        if chance < 0.02:
            raise ValueError("by chance")
        if chance < 0.1:
            how = {"may_restart": True} if self._random.random() < 0.5 else {}
            if self._random.random() < 0.3:
                how = {"of_program": True, "code": 7}
            self._context.stop_attempt(StopCause("a limit by chance", None, **how))
        elif chance < 0.2:
            self._context.set_deadline(self._random.choice("ab"), self._random.choice((0, 1, 20)))
        elif chance < 0.3:
            self._context.gather("inspect", Detail.STATE, self._act)

    on_message = on_attempt_start = on_job_end = _act  # type: ignore[assignment]

    def on_deadline(self, name: str) -> None:
        if name == "hold":
            self._is_over = True
            self._context.allow_end()
        else:
            self._act()

    def before_start(self, attempt: int) -> CheckNode | None:
        self._is_over = self._random.random() < 0.5
        return CheckNode(attempt, None) if self._random.random() < 0.3 else None

    def holds_end(self) -> bool:
        if not self._is_over:
            self._context.set_deadline("hold", 5)
        self._act()
        return not self._is_over

    def may_explain(self, failure: RankFailure) -> bool:
        return self._random.random() < 0.3


class Node:
    """A node as the world sees it. What node 0 sends waits in ``inbox`` until the node reads it."""

    def __init__(self, hello: NodeHello) -> None:
        self.number, self.name = hello.node_spec.node_rank, hello.node_spec.host
        self.inbox: deque[Any] = deque()
        self.attempt: Any = None  # of which it has not sent the AttemptReport
        self.ranks = range(0)
        self.check: Any = None
        self.requests: list[tuple[RpcRequest, range]] = []
        self.signalled = self.ended = False

    def start(self, attempt: int, ranks: range) -> None:
        self.attempt, self.ranks = attempt, ranks
        self.running = list(ranks)
        self.failures: list[RankFailure] = []
        self.stopping = self.started = self.finished = self.holding = False


class History:
    """One job and its nodes."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now, self.events = 0.0, list[tuple[float, MachineEvent | Command]]()
        self.nodes: dict[int, Node] = {}  # that are connected
        self.orders = Counter[tuple[Node, str]]()
        self.config = self._make_config()
        chosen: list[tuple[str, Feature]] = [("unreliable", Unreliable(random))] if random.random() < 0.3 else []
        self.machine = JobMachine(self.config, self._hello(0), "id", [*load_features(), *chosen])
        self.nodes[0] = Node(self._hello(0))
        self.do(ev.Start())
        if random.random() < 0.7:
            for number in range(1, random.randint(1, self.config.max_nodes)):
                self.do(ev.HelloReceived(number, self._hello(number)))

    def _make_config(self) -> JobConfig:
        choose = self.random.choice
        spares = choose((0, 0, 0, 1, 2))
        more = choose((0, 0, 1, 2))
        without_ranks = choose((0, 0, 1)) if not (spares or more) else 0
        min_nodes = self.random.randint(1, 3) + without_ranks
        hangs = Hangs(stall_timeout=60.0, on_stall=choose(("report", "stop", "restart")))
        options: dict[type[OptionGroup], OptionGroup] = {
            Checking: Checking(check=choose((False, False, True))),
            Hangs: hangs,
        }
        return make_job_config(
            min_nodes=min_nodes, max_nodes=min_nodes + more + spares, spares=spares, without_ranks=without_ranks,
            join_timeout=choose((20.0, 1000.0)), join_window=choose((0.0, 10.0)), grace=choose((0.0, 4.0, 30.0)),
            preempt_grace=choose((0.0, 20.0)), max_restarts=choose((0, 1, 5)), restart_backoff=choose((0.0, 3.0)),
            restart_on=choose(("any", "transient", "always", "3,137", "transient,3")), min_uptime=choose((0.0, 5.0)),
            max_membership_changes=choose((1, 100)), grow=choose((False, True)), inspect=choose((False, True)),
            timeout=choose((None, None, 30.0)), options=Options(options, {}),
        )  # fmt: skip

    def _hello(self, number: int, **changed: object) -> NodeHello:
        spec = NodeSpec(number, f"n{number}", ("cpu", "cpu"))
        fields = (
            spec,
            self.config.nnodes_text,
            None,
            "train.py",
            "abc",
            self.config.options[Stopping].max_restarts,
            Versions("3.11"),
            (),
        )
        return replace(NodeHello(*fields), **changed)

    @property
    def story(self) -> str:
        """All events, and below each the commands that followed."""
        return "\n".join(
            f"{moment:8.2f}  {'    ' * isinstance(each, Command)}{each}"[:300] for moment, each in self.events
        )

    def do(self, event: MachineEvent) -> None:
        """Let an event happen, and what follows from it."""
        self.events.append((self.now, event))
        ended = self.machine.phase is JobPhase.ENDED
        commands = self.machine.on(event, Now(self.now, WALL + self.now))
        assert all(isinstance(each, do.Refuse) for each in commands) or not ended, "after the end"
        for command in commands:
            self.events.append((self.now, command))
            match command:
                case do.Send(number, message):
                    self._deliver(self.nodes[number], message)
                case do.Disconnect(number):
                    del self.nodes[number]
                case do.Accept(_, hello):
                    number = hello.node_spec.node_rank
                    self.nodes[number] = Node(hello)
        starts = [each.message for each in commands if isinstance(each, do.Send) and isinstance(each.message, START)]
        if starts:
            assert self.config.min_nodes - self.config.without_ranks <= len(starts) <= self.config.max_active_nodes
            places = [each.assignment.first_rank for each in starts if each.assignment]
            assert sorted(places) == list(range(0, 2 * len(starts), 2))

    def _deliver(self, node: Node, message: Any) -> None:
        node.inbox.append(message)
        if isinstance(message, START | messages.EndJob):
            self.orders[node, f"{type(message).__name__} {getattr(message, 'attempt', '')}"] += 1
        if isinstance(message, START):
            unread = any(isinstance(each, START) for each in list(node.inbox)[:-1])
            assert node.attempt is None, f"{node.name} has ranks of an earlier attempt"
            assert not unread, f"{node.name} has not read the start of an earlier attempt"

    # ------------------------------------------------------------------------------------------- what a node does

    def read(self, node: Node) -> None:
        match node.inbox.popleft():
            case messages.StartAttempt(attempt=attempt, assignment=place):
                assert place
                node.start(attempt, range(place.first_rank, place.first_rank + 2))
            case messages.StopAttempt(attempt=attempt) if attempt == node.attempt:
                node.stopping = True
            case CheckNode(attempt=attempt):
                node.check = attempt
            case RpcRequest() as request:
                node.requests.append((request, node.ranks))
            case messages.EndJob():
                node.ended, node.attempt = True, None

    def send(self, node: Node, message: Any) -> None:
        self.do(ev.MessageReceived(node.number, message))

    def start_ranks(self, node: Node) -> None:
        node.started = True
        self.send(node, messages.RanksStarted(node.attempt))

    def end_rank(self, node: Node, fields: dict[str, Any] | None = None) -> None:
        """A rank ends: with 0, or with a failure."""
        rank = node.running.pop(self.random.randrange(len(node.running)))
        if fields is not None:
            wall = WALL + self.now - self.random.choice((0, 0, 5))
            values = {"exit_code": 1, "signal": None, "message": None, "traceback": None, "hint": None, **fields}
            where = {"rank": rank, "local_rank": rank % 2, "host": node.name, "pid": 1, "attempt": node.attempt}
            failure = RankFailure(moment=wall, **where, **values)
            node.failures.append(failure)
            self.send(node, messages.FailureReported(node.attempt, failure, WALL + self.now))
        elif not node.running and not node.failures:
            self.finish(node)

    def finish(self, node: Node) -> None:
        node.finished = True
        self.send(node, messages.RanksFinished(node.attempt))

    def report(self, node: Node, broken: str = "") -> None:
        """The node's ranks have been stopped, or have ended."""
        number, node.attempt = node.attempt, None
        clock = WALL + self.now
        failure = messages.LauncherFailure(broken, clock) if broken else None
        seen = self.random.random() < 0.2
        tails = tuple((each.rank, each.tail) for each in node.failures)
        report = messages.AttemptReport(number, len(node.running), clock, failure, seen, tails)
        self.send(node, report)

    def reply(self, node: Node) -> None:
        request, ranks = node.requests.pop(0)
        conditions = [RankInspection(rank, node.name, 1, ProcessCondition.ALIVE) for rank in ranks]
        if request.kind == "inspect":
            self.send(node, RpcReply(request.serial, "inspect", Inspection(self.now, tuple(conditions), len(ranks))))

    def pass_check(self, node: Node) -> None:
        assert node.check is not None
        if self.random.random() < 0.2:
            return self.send(node, messages.CheckContinues(node.check))
        number, node.check = node.check, None
        self.send(node, messages.CheckPassed(number))

    def fail_check(self, node: Node) -> None:
        node.check = None
        self.send(node, messages.NodeStartError("no space", None))

    def lose(self, node: Node) -> None:
        del self.nodes[node.number]
        self.do(ev.ConnectionLost(node.number, "its connection closed", self.random.choice((0.0, 3.0))))

    def signal(self, node: Node) -> None:
        again, node.signalled = node.signalled, True
        number = self.random.choice((signal.SIGINT, signal.SIGTERM, signal.SIGTERM))
        self.send(node, messages.StopRequested(number, again, self.random.choice(("", "", "a rank wants it"))))

    def hold(self, node: Node) -> None:
        node.holding = not node.holding
        self.send(node, messages.HoldChanged(node.attempt, node.holding))

    # ------------------------------------------------------------------------------------------- what may happen

    def join(self) -> None:
        free = [number for number in range(self.config.max_nodes) if number not in self.nodes]
        if not free and self.random.random() < 0.9:
            return
        number = self.random.choice(free or [0]) if self.random.random() < 0.99 else 0
        changed = {"versions": Versions("3.12")} if self.random.random() < 0.01 else {}
        given = self.random.random() < 0.7
        self.do(ev.HelloReceived(len(self.events), self._hello(number, has_node_rank=given, **changed)))

    def decline(self) -> None:
        self.do(ev.HelloReceived(len(self.events), messages.JoinDeclined(1, "n1", "no torch", None, None)))

    def wait(self, seconds: float) -> None:
        """Let time pass, with the deadlines meanwhile."""
        end = self.now + seconds
        while (at := self.machine.wake_at()) is not None and at <= end:
            self.now = max(self.now, at)
            self.do(ev.DeadlineDue())
        self.now = end

    def _actions(self, node: Node) -> list[tuple[float, Any]]:
        """Return the possible actions of a node, with weights."""
        if node.ended:
            return [(0.5, lambda: self.lose(node))] if node.number else []
        found: list[tuple[float, Any]] = [
            (0.01, lambda: self.signal(node)),
            (0.005, lambda: self.send(node, messages.PreemptionNotice(signal.SIGUSR2))),
            (0.02, lambda: self.send(node, messages.ForwardSignal(signal.SIGUSR1))),
            (0.02, lambda: self.send(node, RpcRequest(7, "inspect", 3.0, Detail.STATE))),
            (0.02, lambda: self.do(ev.ClockMeasured(node.number, ClockOffset(self.random.uniform(-9, 9), 0.1)))),
            (0.002, lambda: self.send(node, messages.NodeStartError("the target is missing", None))),
        ]
        if node.number:
            found.append((0.05, lambda: self.lose(node)))
        if node.inbox:
            found.append((3.0, lambda: self.read(node)))
        if node.requests:
            found.append((1.0, lambda: self.reply(node)))
        if node.check is not None:
            found += [(1.0, lambda: self.pass_check(node)), (0.1, lambda: self.fail_check(node))]
        if (attempt := node.attempt) is not None:
            found += self._actions_of_ranks(node, attempt)
        return found

    def _actions_of_ranks(self, node: Node, attempt: int) -> list[tuple[float, Any]]:
        earlier = self.random.choice((attempt, attempt, max(0, attempt - 1)))
        found: list[tuple[float, Any]] = [
            (0.05, lambda: self.hold(node)),
            (0.05, lambda: self.send(node, StallSuspected(earlier))),
            (0.05, lambda: self.send(node, messages.ProgressResumed(earlier))),
            (0.05, lambda: self.send(node, StragglersFound(earlier))),
            (0.02, lambda: self.send(node, ArrivalsReported(earlier, ()))),
            (0.02, lambda: self.report(node, "the zygote was lost")),
        ]
        if not node.started:
            found.append((1.0, lambda: self.start_ranks(node)))
        elif node.running:
            found.append((0.2, lambda: self.end_rank(node)))
            found += [(0.06, lambda how=how: self.end_rank(node, how)) for how in FAILURES]
        if node.stopping or node.finished or (node.failures and not node.running):
            found.append((1.0, lambda: self.report(node)))
        return found

    def step(self) -> None:
        """Let one thing happen that may happen now."""
        found: list[tuple[float, Any]] = [
            (0.2, self.join),
            (0.002, self.decline),
            (0.5, lambda: self.wait(self.random.choice((0.0, 0.1, 1.0, 5.0)))),
            (0.03, lambda: self.wait(self.random.choice((40.0, 200.0)))),
        ]
        if (at := self.machine.wake_at()) is not None:
            found.append((0.5, lambda: self.wait(max(0.0, at - self.now))))
        for node in self.nodes.values():
            found += self._actions(node)
        (action,) = self.random.choices([each for _, each in found], [weight for weight, _ in found])
        action()

    def finish_all(self) -> None:
        """Let every node act as ordered, without further failures."""
        for _ in range(200):
            for node in list(self.nodes.values()):
                while node.inbox and not node.ended:
                    self.read(node)
                while node.requests and not node.ended:
                    self.reply(node)
                if node.check is not None and not node.ended:
                    self.pass_check(node)
                if node.attempt is not None:
                    self._finish_attempt(node)
            if self.machine.phase is JobPhase.ENDED:
                return
            self.wait(10.0)
        raise AssertionError(f"the job has not ended: {self.machine.phase}")

    def _finish_attempt(self, node: Node) -> None:
        if node.holding:
            self.hold(node)
        if not node.started:
            self.start_ranks(node)
        while node.running and not node.stopping:
            self.end_rank(node)
        if node.attempt is not None:
            self.report(node)

    def run(self) -> None:
        for _ in range(self.random.randrange(STEPS)):
            self.step()
        self.finish_all()
        assert self.machine.wake_at() is None, "a deadline is left"
        assert all(count == 1 for count in self.orders.values()), "an order came twice"
        for node in self.nodes.values():
            assert self.orders[node, "EndJob "] == 1, f"{node.name} does not know that the job has ended"
        for _ in range(5):  # what comes after the end changes nothing
            self.step()


START = messages.StartAttempt
TRACEBACK = 'Traceback\n  File "/job/train.py", line 5, in main\nValueError: boom'
FAILURES: tuple[dict[str, Any], ...] = (
    {},
    {"exit_code": None, "signal": 9},
    {"message": "ValueError: boom", "traceback": TRACEBACK},
    {"message": "RuntimeError: Connection closed by peer"},
    {"message": "RuntimeError: the collective timed out after 600 s"},
)


def check(seed: int) -> None:
    history = History(seed)
    try:
        history.run()
    except Exception as error:
        raise AssertionError(f"history {seed}: {error!r}\n{history.config}\n{history.story}") from error


def test_histories() -> None:
    for seed in range(200):
        check(seed)


def test_equal_histories_have_equal_commands() -> None:
    """The machine reads no clock."""
    for seed in range(40):
        first, second = History(seed), History(seed)
        first.run()
        second.run()
        assert first.events == second.events, seed


@pytest.mark.ci
@pytest.mark.slow
def test_many_histories() -> None:
    began = time.process_time()
    for seed in range(HISTORIES):
        check(seed)
    print(f"\n{HISTORIES / (time.process_time() - began):.0f} histories a second")
