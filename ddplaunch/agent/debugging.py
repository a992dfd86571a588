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
    END_OF_INPUT,
    FROM_DEBUGGER,
    Attend,
    Drawn,
    Elsewhere,
    FromDebugger,
    FromPerson,
    GoesOn,
    Keys,
    Leave,
    Quits,
    Remark,
    Says,
    Sized,
    Stopped,
    StopRank,
    Terminal,
    ToPerson,
    Typed,
)
from ddplaunch.agent.rank_terminal import RankTerminal
from ddplaunch.agent.signals import catches
from ddplaunch.control.messages import Debugged, FromNode, Interrupted
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.loop import Callback, Loop, Timer
from ddplaunch.wire.sockets import MAX_PATH, listening, peer_uid
from ddplaunch.words import all_ranks, span

if TYPE_CHECKING:
    from ddplaunch.agent.ranks import Ranks
    from ddplaunch.agent.temporary import Temporary
    from ddplaunch.diagnosis.inspection import Detail, Inspection
    from ddplaunch.wire.connection import Connection

    Person = Callable[[ToPerson], None]

KEPT = 1 << 16  # bytes of what a debugger has said that somebody who comes later sees
SOON = 1.0  # seconds in which a rank that runs Python stops
LOOK = 5.0  # seconds after which the other ranks wait for one that has stopped
LAST_CALL = 60.0  # seconds before the others fail
NO_HURRY = 12 * 3600.0  # seconds that are not worth a word
_PROMPT = "(rank {}) "  # beside a debugger that has a terminal of its own


@dataclass
class Debuggee:
    """A rank that has been in its debugger; ``stopped`` while it is."""

    connection: Connection[FromDebugger]
    stopped: Stopped | None = None
    stepping: bool = False
    left: bool = False  # its person has gone, which it may learn of when it stops next
    said: bytes = b""  # since it has stopped, or was asked last
    prompt: str = ""  # of the line that it waits for; "" while it is at work
    timer: Timer | None = None
    terminal: RankTerminal | None = None  # of a debugger that needs one

    def end_terminal(self) -> None:
        if self.terminal:
            self.terminal.close()
        self.terminal = None


class Debugging:
    """All that is debugged on this node, in every attempt."""

    def __init__(
        self,
        loop: Loop,
        folder: Temporary,
        patience: float,
        invite: Callable[[Debugging], object],
        inspect: Callable[[Detail, Callable[[Inspection], None]], None],
        note: Callable[[str], None],
        tell: Callable[[FromNode], None],
        changed: Callback,
    ) -> None:
        """``patience``: seconds for which a rank waits while nobody types; ``inspect`` looks at all ranks of the job.

        ``invite`` is called with this when a rank stops and nobody is there: a person here may then ``attach``.

        ``tell`` tells the job; ``changed`` is called when the first rank stops, and when none is stopped any more.
        """
        self._loop, self._folder, self._patience, self._invite = loop, folder, patience, invite
        self._inspect, self._note, self._tell, self._changed = inspect, note, tell, changed
        self._ranks: Ranks | None = None
        self._socket: socket.socket | None = None
        self._known: dict[int, Debuggee] = {}
        self._connections: set[Connection[FromDebugger]] = set()
        self._people: list[Person] = []
        self._asked: set[int] = set()  # ranks that are to stop
        self._withdrawn: set[int] = set()  # those of them that need not any more: who asked has gone
        self._told = False
        self._judged = False  # whether the person has left a rank that has failed, by which the attempt ends

    def begin(self, ranks: Ranks) -> None:
        """An attempt starts."""
        self._ranks, ranks.debugging, self._judged = ranks, self, False
        self._asked, self._withdrawn = set(), set()

    def path(self) -> str:
        """Where ranks connect; "" where no place for it is to be had."""
        if not self._folder.path:
            return ""
        path = os.path.join(self._folder.path, "debugger")
        if self._socket is None:
            try:
                self._socket = _listening(self._folder.path, path)
                self._loop.watch(self._socket.fileno(), self._accept)
            except OSError as error:
                self._note(f"no rank can be debugged: {path}: {error.strerror or error}")
        return path if self._socket is not None else ""

    @property
    def busy(self) -> bool:
        """Whether a rank here is in its debugger."""
        return any(each.stopped or each.stepping for each in self._known.values())

    def release(self) -> None:
        """The ranks are being stopped: none is to wait for a person."""
        for rank, each in list(self._known.items()):
            each.connection.send(Leave(rank))
            self._gone(rank, each)

    def close(self) -> None:
        for each in self._known.values():
            each.end_terminal()
        for connection in self._connections:
            connection.close()
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    # ------------------------------------------------------------------------------------------------- from ranks

    def _accept(self) -> None:
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
            self._loop, sock, FROM_DEBUGGER, lambda message: self._hear(connection, message), lambda why: lost()
        )
        self._connections.add(connection)

        def lost() -> None:
            self._connections.discard(connection)
            for rank, each in list(self._known.items()):
                if each.connection is connection:
                    self._gone(rank, each)
                    del self._known[rank]

    def _hear(self, connection: Connection[FromDebugger], message: FromDebugger) -> None:
        rank = message.rank
        each = self._known.get(rank)
        if each is None or each.connection is not connection:
            each = self._known[rank] = Debuggee(connection)
        match message:
            case Stopped():
                if each.left and not message.error:
                    if message.tool:  # it has looked for what we say before that came, and looks no more
                        each.stopped = message
                        self._let_go(rank, each)
                    return None
                if rank in self._withdrawn or (message.error and self._judged):
                    self._withdrawn.discard(rank)
                    return connection.send(Leave(rank))
                if self._ranks:
                    message = replace(message, world_size=self._ranks.plan.world_size)
                if not self._people:
                    self._invite(self)
                if not self.busy:
                    self._loop.after(LOOK, partial(self._look_at_timeouts, message))
                each.stopped, each.said, each.left = message, b"", False
                if not each.stepping:
                    self._tell_of(message)
                each.stepping = False
                self._asked.discard(rank)
                self._wait_for(rank, each)
                if message.tool:
                    each.prompt = _PROMPT.format(rank)
                    self._forward(message)
                    self._forward(Says(rank, b"", each.prompt))
                    return self._tell_changed()
            case Terminal():
                return connection.send(Terminal(rank, self._terminal(rank, each)))
            case Says(data=data, prompt=prompt):
                each.said, each.prompt = (each.said + data)[-KEPT:], prompt
            case GoesOn(steps=steps):
                self._judged |= bool(each.stopped and each.stopped.error)
                if each.terminal:
                    each.terminal.read()
                each.stopped, each.stepping, each.prompt = None, steps and not each.left, ""
                if not steps and each.timer:
                    each.timer.cancel()
            case Quits():
                return self._quit(rank)
        self._forward(message)
        self._tell_changed()

    def _quit(self, rank: int) -> None:
        self._note(f"rank {rank}: q in the debugger ends the job")
        self._tell(Interrupted(signal.SIGTERM))

    def _terminal(self, rank: int, each: Debuggee) -> str:
        """The path of the rank's terminal."""
        try:
            each.terminal = each.terminal or RankTerminal(self._loop, lambda data: self._forward(Drawn(rank, data)))
            return each.terminal.path
        except OSError as error:
            self._note(f"rank {rank}: its debugger has no terminal: {error.strerror}; PYTHONBREAKPOINT= takes pdb")
            return ""

    def _let_go(self, rank: int, each: Debuggee) -> None:
        """Let a rank run on that its person has left; a debugger that minds no end of its terminal is interrupted."""
        each.connection.send(Leave(rank))
        if each.terminal:
            each.end_terminal()
            each.prompt = ""
            self._loop.after(SOON, partial(self._interrupt, rank, each.stopped))

    def _interrupt(self, rank: int, stopped: Stopped | None) -> None:
        each, line = self._known.get(rank), self._ranks and self._ranks.lines.get(rank)
        process = self._ranks and self._ranks.processes.get(rank)
        if stopped and each and each.stopped is stopped and process and line and catches(process.pid, line.stops):
            process.send(line.stops)

    def _tell_of(self, stopped: Stopped) -> None:
        rank, attach = stopped.rank, "" if self._people else f"; {self.where_to_type()} attaches"
        if stopped.error:
            text = f"rank {rank} has failed at {stopped.place}: {stopped.error}; it stays until q{attach}"
        elif rank in self._asked:
            text = f"rank {rank} has stopped: {stopped.place}{attach}"
        else:
            text = f"rank {rank} is at a breakpoint: {stopped.place}{attach}"
        self._note(text)

    def where_to_type(self) -> str:
        """The command by which a person comes to the ranks of this node, and where it is to be typed."""
        assert self._ranks is not None
        plan = self._ranks.plan
        words = f"`ddplaunch debug {plan.run_id}`"
        if plan.nnodes == 1:
            return words
        return f"{words} on {plan.local_ranks[0].host or f'node {plan.node_rank}'}"

    def _wait_for(self, rank: int, each: Debuggee) -> None:
        """From now on the rank waits for a person, for some time."""
        if each.timer:
            each.timer.cancel()
        each.timer = self._loop.after(self._patience, partial(self._give_up, rank, each))

    def _give_up(self, rank: int, each: Debuggee) -> None:
        if each.stopped:
            self._note(f"rank {rank} goes on: nobody typed anything for {span(self._patience)} (--debug-timeout)")
            self._let_go(rank, each)

    def _gone(self, rank: int, each: Debuggee) -> None:
        if each.timer:
            each.timer.cancel()
        each.end_terminal()
        if each.stopped or each.stepping:
            each.stopped, each.stepping, each.prompt = None, False, ""
            self._forward(GoesOn(rank))
            self._tell_changed()

    def _tell_changed(self) -> None:
        if self.busy != self._told:
            self._told = self.busy
            self._tell(Debugged(max(0, self._ranks.number if self._ranks else 0), self._told))
            self._changed()

    def _look_at_timeouts(self, stopped: Stopped) -> None:
        """Say how long the ranks that wait meanwhile are allowed to."""
        if any(each.stopped is stopped for each in self._known.values()):
            self._inspect(diagnosis.inspection.Detail.WAITS, partial(self._say_what_remains, stopped))

    def _say_what_remains(self, stopped: Stopped, inspection: Inspection) -> None:
        waits = [
            (each.entered + each.timeout - time.time(), each.operation)
            for rank in inspection.ranks
            for each in rank.last
            if not each.completed and each.timeout
        ]
        left, operation = min(waits, default=(0.0, ""))
        if not 0 < left < NO_HURRY or not any(each.stopped is stopped for each in self._known.values()):
            return
        advice = "" if left < LAST_CALL else "; with run --debug it is a day"
        self._note(f"{operation} of the other ranks fails in {span(left)}, by torch's own timeout{advice}")
        if left > 2 * LAST_CALL:
            self._loop.after(left - LAST_CALL, partial(self._look_at_timeouts, stopped))

    # ------------------------------------------------------------------------------------------------ from people

    def attach(self, person: Person) -> None:
        """A person has come, and is asked from now on; one who was asked before sees the ranks no more."""
        if self.busy:
            self._forward(Elsewhere())
        self._people.append(person)
        known = sorted(self._known.items())
        for rank, each in known:
            each.connection.send(Attend(rank))
            each.left = False
            if each.stopped:
                person(each.stopped)
        for rank, each in known:
            if each.stopped:
                person(Says(rank, each.said, each.prompt))
                if each.terminal:
                    person(Drawn(rank, each.terminal.said))

    def leave(self, person: Person) -> None:
        """A person has gone: ranks that are in their debugger run on."""
        current = self._people[-1] is person
        self._people.remove(person)
        self._withdrawn |= self._asked
        self._asked.clear()
        for rank, each in self._known.items():
            if current and (each.stopped or each.stepping):
                self._let_go(rank, each)
                each.left, each.stepping = True, False
        self._tell_changed()

    def take(self, message: FromPerson) -> None:
        """Do what a person wants."""
        each = self._known.get(message.rank)
        if isinstance(message, StopRank):
            return self._stop(message.rank)
        if each is None:
            return
        if isinstance(message, Keys | Sized):
            return self._type(each, message)
        if not each.prompt:
            return
        if each.stopped and each.stopped.tool:
            return self._obey(message.rank, each, message.line.strip(" ") if isinstance(message, Typed) else "")
        if isinstance(message, Typed):
            each.said, each.prompt = b"", ""
            self._wait_for(message.rank, each)
        each.connection.send(message)

    def _type(self, each: Debuggee, message: Keys | Sized) -> None:
        if each.terminal is None:
            return
        if isinstance(message, Keys):
            if each.stopped:
                self._wait_for(message.rank, each)
            return each.terminal.type(message.data)
        each.terminal.size(message.columns, message.rows)
        if self._ranks and (process := self._ranks.processes.get(message.rank)):
            process.send(signal.SIGWINCH)  # which a program that does not care ignores

    def _obey(self, rank: int, each: Debuggee, line: str) -> None:
        """Do what a line says, beside a debugger that takes keys alone."""
        assert each.stopped is not None
        if line in ("detach", END_OF_INPUT):
            return self._let_go(rank, each)
        if line in ("q", "quit", "exit"):
            return self._quit(rank)
        said = f"rank {rank} is in {each.stopped.tool}, which needs a terminal; here: detach, q, @RANK\n"
        self._forward(Says(rank, f"ddplaunch: {said}".encode(), each.prompt))

    def _forward(self, message: ToPerson | Quits) -> None:
        if self._people and not isinstance(message, Quits):
            self._people[-1](message)

    def _refuse(self, text: str) -> None:
        self._forward(Remark(text, refuses=True))

    def _stop(self, rank: int) -> None:
        """Stop a rank that runs, and say where it is if it does not stop soon."""
        ranks = self._ranks
        each = self._known.get(rank)
        if ranks is None or (each and each.stopped):
            return
        process, line = ranks.processes.get(rank), ranks.lines.get(rank)
        if line is not None:
            line.catch_up()
        if not 0 <= rank < ranks.plan.world_size:
            return self._refuse(f"there is no rank {rank}: this job has {all_ranks(ranks.plan.world_size)}")
        if all(rank != local.rank for local in ranks.plan.local_ranks):
            return self._inspect(diagnosis.inspection.Detail.WAITS, partial(self._refer, rank))
        if process is None:
            return self._refuse(f"rank {rank} does not run")
        if line is None or not line.stops or not catches(process.pid, line.stops):
            return self._refuse(f"rank {rank} cannot be stopped: its program has not begun, or takes that signal")
        self._asked.add(rank)
        if each:
            each.left = False
        self._withdrawn.discard(rank)
        process.send(line.stops)
        self._loop.after(SOON, partial(self._say_why_not_yet, rank))

    def _refer(self, rank: int, inspection: Inspection) -> None:
        assert self._ranks is not None
        found = inspection.by_number.get(rank)
        where = f"on {found.host}" if found and found.host else "on its own node"
        command = f"`ddplaunch debug {self._ranks.plan.run_id} --rank {rank}`"
        self._refuse(f"rank {rank} is on another node: type {command} {where}")

    def _say_why_not_yet(self, rank: int) -> None:
        if rank in self._asked:
            self._inspect(diagnosis.inspection.Detail.WAITS, partial(self._tell_where, rank))

    def _tell_where(self, rank: int, inspection: Inspection) -> None:
        found = inspection.by_number.get(rank)
        if rank in self._asked and found is not None:
            place = diagnosis.stall.where([found]) or "in native code"
            text = f"rank {rank} has not come to another line yet: {place}; it stops when that returns, Ctrl-C leaves"
            self._forward(Remark(text))


def _listening(folder: str, path: str) -> socket.socket:
    """Listen there; the path of a socket may be too long, which one through a descriptor is not."""
    if len(os.fsencode(path)) <= MAX_PATH:
        return listening(path)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return listening(f"/proc/self/fd/{fd}/{os.path.basename(path)}")
    finally:
        os.close(fd)
