"""The ranks of this node that are in a debugger, and the person who debugs them.

A rank connects when it stops first (``rank/debugger.py``). The person is at the launcher's own terminal, or has come
by the door; who came last is asked. Where a person goes, or types nothing for long, the ranks run on.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from ddplaunch import TYPE_CHECKING, diagnosis
from ddplaunch.agent.debugger_messages import (
    EOF_LINE,
    FROM_DEBUGGER,
    AttachUser,
    DebuggerOutput,
    DebugNotice,
    DetachUser,
    FromDebugger,
    FromUser,
    KeyInput,
    LineInput,
    PauseRank,
    QuitRequested,
    RankResumed,
    RankStopped,
    SessionTakenOver,
    TerminalOutput,
    TerminalRequest,
    TerminalResized,
    ToUser,
)
from ddplaunch.agent.rank_terminal import RankTerminal
from ddplaunch.agent.signals import is_caught
from ddplaunch.control.messages import DebuggerActive, FromNode, StopRequested
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.loop import Callback, EventLoop, Timer
from ddplaunch.wire.sockets import MAX_SOCKET_PATH, listen_unix, peer_uid
from ddplaunch.words import all_ranks, format_elapsed

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import NodeRanks
    from ddplaunch.agent.temporary import RunTempDir
    from ddplaunch.diagnosis.inspection import Detail, Inspection
    from ddplaunch.wire.connection import Connection

    Person = Callable[[ToUser], None]

SCROLLBACK_BYTES = 1 << 16  # bytes of what a debugger has said that somebody who comes later sees
STOP_TIMEOUT_S = 1.0  # seconds in which a rank that runs Python stops
TIMEOUT_CHECK_DELAY_S = 5.0  # seconds after which the other ranks wait for one that has stopped
TIMEOUT_WARNING_S = 60.0  # seconds before the others fail
IGNORED_TIMEOUT_S = 12 * 3600.0  # seconds that are not worth a word
_PROMPT_FORMAT = "(rank {}) "  # beside a debugger that has a terminal of its own


@dataclass
class Debuggee:
    """A rank that has been in its debugger; ``stopped`` while it is."""

    connection: Connection[FromDebugger]
    stopped: RankStopped | None = None
    is_stepping: bool = False
    detached: bool = False  # its person has gone, which it may learn of when it stops next
    output: bytes = b""  # since it has stopped, or was asked last
    prompt: str = ""  # of the line that it waits for; "" while it is at work
    timer: Timer | None = None
    terminal: RankTerminal | None = None  # of a debugger that needs one

    def end_terminal(self) -> None:
        if self.terminal:
            self.terminal.close()
        self.terminal = None


class DebugServer:
    """All that is debugged on this node, in every attempt."""

    def __init__(
        self,
        loop: EventLoop,
        folder: RunTempDir,
        idle_timeout_s: float,
        on_stop_unattended: Callable[[DebugServer], object],
        inspect_job: Callable[[Detail, Callable[[Inspection], None]], None],
        notify: Callable[[str], None],
        send: Callable[[FromNode], None],
        on_active_changed: Callback,
    ) -> None:
        """``idle_timeout_s``: seconds for which a rank waits while nobody types; ``inspect_job`` looks at all ranks of the job.

        ``on_stop_unattended`` is called with this when a rank stops and nobody is there: a person here may then ``attach_user``.

        ``send`` tells the job; ``on_active_changed`` is called when the first rank stops, and when none is stopped any more.
        """
        self._loop, self._folder, self._patience, self._invite = loop, folder, idle_timeout_s, on_stop_unattended
        self._inspect, self._note, self._tell, self._changed = inspect_job, notify, send, on_active_changed
        self._ranks: NodeRanks | None = None
        self._socket: socket.socket | None = None
        self._known: dict[int, Debuggee] = {}
        self._connections: set[Connection[FromDebugger]] = set()
        self._people: list[Person] = []
        self._asked: set[int] = set()  # ranks that are to stop
        self._withdrawn: set[int] = set()  # those of them that need not any more: who asked has gone
        self._told = False
        self._judged = False  # whether the person has left a rank that has failed, by which the attempt ends

    def start_attempt(self, ranks: NodeRanks) -> None:
        """An attempt starts."""
        self._ranks, ranks.debug_server, self._judged = ranks, self, False
        self._asked, self._withdrawn = set(), set()

    def socket_path(self) -> str:
        """Where ranks connect; "" where no place for it is to be had."""
        if not self._folder.path:
            return ""
        path = os.path.join(self._folder.path, "debugger")
        if self._socket is None:
            try:
                self._socket = _listen_unix(self._folder.path, path)
                self._loop.watch_fd(self._socket.fileno(), self._accept_rank)
            except OSError as error:
                self._note(f"no rank can be debugged: {path}: {error.strerror or error}")
        return path if self._socket is not None else ""

    @property
    def is_active(self) -> bool:
        """Whether a rank here is in its debugger."""
        return any(each.stopped or each.is_stepping for each in self._known.values())

    def release_ranks(self) -> None:
        """The ranks are being stopped: none is to wait for a person."""
        for rank, each in list(self._known.items()):
            each.connection.send(DetachUser(rank))
            self._on_rank_disconnect(rank, each)

    def close(self) -> None:
        for each in self._known.values():
            each.end_terminal()
        for connection in self._connections:
            connection.close()
        if self._socket is not None:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None

    # ------------------------------------------------------------------------------------------------- from ranks

    def _accept_rank(self) -> None:
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        if peer_uid(sock) != os.geteuid():
            sock.close()
            return
        from ddplaunch.wire.connection import Connection

        connection: Connection[FromDebugger] = Connection(
            self._loop,
            sock,
            FROM_DEBUGGER,
            lambda message: self._on_rank_message(connection, message),
            lambda why: lost(),
        )
        self._connections.add(connection)

        def lost() -> None:
            self._connections.discard(connection)
            for rank, each in list(self._known.items()):
                if each.connection is connection:
                    self._on_rank_disconnect(rank, each)
                    del self._known[rank]

    def _on_rank_message(self, connection: Connection[FromDebugger], message: FromDebugger) -> None:
        rank = message.rank
        each = self._known.get(rank)
        if each is None or each.connection is not connection:
            each = self._known[rank] = Debuggee(connection)
        match message:
            case RankStopped():
                if each.detached and not message.error:
                    if message.tool:  # it has looked for what we say before that came, and looks no more
                        each.stopped = message
                        self._resume_rank(rank, each)
                    return None
                if rank in self._withdrawn or (message.error and self._judged):
                    self._withdrawn.discard(rank)
                    return connection.send(DetachUser(rank))
                if self._ranks:
                    message = replace(message, world_size=self._ranks.plan.world_size)
                if not self._people:
                    self._invite(self)
                if not self.is_active:
                    self._loop.call_later(TIMEOUT_CHECK_DELAY_S, partial(self._inspect_timeouts, message))
                each.stopped, each.output, each.detached = message, b"", False
                if not each.is_stepping:
                    self._announce_stop(message)
                each.is_stepping = False
                self._asked.discard(rank)
                self._start_idle_timer(rank, each)
                if message.tool:
                    each.prompt = _PROMPT_FORMAT.format(rank)
                    self._send_to_user(message)
                    self._send_to_user(DebuggerOutput(rank, b"", each.prompt))
                    return self._report_active()
            case TerminalRequest():
                return connection.send(TerminalRequest(rank, self._open_terminal(rank, each)))
            case DebuggerOutput(data=data, prompt=prompt):
                each.output, each.prompt = (each.output + data)[-SCROLLBACK_BYTES:], prompt
            case RankResumed(is_stepping=steps):
                self._judged |= bool(each.stopped and each.stopped.error)
                if each.terminal:
                    each.terminal.read_output()
                each.stopped, each.is_stepping, each.prompt = None, steps and not each.detached, ""
                if not steps and each.timer:
                    each.timer.cancel()
            case QuitRequested():
                return self._on_quit(rank)
        self._send_to_user(message)
        self._report_active()

    def _on_quit(self, rank: int) -> None:
        self._note(f"rank {rank}: q in the debugger ends the job")
        self._tell(StopRequested(signal.SIGTERM))

    def _open_terminal(self, rank: int, each: Debuggee) -> str:
        """The path of the rank's terminal."""
        try:
            each.terminal = each.terminal or RankTerminal(
                self._loop, lambda data: self._send_to_user(TerminalOutput(rank, data))
            )
            return each.terminal.path
        except OSError as error:
            self._note(f"rank {rank}: its debugger has no terminal: {error.strerror}; PYTHONBREAKPOINT= takes pdb")
            return ""

    def _resume_rank(self, rank: int, each: Debuggee) -> None:
        """Let a rank run on that its person has left; a debugger that minds no end of its terminal is interrupted."""
        each.connection.send(DetachUser(rank))
        if each.terminal:
            each.end_terminal()
            each.prompt = ""
            self._loop.call_later(STOP_TIMEOUT_S, partial(self._interrupt, rank, each.stopped))

    def _interrupt(self, rank: int, stopped: RankStopped | None) -> None:
        each, line = self._known.get(rank), self._ranks and self._ranks.channels.get(rank)
        process = self._ranks and self._ranks.processes.get(rank)
        if (
            stopped
            and each
            and each.stopped is stopped
            and process
            and line
            and is_caught(process.pid, line.debug_signal)
        ):
            process.send(line.debug_signal)

    def _announce_stop(self, stopped: RankStopped) -> None:
        rank, attach = stopped.rank, "" if self._people else f"; {self.attach_command()} attaches"
        if stopped.error:
            text = f"rank {rank} has failed at {stopped.location}: {stopped.error}; it stays until q{attach}"
        elif rank in self._asked:
            text = f"rank {rank} has stopped: {stopped.location}{attach}"
        else:
            text = f"rank {rank} is at a breakpoint: {stopped.location}{attach}"
        self._note(text)

    def attach_command(self) -> str:
        """The command by which a person comes to the ranks of this node, and where it is to be typed."""
        assert self._ranks is not None
        plan = self._ranks.plan
        words = f"`ddplaunch debug {plan.run_id}`"
        if plan.nnodes == 1:
            return words
        return f"{words} on {plan.local_ranks[0].host or f'node {plan.node_rank}'}"

    def _start_idle_timer(self, rank: int, each: Debuggee) -> None:
        """From now on the rank waits for a person, for some time."""
        if each.timer:
            each.timer.cancel()
        each.timer = self._loop.call_later(self._patience, partial(self._on_idle_timeout, rank, each))

    def _on_idle_timeout(self, rank: int, each: Debuggee) -> None:
        if each.stopped:
            self._note(
                f"rank {rank} goes on: nobody typed anything for {format_elapsed(self._patience)} (--debug-timeout)"
            )
            self._resume_rank(rank, each)

    def _on_rank_disconnect(self, rank: int, each: Debuggee) -> None:
        if each.timer:
            each.timer.cancel()
        each.end_terminal()
        if each.stopped or each.is_stepping:
            each.stopped, each.is_stepping, each.prompt = None, False, ""
            self._send_to_user(RankResumed(rank))
            self._report_active()

    def _report_active(self) -> None:
        if self.is_active != self._told:
            self._told = self.is_active
            self._tell(DebuggerActive(max(0, self._ranks.number if self._ranks else 0), self._told))
            self._changed()

    def _inspect_timeouts(self, stopped: RankStopped) -> None:
        """Say how long the ranks that wait meanwhile are allowed to."""
        if any(each.stopped is stopped for each in self._known.values()):
            self._inspect(diagnosis.inspection.Detail.WAITS, partial(self._report_time_left, stopped))

    def _report_time_left(self, stopped: RankStopped, inspection: Inspection) -> None:
        waits = [
            (each.entered + each.timeout - time.time(), each.operation)
            for rank in inspection.ranks
            for each in rank.last
            if not each.completed and each.timeout
        ]
        left, operation = min(waits, default=(0.0, ""))
        if not 0 < left < IGNORED_TIMEOUT_S or not any(each.stopped is stopped for each in self._known.values()):
            return
        advice = "" if left < TIMEOUT_WARNING_S else "; with run --debug it is a day"
        self._note(f"{operation} of the other ranks fails in {format_elapsed(left)}, by torch's own timeout{advice}")
        if left > 2 * TIMEOUT_WARNING_S:
            self._loop.call_later(left - TIMEOUT_WARNING_S, partial(self._inspect_timeouts, stopped))

    # ------------------------------------------------------------------------------------------------ from people

    def attach_user(self, person: Person) -> None:
        """A person has come, and is asked from now on; one who was asked before sees the ranks no more."""
        if self.is_active:
            self._send_to_user(SessionTakenOver())
        self._people.append(person)
        known = sorted(self._known.items())
        for rank, each in known:
            each.connection.send(AttachUser(rank))
            each.detached = False
            if each.stopped:
                person(each.stopped)
        for rank, each in known:
            if each.stopped:
                person(DebuggerOutput(rank, each.output, each.prompt))
                if each.terminal:
                    person(TerminalOutput(rank, each.terminal.scrollback))

    def detach_user(self, person: Person) -> None:
        """A person has gone: ranks that are in their debugger run on."""
        current = self._people[-1] is person
        self._people.remove(person)
        self._withdrawn |= self._asked
        self._asked.clear()
        for rank, each in self._known.items():
            if current and (each.stopped or each.is_stepping):
                self._resume_rank(rank, each)
                each.detached, each.is_stepping = True, False
        self._report_active()

    def on_user_message(self, message: FromUser) -> None:
        """Do what a person wants."""
        each = self._known.get(message.rank)
        if isinstance(message, PauseRank):
            return self._pause_rank(message.rank)
        if each is None:
            return
        if isinstance(message, KeyInput | TerminalResized):
            return self._write_terminal(each, message)
        if not each.prompt:
            return
        if each.stopped and each.stopped.tool:
            return self._run_command(
                message.rank, each, message.line.strip(" ") if isinstance(message, LineInput) else ""
            )
        if isinstance(message, LineInput):
            each.output, each.prompt = b"", ""
            self._start_idle_timer(message.rank, each)
        each.connection.send(message)

    def _write_terminal(self, each: Debuggee, message: KeyInput | TerminalResized) -> None:
        if each.terminal is None:
            return
        if isinstance(message, KeyInput):
            if each.stopped:
                self._start_idle_timer(message.rank, each)
            return each.terminal.write_input(message.data)
        each.terminal.set_size(message.columns, message.rows)
        if self._ranks and (process := self._ranks.processes.get(message.rank)):
            process.send(signal.SIGWINCH)  # which a program that does not care ignores

    def _run_command(self, rank: int, each: Debuggee, line: str) -> None:
        """Do what a line says, beside a debugger that takes keys alone."""
        assert each.stopped is not None
        if line in ("detach", EOF_LINE):
            return self._resume_rank(rank, each)
        if line in ("q", "quit", "exit"):
            return self._on_quit(rank)
        said = f"rank {rank} is in {each.stopped.tool}, which needs a terminal; here: detach, q, @RANK\n"
        self._send_to_user(DebuggerOutput(rank, f"ddplaunch: {said}".encode(), each.prompt))

    def _send_to_user(self, message: ToUser | QuitRequested) -> None:
        if self._people and not isinstance(message, QuitRequested):
            self._people[-1](message)

    def _send_refusal(self, text: str) -> None:
        self._send_to_user(DebugNotice(text, is_refusal=True))

    def _pause_rank(self, rank: int) -> None:
        """Stop a rank that runs, and say where it is if it does not stop soon."""
        ranks = self._ranks
        each = self._known.get(rank)
        if ranks is None or (each and each.stopped):
            return
        process, line = ranks.processes.get(rank), ranks.channels.get(rank)
        if line is not None:
            line.read_pending()
        if not 0 <= rank < ranks.plan.world_size:
            return self._send_refusal(f"there is no rank {rank}: this job has {all_ranks(ranks.plan.world_size)}")
        if all(rank != local.rank for local in ranks.plan.local_ranks):
            return self._inspect(diagnosis.inspection.Detail.WAITS, partial(self._report_busy_rank, rank))
        if process is None:
            return self._send_refusal(f"rank {rank} does not run")
        if line is None or not line.debug_signal or not is_caught(process.pid, line.debug_signal):
            return self._send_refusal(f"rank {rank} cannot be stopped: its program has not begun, or takes that signal")
        self._asked.add(rank)
        if each:
            each.detached = False
        self._withdrawn.discard(rank)
        process.send(line.debug_signal)
        self._loop.call_later(STOP_TIMEOUT_S, partial(self._explain_delay, rank))

    def _report_busy_rank(self, rank: int, inspection: Inspection) -> None:
        assert self._ranks is not None
        found = inspection.by_number.get(rank)
        where = f"on {found.host}" if found and found.host else "on its own node"
        command = f"`ddplaunch debug {self._ranks.plan.run_id} --rank {rank}`"
        self._send_refusal(f"rank {rank} is on another node: type {command} {where}")

    def _explain_delay(self, rank: int) -> None:
        if rank in self._asked:
            self._inspect(diagnosis.inspection.Detail.WAITS, partial(self._report_location, rank))

    def _report_location(self, rank: int, inspection: Inspection) -> None:
        found = inspection.by_number.get(rank)
        if rank in self._asked and found is not None:
            place = diagnosis.stall.describe_locations([found]) or "in native code"
            text = f"rank {rank} has not come to another line yet: {place}; it stops when that returns, Ctrl-C leaves"
            self._send_to_user(DebugNotice(text))


def _listen_unix(folder: str, path: str) -> socket.socket:
    """Listen there; the path of a socket may be too long, which one through a descriptor is not."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return listen_unix(path)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return listen_unix(f"/proc/self/fd/{fd}/{os.path.basename(path)}")
    finally:
        os.close(fd)
