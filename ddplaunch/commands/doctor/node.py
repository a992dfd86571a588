"""The process that the doctor starts on each node: it answers questions until its stdin ends, and leaves nothing."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import get_args

from ddplaunch import __version__
from ddplaunch.commands.doctor import benchmark, messages
from ddplaunch.commands.doctor.benchmark import CollectiveTimes, DeviceThroughput, MeasureCollective, PrepareDevices
from ddplaunch.commands.doctor.checks import CheckContext, fabric
from ddplaunch.commands.doctor.checks.network import find_route
from ddplaunch.commands.doctor.checks.torch import TorchFacts
from ddplaunch.commands.doctor.facts import read_facts
from ddplaunch.commands.doctor.probe import TORCH_IMPORT_TIMEOUT_S, HelperProbe
from ddplaunch.commands.doctor.ways import TestListener, measure_ping, measure_stream, test_paths
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.wire.connection import MAX_FRAME_BYTES
from ddplaunch.wire.frames import LENGTH, ProtocolError, encode_frame
from ddplaunch.wire.sockets import free_port
from ddplaunch.wire.typed import decode, encode

NODE_STATEMENT = "from ddplaunch.commands.doctor.node import main; main()"
MANUAL_FLAG = "by-hand"
"""The argument of a process whose stdin and stdout are a connection to node 0 that a person has made."""

_BENCHMARK_STATEMENT = "from ddplaunch.commands.doctor.benchmark import main; main()"


def main() -> None:
    """Answer until the doctor is done."""
    by_hand = MANUAL_FLAG in sys.argv[1:]
    out = os.dup(1)
    os.dup2(2, 1)  # for all else that prints
    asked = queue.SimpleQueue[messages.Question]()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    answerer = RequestHandler(by_hand)
    if not by_hand:
        _write(out, messages.START_MARK)
    _say(out, messages.Ready(__version__))
    while True:
        _say(out, answerer.handle(asked.get()))


def _read(asked: queue.SimpleQueue[messages.Question]) -> None:
    """Pass on each question; at their end, or that of stdin, end this process at once, and with it its children."""
    with suppress(OSError), open(0, "rb") as stdin:
        while len(head := stdin.read(LENGTH.size)) == LENGTH.size:
            length = min(LENGTH.unpack(head)[0], MAX_FRAME_BYTES)
            if len(body := stdin.read(length)) < length:
                break
            try:
                question = decode(body, (*get_args(messages.Question), messages.Exit))
            except ProtocolError:
                os._exit(EXIT_USAGE)
            if isinstance(question, messages.Exit):
                os._exit(question.code)
            asked.put(question)
    os._exit(EXIT_UNAVAILABLE)


def _say(out: int, message: object) -> None:
    """Send a message with a line break at its end: srun passes on whole lines."""
    _write(out, encode_frame(encode(message)[LENGTH.size :] + b"\n"))


def _write(out: int, data: bytes) -> None:
    with suppress(OSError):  # the doctor is gone, as _read finds out
        while data:
            data = data[os.write(out, data) :]


class RequestHandler:
    """What answers, and remembers from question to question."""

    def __init__(self, by_hand: bool) -> None:
        """``by_hand``: variables and the current folder are this process's own, whatever is asked."""
        self._by_hand = by_hand
        self._nonce = ""
        self._responder: TestListener | None = None
        self._meters: list[HelperProbe] = []
        self._prepared: PrepareDevices | None = None

    def handle(self, question: messages.Question) -> object:
        """Answer; the kinds of answers are beside the questions."""
        match question:
            case messages.DescribeNode(cwd, toward, environ, nonce, thorough):
                os.environ.pop("PYTHONSAFEPATH", None)  # ours, so that Python took no module from the home folder
                if not self._by_hand:
                    os.environb.update(each.partition(b"=")[::2] for each in environ)
                folder = os.getcwd() if self._by_hand else os.fsdecode(cwd)
                self._nonce, self._meters = nonce, [HelperProbe(_BENCHMARK_STATEMENT)]
                return read_facts(CheckContext(folder, toward, os.environ, self._meters[0], thorough))
            case messages.FindRoute(toward):
                return messages.RouteReply(find_route(toward))
            case messages.GetTime():
                return messages.TimeReply(time.time())
            case messages.ListenOnPorts(ports):
                self._responder = TestListener(ports, self._nonce)
                return self._responder.listening
            case messages.ConnectTo(places):
                return messages.ConnectReply(test_paths(places, self._nonce))
            case messages.PingNode(address, port):
                return measure_ping((address, port), self._nonce)
            case messages.SendStream(address, port):
                return messages.StreamReply(measure_stream((address, port), self._nonce))
            case PrepareDevices():
                return self._prepare(question)
            case messages.CountErrors():
                return messages.ErrorCounts(fabric.read_in_child())
        return self._measure(question)

    def _prepare(self, question: PrepareDevices) -> messages.PrepareReply:
        if self._responder:
            self._responder.close()
        if self._prepared:  # the processes have their devices
            self._end()
        self._prepared = question
        new = [HelperProbe(_BENCHMARK_STATEMENT) for _ in question.devices[len(self._meters) :]]
        self._meters += new
        until = time.monotonic() + TORCH_IMPORT_TIMEOUT_S
        for meter in new:
            meter.read_first_line(TorchFacts, until - time.monotonic())
        for meter, device in zip(self._meters, question.devices, strict=True):
            meter.write_task(replace(question, devices=(device,)))
        powers = [meter.read(DeviceThroughput, until - time.monotonic()) for meter in self._meters]
        if all(powers):
            return messages.PrepareReply(tuple(each for each in powers if each))
        late = any(meter.timed_out for meter in self._meters)
        self._end()
        return messages.PrepareReply(
            (), f"no answer in {TORCH_IMPORT_TIMEOUT_S:g} s" if late else "the process ended at its start"
        )

    def _measure(self, question: MeasureCollective) -> CollectiveTimes:
        if self._prepared is None or not self._meters:
            return CollectiveTimes(error="the measuring processes could not be started again")
        task = replace(question, address=question.address or "127.0.0.1", port=question.port or free_port())
        taking = self._meters[: question.count]
        for place, meter in enumerate(taking):
            meter.write_task(replace(task, first=question.first + place))
        until = time.monotonic() + benchmark.TASK_TIMEOUT_S
        answers = []
        for meter in taking:
            if (answer := meter.read(CollectiveTimes, until - time.monotonic())) is None:
                self._prepare(self._prepared)  # those that hang would answer this task instead of the next
                late = f"not finished after {benchmark.TASK_TIMEOUT_S:g} s"
                return CollectiveTimes(error=late if meter.timed_out else "the process died")
            answers.append(answer)
        return answers[-1]

    def _end(self) -> None:
        for meter in self._meters:
            meter.close()
        self._meters = []
