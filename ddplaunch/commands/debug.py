"""``ddplaunch debug``: a person types to the debugger of the ranks of a running job."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable

import click

from ddplaunch.agent.debugger_messages import Remark, Stopped, ToPerson
from ddplaunch.console import colour_wanted
from ddplaunch.errors import EXIT_SIGNAL, EXIT_USAGE, UsageError
from ddplaunch.job import runs
from ddplaunch.job.client import NoAnswer
from ddplaunch.job.requests.debugger import DebugRanks
from ddplaunch.live.editor import Editor
from ddplaunch.live.prompt import AtTerminal, Prompt
from ddplaunch.loop import Loop
from ddplaunch.output.screen import Manner, Terminal
from ddplaunch.output.sink import PATIENCE
from ddplaunch.output.terminal import can_draw, restored, watched
from ddplaunch.queue.meant import job_meant, one_of, run_of, running
from ddplaunch.queue.scheduler import JobState
from ddplaunch.queue.step import NoStep
from ddplaunch.queue.submitted import Submitted
from ddplaunch.queue.table import scheduler_of
from ddplaunch.wire.connection import MAX_BYTES, Connection
from ddplaunch.wire.sockets import peer_uid

SOON = 0.3  # seconds in which a job says which of its ranks are in their debugger


@click.command()
@click.argument("run", metavar="[RUN]", required=False)
@click.option(
    "--rank", type=click.IntRange(0), metavar="N", help="Stop this rank at its next line of Python, if it runs."
)
def debug(run: str | None, rank: int | None) -> int:
    """Type to the debugger of the ranks of a running job.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the only job that runs. Ranks wait
    at `breakpoint()` where `ddplaunch run` was typed at a terminal, or with --debug. What is typed is pdb's; @3 goes
    to rank 3, `@all p loss` asks all that have stopped. `detach`, Ctrl-D or Ctrl-C lets the ranks run, `q` ends the
    job. Of a job submitted to Slurm, its number: node 0 is reached by `srun --overlap`.
    """
    if queued := job_meant(run):
        seen = running(queued, one_of(queued, run or "", "debug"))
        more = () if rank is None else ("--rank", str(rank))
        return _on_its_node(queued, seen, ["debug", run_of(queued, seen), *more])
    return Debug(runs.running(run).path, rank).run()


def _on_its_node(job: Submitted, seen: JobState, words: list[str]) -> int:
    """Become the same command on node 0 of a submitted job, with our terminal: the lines go by Slurm alone."""
    typed, env = scheduler_of(job).enter(job, seen, words, everywhere=False)
    if typed[0] != "srun":
        what = f"{scheduler_of(job).system} gives no terminal on the nodes of job {seen.number}"
        raise UsageError(what, f"log in to {seen.host or 'its first node'} and type: ddplaunch debug")
    how = "--pty" if os.isatty(0) else "--input=all"
    try:
        os.execvpe("srun", [how if word == "--input=none" else word for word in typed], env)
    except OSError as error:
        raise NoStep(f"cannot run srun: {error.strerror}", "it must be on PATH") from None


class Debug:
    """One person at the door of a job."""

    def __init__(self, path: str, rank: int | None) -> None:
        """Raises NoAnswer: nobody answers there."""
        self._loop, self._path = Loop(), path
        self._code: int | None = None
        self._ended = False  # what is typed
        self._rank = rank
        self._awaits = rank is not None  # that this rank stops
        at_terminal = os.isatty(0) and watched(1) and can_draw()
        self._screen: Terminal | None = None
        if at_terminal:
            self._screen = Terminal(self._loop, Manner(PATIENCE, 0.0, "", False), speaks=True, colour=colour_wanted())
        self._face = AtTerminal(self._loop, self._screen) if self._screen else Lines()
        self._connection = self._connect()
        self._prompt = Prompt(self._face, self._connection.send)
        self._coming = b""

    def _connect(self) -> Connection[ToPerson]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
            if peer_uid(sock) != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
        except OSError as error:
            sock.close()
            raise NoAnswer(f"{self._path}: {error.strerror}", "the job may have ended") from None
        request = DebugRanks(self._rank)
        connection = Connection[ToPerson](
            self._loop, sock, request.answers, self._hear, self._gone, max_bytes=MAX_BYTES
        )
        connection.send(request)
        return connection

    def run(self) -> int:
        """Pass on what is typed until the person leaves, or the job ends; return the exit code."""
        with restored():
            self._loop.catch([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], self._signalled)
            if isinstance(self._face, AtTerminal):
                self._face.heard = self._prompt.key
                self._loop.catch([signal.SIGTSTP], lambda number: os.kill(os.getpid(), signal.SIGSTOP))
                if self._rank is None:
                    self._loop.after(SOON, self._say_that_we_wait)
            else:
                self._loop.soon(self._read)
            while self._code is None or not (self._loop.settled and (self._screen is None or self._screen.written)):
                self._loop.step()
            if isinstance(self._face, AtTerminal):
                self._face.close()
        return self._code

    def _say_that_we_wait(self) -> None:
        if not self._prompt.ranks and self._code is None:
            self._face.show(
                "ddplaunch: no rank is at a breakpoint; waiting for one. Ctrl-C leaves, --rank 0 stops rank 0\n"
            )

    def _hear(self, message: ToPerson) -> None:
        if isinstance(message, Stopped) and message.rank not in self._prompt.ranks:
            failed = f": {message.error}" if message.error else ""
            what = "has failed at" if failed else "is at"
            self._face.show(f"ddplaunch: rank {message.rank} {what} {message.place}{failed}\n")
        self._prompt.hear(message)
        if isinstance(message, Remark) and message.refuses:
            self._code = EXIT_USAGE
        if isinstance(message, Stopped):
            self._awaits = False
        self._leave_if_done()

    def _gone(self, why: str) -> None:
        if self._code is None:
            self._face.show("ddplaunch: the job has ended\n")
            self._code = 0

    def _signalled(self, number: int) -> None:
        self._code = EXIT_SIGNAL + number

    def _read(self) -> None:
        """Take in lines from a pipe or file."""
        try:
            self._loop.watch(0, self._readable)
        except PermissionError:  # a file, which is there at once
            while not self._ended:
                self._readable()

    def _readable(self) -> None:
        data = os.read(0, 1 << 16)
        *lines, self._coming = (self._coming + data).split(b"\n")
        if not data:
            self._loop.forget(0)
            self._ended = True
            lines = [self._coming] if self._coming else []
        for line in lines:
            self._prompt.line(line.decode(errors="replace"))
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        """Nothing more is typed, and all has been answered."""
        if self._ended and not self._awaits and self._prompt.idle and self._code is None:
            self._code = 0


class Lines:
    """The face of who types into a pipe, or reads from one."""

    def show(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def row(self, editor: Editor, prompt: str, *, soon: bool) -> None:
        pass

    def lend(self, typed: Callable[[bytes], None], sized: Callable[[int, int], None]) -> bool:
        return False

    def draw(self, data: bytes) -> None:
        pass
