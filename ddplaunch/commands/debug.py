"""``ddplaunch debug``: a person types to the debugger of the ranks of a running job."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import click

from ddplaunch.agent.debugger_messages import Remark, Stopped, ToPerson
from ddplaunch.cli.on_host import HostCommand
from ddplaunch.cli.run_command import RunName
from ddplaunch.cli.surroundings import OVER_SSH
from ddplaunch.console import colour_wanted
from ddplaunch.dataclass import replace
from ddplaunch.diagnosis.inspection import Detail
from ddplaunch.errors import EXIT_SIGNAL, EXIT_USAGE, UsageError, host_name, shown
from ddplaunch.job import client, runs
from ddplaunch.job.client import TIMEOUT, NoAnswer
from ddplaunch.job.requests.debugger import DebugRanks
from ddplaunch.job.requests.inspection import InspectJob
from ddplaunch.job.requests.status import AskStatus
from ddplaunch.live.editor import Editor
from ddplaunch.live.prompt import AtTerminal, Prompt
from ddplaunch.loop import Loop
from ddplaunch.output.screen import Manner, Terminal
from ddplaunch.output.sink import PATIENCE
from ddplaunch.output.terminal import can_draw, restored, watched
from ddplaunch.plan.command import python_command
from ddplaunch.queue.meant import job_meant, one_of, run_of, running
from ddplaunch.queue.scheduler import JobState, call
from ddplaunch.queue.step import NoStep, ask
from ddplaunch.queue.submitted import Submitted
from ddplaunch.queue.table import scheduler_of
from ddplaunch.ssh.client import as_person
from ddplaunch.ssh.hosts import read_hosts
from ddplaunch.wire.connection import MAX_BYTES, Connection
from ddplaunch.wire.sockets import peer_uid

FAR = 30.0  # seconds in which a host says where a rank is
SOON = 0.3  # seconds in which a job says which of its ranks are in their debugger


@click.command(cls=HostCommand)
@click.argument("run", metavar="[RUN]", required=False, type=RunName(running=True))
@click.option(
    "--rank", type=click.IntRange(0), metavar="N", help="Stop this rank at its next line of Python, if it runs."
)
@click.option(
    "--hosts", metavar="HOSTS", help="Go by SSH to this host, or to the one of several that has the rank: n1, n[1-4]."
)
def debug(run: str | None, rank: int | None, hosts: str | None) -> int:
    """Type to the debugger of the ranks of a running job.

    RUN is its name in `ddplaunch ps`, a part of that name, or its PID; without it, the only job that runs. Ranks wait
    at `breakpoint()` where `ddplaunch run` was typed at a terminal, or with --debug. What is typed is pdb's; @3 goes
    to rank 3, `@all p loss` asks all that have stopped. `detach`, Ctrl-D or Ctrl-C lets the ranks run, `q` ends the
    job. Of a job submitted to Slurm, its number: its nodes are reached by `srun --overlap`. To a rank of another
    node it goes by SSH, where the job runs over SSH or --hosts is given, and by srun within a job of Slurm.
    """
    more = [] if rank is None else ["--rank", str(rank)]
    if hosts is not None:
        return _by_ssh(_host(hosts, run, rank), ["debug", *([run] if run else []), *more])
    if queued := job_meant(run):
        seen = running(queued, one_of(queued, run or "", "debug"))
        name = run_of(queued, seen)
        if rank is not None:
            told = ask(queued, seen, ["stacks", name, "--json"], TIMEOUT)
            seen = replace(seen, host=_host_in(told, rank) or seen.host)
        return _on_its_node(queued, seen, ["debug", name, *more])
    job = runs.running(run)
    client.check_suspended(job.path)
    if rank is not None and (host := _other_node(job.path, rank)):
        environ = _environ(job.pid)
        words = ["debug", job.run_id, *more]
        if OVER_SSH in environ:
            return _by_ssh(host, words)
        if number := environ.get("SLURM_JOB_ID"):
            where = [f"--jobid={number}", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--input=none"]
            return _become(["srun", "--overlap", *where, *python_command(sys.executable), *words])
    return Debug(job.path, rank).run()


def _other_node(path: str, rank: int) -> str:
    """The host of a rank that is not of this node; "" where it is, or nobody knows."""
    status = client.ask(path, AskStatus())
    if rank in {each.rank for each in status.ranks} or rank >= status.world_size:
        return ""
    found = client.ask(path, InspectJob(Detail.WAITS)).inspection.by_number.get(rank)
    return "" if found is None or found.host == host_name() else found.host


def _environ(pid: int) -> dict[str, str]:
    """The variables of a launcher of ours."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (os.fsdecode(each).partition("=") for each in file.read().split(b"\0"))
            return {name: value for name, _, value in pairs}
    except OSError:
        return {}


def _host(typed: str, run: str | None, rank: int | None) -> str:
    """Which of the hosts of ``--hosts`` to go to."""
    hosts = [each.destination for each in read_hosts(typed)]
    if len(hosts) == 1:
        return hosts[0]
    if rank is None:
        what = f"--hosts {shown(typed, 60)} has {len(hosts)} hosts"
        raise UsageError(what, "name one of them, or a rank with --rank")
    words = [*python_command(sys.executable), "stacks", *([run] if run else []), "--json"]
    for host in hosts:
        far = as_person(host, words, os.environ, terminal=False)
        try:
            told = call(*far, seconds=FAR).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if name := _host_in(told, rank):
            alike = (each for each in hosts if each.rpartition("@")[2].partition(".")[0] == name.partition(".")[0])
            return next(alike, name)
    what = f"no host of --hosts {shown(typed, 60)} says where rank {rank} is"
    raise NoAnswer(what, "ddplaunch ps on a host shows what runs there")


def _host_in(told: str | None, rank: int) -> str:
    """The host of a rank by ``stacks --json``; "" where that does not say."""
    try:
        found = {each["rank"]: each["host"] for each in json.loads(told or "{}").get("ranks", ())}
        return str(found.get(rank, ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _by_ssh(host: str, words: list[str]) -> int:
    return _become(as_person(host, [*python_command(sys.executable), *words], os.environ, terminal=os.isatty(0)))


def _on_its_node(job: Submitted, seen: JobState, words: list[str]) -> int:
    typed, env = scheduler_of(job).enter(job, seen, words, everywhere=False)
    if typed[0] != "srun":
        what = f"{scheduler_of(job).system} gives no terminal on the nodes of job {seen.number}"
        raise UsageError(what, f"log in to {seen.host or 'its first node'} and type: ddplaunch debug")
    return _become(typed, env)


def _become(typed: list[str], env: Mapping[str, str] = os.environ) -> int:
    """Become the same command on another node, with our terminal: the lines go by SSH or Slurm alone."""
    how = "--pty" if os.isatty(0) else "--input=all"
    try:
        os.execvpe(typed[0], [how if word == "--input=none" else word for word in typed], env)
    except OSError as error:
        raise NoStep(f"cannot run {typed[0]}: {error.strerror}", "it must be on PATH") from None


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

    def lend(self, typed: Callable[[bytes], None], sized: Callable[[int, int], None]) -> None:
        pass
