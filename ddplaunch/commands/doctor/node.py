"""The process that ``doctor`` starts on each node: it answers questions until its stdin ends, and leaves nothing."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time

import msgspec

from ddplaunch import __version__
from ddplaunch.commands.doctor import benchmark
from ddplaunch.commands.doctor.benchmark import Measured, Ready, Task
from ddplaunch.commands.doctor.inquiry import TORCH_DEADLINE
from ddplaunch.commands.doctor.lines import Lines
from ddplaunch.commands.doctor.machine import look, route
from ddplaunch.commands.doctor.questions import (
    MARK,
    End,
    Listen,
    Look,
    Measure,
    Prepare,
    Prepared,
    Question,
    Route,
    Routed,
    Tell,
    Time,
    Try,
    Ways,
    read_question,
)
from ddplaunch.commands.doctor.ways import Listener, try_ways
from ddplaunch.errors import EXIT_UNAVAILABLE
from ddplaunch.plan.command import python_command
from ddplaunch.rank.processes import die_with_parent

MEASURE = "from ddplaunch.commands.doctor.benchmark import main; main()"


def main() -> int:
    """Answer until stdin ends."""
    os.write(1, b"\n" + MARK + msgspec.json.encode(__version__) + b"\n")
    asked = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    node = Node()
    while True:
        question = read_question(asked.get())
        if isinstance(question, End):
            return question.code
        answer = node.answer(question)
        os.write(1, MARK + msgspec.json.encode(answer) + b"\n")


def _read(asked: queue.SimpleQueue[bytes]) -> None:
    """Pass on each question; at the end of stdin end this process at once, and with it all its children."""
    for line in sys.stdin.buffer:
        if line.startswith(b"{"):  # the command itself comes too, for a shell in place of the login shell
            asked.put(line)
    os._exit(EXIT_UNAVAILABLE)


class Meter:
    """One process that measures, with one device."""

    def __init__(self, device: str, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*python_command(sys.executable, MEASURE), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            preexec_fn=die_with_parent,
            bufsize=0,
        )
        self._lines = Lines(self._process.stdout)

    def ask(self, task: Task) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        except OSError:  # it has ended, as line() finds out
            pass

    def line(self, until: float) -> bytes | None:
        """Its next answer; b"" if it has ended, None if it does not answer in time."""
        return self._lines.next(until)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Node:
    """What a node remembers from question to question."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._meters: list[Meter] = []

    def answer(self, question: Question) -> object:
        """Answer; the kinds of answers are beside the questions."""
        if isinstance(question, Look):
            os.environ.pop("PYTHONSAFEPATH", None)  # ours, so that Python took no module from the home folder
            os.environ.update(question.environ)
            return look(question.cwd, question.toward, os.environ)
        if isinstance(question, Route):
            return Routed(route(question.toward)[0])
        if isinstance(question, Tell):
            return Time(time.time())
        if isinstance(question, Listen):
            self._listener = Listener(question.ports, question.nonce)
            return self._listener.listening
        if isinstance(question, Try):
            return Ways(try_ways(question.places, question.nonce))
        if isinstance(question, Prepare):
            return self._prepare(question)
        return self._measure(question)

    def _prepare(self, question: Prepare) -> Prepared:
        if self._listener:
            self._listener.close()
        self._end()
        self._prepared = question
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if question.interface:
            environ.setdefault("GLOO_SOCKET_IFNAME", question.interface)
        self._meters = [Meter(device, environ) for device in question.devices]
        until = time.monotonic() + TORCH_DEADLINE
        lines = [meter.line(until) for meter in self._meters]
        if all(lines):
            return Prepared(tuple(msgspec.json.decode(line, type=Ready) for line in lines if line))
        self._end()
        late = any(line is None for line in lines)
        return Prepared((), f"no answer in {TORCH_DEADLINE:g} s" if late else "the process ended at its start")

    def _measure(self, question: Measure) -> Measured:
        if not self._meters:
            return Measured(error="the measuring processes could not be started again")
        address, port = question.address or "127.0.0.1", question.port or _free_port()
        taking = self._meters[: question.count]
        for place, meter in enumerate(taking):
            meter.ask(Task(address, port, question.first + place, question.world_size))
        until = time.monotonic() + benchmark.DEADLINE
        for meter in taking:
            line = meter.line(until)
            if not line:
                self._prepare(self._prepared)  # those that hang would answer this task instead of the next
                return Measured(
                    error=f"not finished after {benchmark.DEADLINE:g} s" if line is None else "the process died"
                )
            measured = msgspec.json.decode(line, type=Measured)
        return measured

    def _end(self) -> None:
        for meter in self._meters:
            meter.end()
        self._meters = []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
