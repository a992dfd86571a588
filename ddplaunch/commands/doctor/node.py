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
from ddplaunch.commands.doctor.benchmark import DevicePower, Measure, Measured, Prepare
from ddplaunch.commands.doctor.checks import Surroundings, fabric
from ddplaunch.commands.doctor.checks.network import route
from ddplaunch.commands.doctor.checks.torch import TorchFound
from ddplaunch.commands.doctor.facts import describe
from ddplaunch.commands.doctor.probe import TORCH_DEADLINE, Probe
from ddplaunch.commands.doctor.ways import Responder, ping, stream, try_ways
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.wire.connection import MAX_BYTES
from ddplaunch.wire.frames import LENGTH, Garbled, frame
from ddplaunch.wire.sockets import free_port
from ddplaunch.wire.typed import decode, encode

NODE = "from ddplaunch.commands.doctor.node import main; main()"
BY_HAND = "by-hand"
"""The argument of a process whose stdin and stdout are a connection to node 0 that a person has made."""

_MEASURE = "from ddplaunch.commands.doctor.benchmark import main; main()"


def main() -> None:
    """Answer until the doctor is done."""
    by_hand = BY_HAND in sys.argv[1:]
    out = os.dup(1)
    os.dup2(2, 1)  # for all else that prints
    asked = queue.SimpleQueue[messages.Question]()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    answerer = Answerer(by_hand)
    if not by_hand:
        _write(out, messages.MARK)
    _say(out, messages.Present(__version__))
    while True:
        _say(out, answerer.answer(asked.get()))


def _read(asked: queue.SimpleQueue[messages.Question]) -> None:
    """Pass on each question; at their end, or that of stdin, end this process at once, and with it its children."""
    with suppress(OSError), open(0, "rb") as stdin:
        while len(head := stdin.read(LENGTH.size)) == LENGTH.size:
            length = min(LENGTH.unpack(head)[0], MAX_BYTES)
            if len(body := stdin.read(length)) < length:
                break
            try:
                question = decode(body, (*get_args(messages.Question), messages.Leave))
            except Garbled:
                os._exit(EXIT_USAGE)
            if isinstance(question, messages.Leave):
                os._exit(question.code)
            asked.put(question)
    os._exit(EXIT_UNAVAILABLE)


def _say(out: int, message: object) -> None:
    """Send a message with a line break at its end: srun passes on whole lines."""
    _write(out, frame(encode(message)[LENGTH.size :] + b"\n"))


def _write(out: int, data: bytes) -> None:
    with suppress(OSError):  # the doctor is gone, as _read finds out
        while data:
            data = data[os.write(out, data) :]


class Answerer:
    """What answers, and remembers from question to question."""

    def __init__(self, by_hand: bool) -> None:
        """``by_hand``: variables and the current folder are this process's own, whatever is asked."""
        self._by_hand = by_hand
        self._nonce = ""
        self._responder: Responder | None = None
        self._meters: list[Probe] = []
        self._prepared: Prepare | None = None

    def answer(self, question: messages.Question) -> object:
        """Answer; the kinds of answers are beside the questions."""
        match question:
            case messages.Describe(cwd, toward, environ, nonce, thorough):
                os.environ.pop("PYTHONSAFEPATH", None)  # ours, so that Python took no module from the home folder
                if not self._by_hand:
                    os.environb.update(each.partition(b"=")[::2] for each in environ)
                folder = os.getcwd() if self._by_hand else os.fsdecode(cwd)
                self._nonce, self._meters = nonce, [Probe(_MEASURE)]
                return describe(Surroundings(folder, toward, os.environ, self._meters[0], thorough))
            case messages.Route(toward):
                return messages.Routed(route(toward))
            case messages.Tell():
                return messages.Time(time.time())
            case messages.Listen(ports):
                self._responder = Responder(ports, self._nonce)
                return self._responder.listening
            case messages.Connect(places):
                return messages.Connected(try_ways(places, self._nonce))
            case messages.Ping(address, port):
                return ping((address, port), self._nonce)
            case messages.SendStream(address, port):
                return messages.Flowed(stream((address, port), self._nonce))
            case Prepare():
                return self._prepare(question)
            case messages.Recount():
                return messages.Recounted(fabric.ask())
        return self._measure(question)

    def _prepare(self, question: Prepare) -> messages.Prepared:
        if self._responder:
            self._responder.close()
        if self._prepared:  # the processes have their devices
            self._end()
        self._prepared = question
        new = [Probe(_MEASURE) for _ in question.devices[len(self._meters) :]]
        self._meters += new
        until = time.monotonic() + TORCH_DEADLINE
        for meter in new:
            meter.begin(TorchFound, until - time.monotonic())
        for meter, device in zip(self._meters, question.devices, strict=True):
            meter.ask(replace(question, devices=(device,)))
        powers = [meter.read(DevicePower, until - time.monotonic()) for meter in self._meters]
        if all(powers):
            return messages.Prepared(tuple(each for each in powers if each))
        late = any(meter.late for meter in self._meters)
        self._end()
        return messages.Prepared((), f"no answer in {TORCH_DEADLINE:g} s" if late else "the process ended at its start")

    def _measure(self, question: Measure) -> Measured:
        if self._prepared is None or not self._meters:
            return Measured(error="the measuring processes could not be started again")
        task = replace(question, address=question.address or "127.0.0.1", port=question.port or free_port())
        taking = self._meters[: question.count]
        for place, meter in enumerate(taking):
            meter.ask(replace(task, first=question.first + place))
        until = time.monotonic() + benchmark.DEADLINE
        answers = []
        for meter in taking:
            if (answer := meter.read(Measured, until - time.monotonic())) is None:
                self._prepare(self._prepared)  # those that hang would answer this task instead of the next
                late = f"not finished after {benchmark.DEADLINE:g} s"
                return Measured(error=late if meter.late else "the process died")
            answers.append(answer)
        return answers[-1]

    def _end(self) -> None:
        for meter in self._meters:
            meter.end()
        self._meters = []
