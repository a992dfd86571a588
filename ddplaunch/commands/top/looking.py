"""Looking at a running job through its door: once, as JSON, or live until somebody has seen enough."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import click

from ddplaunch.cli.live import LiveView, failures_text, last_lines, sentences
from ddplaunch.console.view import Glance, all_doing, frame, rate, work
from ddplaunch.dataclass import replace
from ddplaunch.devices.usage import Used, used_by
from ddplaunch.diagnosis.inspection import Detail
from ddplaunch.errors import EXIT_SIGNAL
from ddplaunch.job import client, runs
from ddplaunch.job.door import MAX_ANSWER
from ddplaunch.job.requests import InspectJob, JobInspected, Printed, TailRanks
from ddplaunch.job.status import Status
from ddplaunch.loop import Loop
from ddplaunch.output.live import Live
from ddplaunch.output.rows import plain
from ddplaunch.output.sink import PATIENCE
from ddplaunch.output.terminal import restored
from ddplaunch.wire.connection import Connection
from ddplaunch.wire.sockets import peer_uid

BETWEEN = 0.5  # seconds between two looks
COLUMNS, ROWS = 80, 24  # of a frame that is printed elsewhere than in a terminal
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

A = TypeVar("A", JobInspected, Status | Printed)


def print_json(path: str) -> int:
    """Print two looks as one object: the later one, and how fast the job was between them."""
    glance = _glance(path, "")
    ranks = (replace(rank, threads=()) for rank in glance.inspection.ranks)
    status = asdict(glance.status, dict_factory=lambda fields: {k: getattr(v, "value", v) for k, v in fields})
    found = {
        "status": status,
        "inspection": replace(glance.inspection, ranks=tuple(ranks)).to_json(),
        "doing": {rank: what.value for rank, what in all_doing(glance).items()},
        "waits": glance.sentences,
        "collectives_per_second": rate(glance.inspection, glance.before),
        "cpus": work(glance),
        "memory": {rank: used.memory for rank, used in glance.used.items()},
    }
    click.echo(json.dumps(found, indent=2))
    return 0


def print_once(path: str, chosen: str) -> int:
    """Print one frame."""
    sys.stdout.write(plain(frame(_glance(path, chosen), COLUMNS, ROWS)))
    return 0


def _glance(path: str, chosen: str) -> Glance:
    """Two looks, for what happens in a second; the later one is close."""
    first = client.look(path)
    before = _used(first)
    time.sleep(BETWEEN)
    last = client.look(path, stacks=True)
    found = last.inspection
    same = first.inspection if first.status.attempt == last.status.attempt else None
    return Glance(last.status, found, same, _used(last), before, sentences=sentences(found), chosen=chosen)


def _used(looked: JobInspected) -> dict[int, Used]:
    return {rank.rank: used for rank in looked.status.ranks if rank.pid and (used := used_by(rank.pid))}


class AtDoor:
    """A job as its door shows it."""

    def __init__(self, loop: Loop, path: str, lost: Callable[[], None]) -> None:
        """``lost`` is called when nobody answers there any more."""
        self._loop, self._path, self._lost = loop, path, lost
        self._status: Status | None = None

    def look(self, detail: Detail, answer: Callable[[JobInspected], None]) -> None:
        def hear(looked: JobInspected) -> None:
            self._status = looked.status
            answer(looked)

        self._connect(
            InspectJob(stacks=detail is Detail.WAITS, pace=detail is Detail.PACE), [JobInspected], hear, lambda: None
        )

    def log(self, rank: int, answer: Callable[[str], None]) -> None:
        said = bytearray()

        def hear(piece: Status | Printed) -> None:
            if isinstance(piece, Printed):
                said.extend(piece.data)

        self._connect(TailRanks((rank,)), [Status, Printed], hear, lambda: answer(last_lines(rank, bytes(said))))

    def failures(self, answer: Callable[[str], None]) -> None:
        answer(failures_text(self._status) if self._status else "")

    def _connect(
        self,
        request: InspectJob | TailRanks,
        kinds: Sequence[type[A]],
        hear: Callable[[A], None],
        done: Callable[[], None],
    ) -> None:
        """Ask; ``done`` is called after the last answer. The job has ended where there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self._path)
            if peer_uid(sock) != os.geteuid():
                raise PermissionError
        except BlockingIOError:  # many ask
            sock.close()
            self._loop.after(0.1, partial(self._connect, request, kinds, hear, done))
            return
        except OSError:
            sock.close()
            self._loop.soon(self._lost)
            return
        answered = False

        def first_or_next(answer: A) -> None:
            nonlocal answered
            answered = True
            hear(answer)

        connection: Connection[A] = Connection(
            self._loop,
            sock,
            kinds,
            first_or_next,
            lambda why: done() if answered else self._lost(),
            max_bytes=MAX_ANSWER,
        )
        connection.send(request)


class Looking:
    """The live view in a terminal of its own."""

    def __init__(self, path: str, chosen: str, *, colour: bool) -> None:
        self._loop, self._path = Loop(), path
        self._screen = Live(self._loop, PATIENCE, 0.0, "", speaks=True, colour=colour)
        self._door = AtDoor(self._loop, path, self._gone)
        self._view = LiveView(self._loop, self._screen, self._door, chosen=chosen, left=self._leave)
        self._code: int | None = None
        self._said = ""

    def run(self) -> int:
        """Show it until somebody leaves, or the job ends; return the exit code."""
        try:
            with restored():
                self._loop.catch(ENDING, self._ended)
                self._loop.catch([signal.SIGTSTP], lambda number: self._screen.suspend(_stop))
                self._view.begin(keys=True)
                while self._code is None or not (self._loop.settled and self._screen.written):
                    self._loop.step()
        finally:
            self._view.close()
            self._screen.close()
        if self._said:
            click.echo(self._said, err=True)
        return self._code

    def _leave(self, code: int = 0) -> None:
        if self._code is None:
            self._code = code
            self._view.close()
            self._screen.end()

    def _ended(self, number: int) -> None:
        self._leave(EXIT_SIGNAL + number)

    def _gone(self) -> None:
        """Nobody answers: it has ended."""
        self._said = f"ddplaunch: {_end_of(self._path)}"
        self._leave()


def _end_of(path: str) -> str:
    """How the job has ended, where the history knows."""
    record = runs.record_of(runs.at(path))
    if record is None or record.code is None:
        return "the job has ended"
    return f"{record.run_id} has ended, exit code {record.code}"


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
