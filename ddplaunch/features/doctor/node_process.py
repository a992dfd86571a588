"""The process that the doctor starts on each node: answers requests until its stdin ends, and leaves no child."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import get_args

from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.base.connection import MAX_FRAME_BYTES
from ddplaunch.base.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.frames import LENGTH, ProtocolError, encode_frame
from ddplaunch.base.local_sockets import find_free_port
from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.types import decode, encode
from ddplaunch.features.doctor import benchmark, messages
from ddplaunch.features.doctor.benchmark import CollectiveTimes, DeviceThroughput, MeasureCollective, PrepareDevices
from ddplaunch.features.doctor.checks import CheckContext
from ddplaunch.features.doctor.checks.network import find_route
from ddplaunch.features.doctor.checks.torch import TorchFacts
from ddplaunch.features.doctor.connectivity import TestListener, measure_ping, measure_stream, try_connections
from ddplaunch.features.doctor.node_checks import read_facts
from ddplaunch.features.doctor.probe import TORCH_IMPORT_TIMEOUT_S, HelperProbe

NODE_STATEMENT = "from ddplaunch.features.doctor.node_process import main; main()"
MANUAL_FLAG = "by-hand"
"""The argument of a process whose stdin and stdout are a connection to node 0, on a node that the user started."""

_BENCHMARK_STATEMENT = "from ddplaunch.features.doctor.benchmark import main; main()"


def main() -> None:
    """Answer requests until the doctor is done."""
    by_hand = MANUAL_FLAG in sys.argv[1:]
    out = os.dup(1)
    os.dup2(2, 1)  # for everything else that prints
    requests = queue.SimpleQueue[messages.Question]()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    handler = RequestHandler(by_hand)
    if not by_hand:
        _write(out, messages.START_MARK)
    _send(out, messages.Ready(__version__))
    while True:
        _send(out, handler.handle(requests.get()))


def _read(requests: queue.SimpleQueue[messages.Question]) -> None:
    """Queue each request. At request ``Exit`` or the end of stdin exit at once, which ends the children too."""
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
            requests.put(question)
    os._exit(EXIT_UNAVAILABLE)


def _send(out: int, message: object) -> None:
    """Send a message, with a line break at its end: srun forwards complete lines."""
    _write(out, encode_frame(encode(message)[LENGTH.size :] + b"\n"))


def _write(out: int, data: bytes) -> None:
    with suppress(OSError):  # the doctor is gone; _read notices
        while data:
            data = data[os.write(out, data) :]


class RequestHandler:
    """Replies to the doctor's requests on one node; keeps state from one request to the next."""

    def __init__(self, by_hand: bool) -> None:
        """``by_hand``: use this process's own variables and current folder, not those of the request."""
        self._by_hand = by_hand
        self._nonce = ""
        self._listener: TestListener | None = None
        self._benchmarks: list[HelperProbe] = []
        self._prepared: PrepareDevices | None = None

    def handle(self, question: messages.Question) -> object:
        """Return the reply; ``messages`` says which type belongs to which request."""
        match question:
            case messages.DescribeNode(cwd, toward, environ, nonce):
                # Set by ssh_command, so that Python took no module from the home folder.
                os.environ.pop("PYTHONSAFEPATH", None)
                if not self._by_hand:
                    os.environb.update(each.partition(b"=")[::2] for each in environ)
                folder = current_folder() if self._by_hand else os.fsdecode(cwd)
                self._nonce, self._benchmarks = nonce, [HelperProbe(_BENCHMARK_STATEMENT)]
                return read_facts(CheckContext(folder, toward, self._benchmarks[0]))
            case messages.FindRoute(toward):
                return messages.RouteReply(find_route(toward))
            case messages.GetTime():
                return messages.TimeReply(time.time())
            case messages.ListenOnPorts(ports):
                self._listener = TestListener(ports, self._nonce)
                return self._listener.listening
            case messages.ConnectTo(addresses):
                return messages.ConnectReply(try_connections(addresses, self._nonce))
            case messages.PingNode(address, port):
                return measure_ping((address, port), self._nonce)
            case messages.SendStream(address, port):
                return messages.StreamReply(measure_stream((address, port), self._nonce))
            case PrepareDevices():
                return self._prepare_devices(question)
        return self._measure_collective(question)

    def _prepare_devices(self, question: PrepareDevices) -> messages.PrepareReply:
        if self._listener:
            self._listener.close()
        if self._prepared:  # the running processes are bound to other devices
            self._close_benchmarks()
        self._prepared = question
        started = [HelperProbe(_BENCHMARK_STATEMENT) for _ in question.devices[len(self._benchmarks) :]]
        self._benchmarks += started
        deadline = time.monotonic() + TORCH_IMPORT_TIMEOUT_S
        for benchmark_process in started:
            benchmark_process.read_first_line(TorchFacts, deadline - time.monotonic())
        for benchmark_process, device in zip(self._benchmarks, question.devices, strict=True):
            benchmark_process.write_task(replace(question, devices=(device,)))
        powers = [each.read(DeviceThroughput, deadline - time.monotonic()) for each in self._benchmarks]
        if all(powers):
            return messages.PrepareReply(tuple(each for each in powers if each))
        late = any(each.timed_out for each in self._benchmarks)
        self._close_benchmarks()
        why = f"no answer within {TORCH_IMPORT_TIMEOUT_S:g} s" if late else "the process exited at its start"
        return messages.PrepareReply((), why)

    def _measure_collective(self, question: MeasureCollective) -> CollectiveTimes:
        if self._prepared is None or not self._benchmarks:
            return CollectiveTimes(error="the benchmark processes could not be restarted")
        task = replace(question, address=question.address or "127.0.0.1", port=question.port or find_free_port())
        taking = self._benchmarks[: question.count]
        for offset, benchmark_process in enumerate(taking):
            benchmark_process.write_task(replace(task, first=question.first + offset))
        deadline = time.monotonic() + benchmark.TASK_TIMEOUT_S
        answers = []
        for benchmark_process in taking:
            if (answer := benchmark_process.read(CollectiveTimes, deadline - time.monotonic())) is None:
                self._prepare_devices(self._prepared)  # processes that hang would answer this task instead of the next
                late = f"not finished after {benchmark.TASK_TIMEOUT_S:g} s"
                return CollectiveTimes(error=late if benchmark_process.timed_out else "the process died")
            answers.append(answer)
        return next((each for each in answers if each.error), answers[-1])

    def _close_benchmarks(self) -> None:
        for benchmark_process in self._benchmarks:
            benchmark_process.close()
        self._benchmarks = []
