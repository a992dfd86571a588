"""Replays of users who debug ranks: ranks and users are simulated, and timers expire when the test says so."""

from __future__ import annotations

import os
import signal
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.base.types import decode, encode
from ddplaunch.core.messages import HoldChanged, RpcReply, StopRequested
from ddplaunch.features.debug.debug_server import STOP_TIMEOUT_S, DebugServer
from ddplaunch.features.debug.debugger_prompt import WAITING, DebuggerPrompt
from ddplaunch.features.debug.messages import (
    AttachUser,
    CompletionRequest,
    DebuggerOutput,
    DetachUser,
    LineInput,
    QuitRequested,
    RankResumed,
    RankStopped,
    TerminalRequest,
    UserOutput,
)
from ddplaunch.features.debug.user_terminals import RemoteTerminal
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from tests.conftest import wait_until
from tests.core.net.fake_peer import ManualLoop

IDLE_S = 900.0
TO_RANKS: Any = (AttachUser, CompletionRequest, DetachUser, LineInput, TerminalRequest)


class Node:
    """Ranks 0 and 1 of four, on the first of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.found = ManualLoop(), Inspection(0.0, (), 4)
        self.notes, self.sent, self.held, self.signals = list[str](), list[Any](), list[bool](), list[int]()
        self.sockets: dict[int, socket.socket] = {}
        self.loop.guard = lambda call: call  # type: ignore[attr-defined]
        rpc = SimpleNamespace(request=lambda *args: args[-1](RpcReply(1, "inspect", self.found)))
        given: Any = (self.loop, SimpleNamespace(path=str(folder)), IDLE_S, rpc, self.notes.append, self.sent.append)
        self.server = DebugServer(*given)
        process = SimpleNamespace(pid=os.getpid(), send=self.signals.append)
        channel = SimpleNamespace(signals={"debug": int(signal.SIGINT)}, read_pending=lambda: None)
        local = [SimpleNamespace(rank=rank, host="n0") for rank in (0, 1)]
        plan = SimpleNamespace(world_size=4, nnodes=2, node_rank=0, run_id="demo", local_ranks=local)
        self.ranks: Any = SimpleNamespace(
            number=1,
            plan=plan,
            set_waits_for_user=self.held.append,
            processes={0: process, 1: process},
            channels={0: channel},
        )
        self.server.start_attempt(self.ranks)

    def step(self) -> None:
        for _ in range(4):
            self.loop.step()

    def send(self, message: Any) -> None:
        """Send a message of a rank."""
        if message.rank not in self.sockets:
            sock = self.sockets[message.rank] = socket.socket(socket.AF_UNIX)
            sock.connect(self.server.socket_path())
        self.sockets[message.rank].sendall(encode(message))
        self.step()

    def stop(self, rank: int, line: int = 3, **fields: Any) -> None:
        self.send(RankStopped(rank, "train.py", line, "", **fields))
        if not fields.get("tool"):
            self.prompt(rank)

    def prompt(self, rank: int, output: str = "") -> None:
        self.send(DebuggerOutput(rank, output.encode(), f"(rank {rank}) "))

    def received(self, rank: int) -> list[Any]:
        """What a rank has received since."""
        self.step()
        found = []
        try:
            data = self.sockets[rank].recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            data = b""
        while data:
            end = 4 + struct.unpack_from("!I", data)[0]
            found.append(decode(data[4:end], TO_RANKS))
            data = data[end:]
        return found


class User:
    """A user at a terminal of this width, or a pipe."""

    def __init__(self, node: Node, columns: int = 0, **how: Any) -> None:
        self._node, self._sent, self.codes, self.has_left = node, list[UserOutput](), list[int](), False
        self.terminal = RemoteTerminal(self._sent.append, self._leave, columns, 24)
        self.prompt = DebuggerPrompt(node.server, self.terminal, lambda call: call, **how)
        node.server.attach_user(self.prompt)

    def _leave(self) -> None:
        self.has_left = True

    def type(self, text: str) -> None:
        self.terminal.has_input = True
        self.prompt.on_input(text.encode())

    def shown(self) -> str:
        """What was shown since."""
        self._node.step()
        sent, self._sent[:] = [*self._sent], []
        self.codes += [each.exit_code for each in sent if each.exit_code is not None]
        return b"".join(each.data for each in sent).decode()


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.server.close()
    for each in made.sockets.values():
        each.close()


def test_a_job_is_held_while_a_rank_is_in_its_debugger(node):
    node.stop(1)
    assert node.notes == ["rank 1 is at a breakpoint: train.py:3; attach with `ddplaunch debug demo` on n0"]
    assert (node.sent, node.held) == ([HoldChanged(1, True)], [True])
    user = User(node)
    assert user.shown() == "ddplaunch: rank 1 is at train.py:3\n"
    user.type("n\n")
    assert node.received(1) == [AttachUser(1), LineInput(1, "n")]
    node.send(RankResumed(1, is_stepping=True))
    node.stop(1, 4)
    assert (len(node.notes), node.sent[1:], user.shown()) == (1, [], "(rank 1) n\n")
    node.server.detach_user(user.prompt)
    node.send(RankResumed(1))
    assert (node.received(1), node.sent[1:], node.held) == ([DetachUser(1)], [HoldChanged(1, False)], [True, False])
    node.server.detach_user(user.prompt)
    node.stop(1, 5)
    assert (node.received(1), len(node.notes), node.held) == ([], 1, [True, False]), "it stops no more"


def test_only_the_ranks_of_an_attempt_that_ends_are_released(node):
    node.stop(0)
    node.server.release_ranks(0)
    assert (node.received(0), node.server.is_active) == ([], True)
    node.server.release_ranks(1)
    assert (node.received(0), node.server.is_active, node.held) == ([DetachUser(0)], False, [True, False])


def test_a_rank_resumes_when_nothing_was_typed_for_long(node):
    user = User(node)
    node.stop(0)
    user.type("p 1\n")
    node.prompt(0, "1\n")
    timers = [timer.callback is not None for seconds, timer in node.loop.timers if seconds == IDLE_S]
    assert timers == [False, True], "each line restarts the timer"
    node.loop.let_expire(IDLE_S)
    assert node.notes[1:] == ["rank 0 resumes: no input for 15m00s (--debug-timeout)"]
    assert node.received(0) == [LineInput(0, "p 1"), DetachUser(0)]
    node.send(RankResumed(0))
    node.loop.let_expire(IDLE_S)
    assert len(node.notes) == 2


def test_a_rank_that_has_failed_waits_until_q_once(node):
    node.stop(0, error="ValueError: no")
    what = "has failed at train.py:3: ValueError: no; it waits in the debugger until q"
    assert node.notes == [f"rank 0 {what}; attach with `ddplaunch debug demo` on n0"]
    assert User(node).shown() == "ddplaunch: rank 0 has failed at train.py:3: ValueError: no\n"
    node.send(RankResumed(0))
    node.stop(1, error="ValueError: no")
    assert node.received(1) == [DetachUser(1)], "the attempt ends"
    node.send(QuitRequested(1))
    assert (node.notes[1:], node.sent[-1]) == (
        ["rank 1: q in the debugger ends the job"], StopRequested(signal.SIGTERM))  # fmt: skip
    node.server.start_attempt(node.ranks)
    node.stop(1, error="ValueError: no")
    assert node.received(1) == []


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (4, "there is no rank 4: this job has ranks 0 to 3"),
        (2, "rank 2 is on another node: run `ddplaunch debug demo --rank 2` on n1"),
        (3, "rank 3 is on another node: run `ddplaunch debug demo --rank 3` on its own node"),
        (1, "rank 1 cannot be stopped: its program has not started, or handles that signal"),
        (0, "rank 0 is not running"),
    ],
)
def test_a_rank_that_cannot_be_stopped(node, rank, why):
    node.found = Inspection(0.0, (RankInspection(2, "n1", 9, ProcessCondition.ALIVE),), 4)
    if rank == 0:
        del node.ranks.processes[0]
    user = User(node)
    node.server.pause_rank(rank)
    assert (user.shown(), user.codes, user.has_left) == (f"ddplaunch: {why}\n", [2], True)
    assert node.signals == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_not_named_its_signal_gets_none(node, rank):
    """Also if it handles others: that is why SIGHUP has a handler here."""
    node.ranks.channels[0].signals.clear()  # rank 1 has no channel
    user = User(node)
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        node.server.pause_rank(rank)
    finally:
        signal.signal(signal.SIGHUP, before)
    why = f"rank {rank} cannot be stopped: its program has not started, or handles that signal"
    assert (user.shown(), user.codes, node.signals) == (f"ddplaunch: {why}\n", [2], [])


def test_a_rank_is_stopped_at_its_next_line(node):
    user = User(node, waits_for_stop=True)
    user.type("")
    assert (user.shown(), user.has_left) == ("", False), "a pipe that has ended waits for the stop"
    node.server.pause_rank(0)
    assert node.signals == [signal.SIGINT]
    node.found = Inspection(0.0, (RankInspection(0, "n0", 9, ProcessCondition.ALIVE),), 4)
    node.loop.let_expire(STOP_TIMEOUT_S)
    late = "rank 0 has not reached another line yet: in native code; it stops when that returns, Ctrl-C leaves"
    assert user.shown() == f"ddplaunch: {late}\n"
    node.stop(0)
    assert node.notes == ["rank 0 has stopped: train.py:3"]
    assert (user.shown(), user.codes, user.has_left) == ("ddplaunch: rank 0 is at train.py:3\n", [0], True)


def test_a_rank_runs_on_when_its_stop_is_no_longer_awaited(node):
    user = User(node)
    node.stop(1)
    node.server.pause_rank(0)
    node.server.detach_user(user.prompt)
    node.loop.let_expire(STOP_TIMEOUT_S)
    node.stop(0)
    assert (node.received(0), len(node.notes)) == ([DetachUser(0)], 1)
    node.stop(0)
    assert (node.received(0), len(node.notes)) == ([], 2), "only this stop"


def test_the_last_user_has_control(node):
    first = User(node, 80)
    assert first.shown() == f"ddplaunch: {WAITING}\n"
    node.stop(0)
    assert first.shown() == "ddplaunch: rank 0 is at train.py:3\n(rank 0) "
    second = User(node)
    assert first.shown() == "\r\x1b[Kddplaunch: another terminal has taken over the debugger\n(rank 0) \r\x1b[K"
    first.type("p 1\r")
    second.type("p 2\n")
    assert node.received(0) == [AttachUser(0), LineInput(0, "p 2")]
    node.server.detach_user(first.prompt)
    assert node.received(0) == [], "only the one in control resumes the rank"
    node.server.detach_user(second.prompt)
    assert node.received(0) == [DetachUser(0)]


def test_output_of_a_rank_is_held_until_it_is_selected(node):
    node.stop(0)
    user = User(node)
    node.stop(1)
    user.shown()
    node.prompt(1, "late\n")
    assert user.shown() == ""
    user.type("@1\n")
    assert user.shown() == "(rank 0) @1\nlate\n"


def test_the_terminal_of_a_rank(node):
    node.stop(0)
    user = User(node, 70)
    node.send(TerminalRequest(0))
    path = node.received(0)[-1].path
    rank_end = os.open(path, os.O_RDWR | os.O_NOCTTY)
    node.stop(0, 4, tool="pudb")
    assert tuple(os.get_terminal_size(rank_end)) == (70, 24)
    assert node.signals == [signal.SIGWINCH]
    os.write(rank_end, b"screen")
    wait_until(lambda: user.shown().endswith("screen"), "its output")
    user.type("k\n")
    assert os.read(rank_end, 9) == b"k\n"
    os.close(rank_end)


def test_enter_after_ctrl_bracket_goes_back_to_the_terminal_of_the_rank(node):
    node.stop(0)
    user = User(node, 70)
    node.send(TerminalRequest(0))
    node.stop(0, 4, tool="pudb")
    user.type("\x1d")
    assert user.shown().endswith("(rank 0) "), "commands are typed here"
    user.type("\r")
    assert not user.shown().endswith("(rank 0) ")
    written = list[bytes]()
    node.server.write_terminal = lambda rank, data: written.append(data)
    user.type("k")
    assert written == [b"k"]


def test_a_stop_at_the_moment_its_user_leaves_is_reported_again(node):
    """DetachUser arrives after the rank has read its messages, and before it prompts."""
    node.stop(1)
    node.server.detach_user(User(node).prompt)
    node.send(RankResumed(1, is_stepping=True))
    node.send(TerminalRequest(1))
    attached, detached, terminal = node.received(1)
    assert (attached, detached, os.path.dirname(terminal.path)) == (AttachUser(1), DetachUser(1), "/dev/pts")
    node.stop(1, 4, tool="pudb")
    assert node.received(1) == [DetachUser(1)]
    node.send(RankResumed(1))
    assert (len(node.notes), node.held) == (1, [True, False])
