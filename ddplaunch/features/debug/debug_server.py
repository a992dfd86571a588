"""The debug server: connects the ranks of this node that are in a debugger with the users who debug them.

A rank connects when it first stops (``rank_debugger.py``). The prompts of all users run in the launcher, for its own
terminal or for a client of the control socket; the last one who attached is in control. Ranks resume when the user
leaves or types nothing for long.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial

from ddplaunch.base.connection import Connection
from ddplaunch.base.local_sockets import listen_unix, peer_uid
from ddplaunch.base.text import format_elapsed, format_rank_range
from ddplaunch.core.agent.node_ranks import NodeRanks
from ddplaunch.core.agent.node_rpc import NodeRpc
from ddplaunch.core.agent.run_temp_dir import RunTempDir
from ddplaunch.core.isolation import IsolatedLoop
from ddplaunch.core.messages import FromNode, HoldChanged, StopRequested
from ddplaunch.features.debug import messages
from ddplaunch.features.debug.debuggee import Debuggee, DebugUser
from ddplaunch.features.debug.rank_terminal import RankTerminal
from ddplaunch.observe.diagnosis.inspection import Detail, Inspection
from ddplaunch.observe.diagnosis.stall_check import describe_locations
from ddplaunch.observe.rpc import inspect_job
from ddplaunch.system.processes.proc_utils import catches_signal

SCROLLBACK_BYTES = 1 << 16  # of a debugger's output that a user who attaches later sees
STOP_TIMEOUT_S = 1.0  # within it, a rank that executes Python stops
TIMEOUT_CHECK_DELAY_S = 5.0  # after it, the other ranks wait for a stopped one
TIMEOUT_WARNING_S = 60.0  # before the others fail
IGNORED_TIMEOUT_S = 12 * 3600.0  # a longer timeout is not reported
_PROMPT_FORMAT = "(rank {}) "  # for commands to the launcher, next to a debugger with a pseudo-terminal


class DebugServer:
    """Serves the debuggers of this node's ranks, in every attempt."""

    def __init__(
        self,
        loop: IsolatedLoop,
        folder: RunTempDir,
        idle_timeout_s: float,
        rpc: NodeRpc,
        notify: Callable[[str], None],
        send: Callable[[FromNode], None],
    ) -> None:
        """``idle_timeout_s``: a rank resumes after this time without input; ``rpc`` inspects all ranks.

        ``send`` sends a control message; ``notify`` shows a message.
        """
        self.loop, self._folder, self._idle_timeout_s = loop, folder, idle_timeout_s
        self.on_stop_unattended: Callable[[], object] = lambda: None
        """Called when a rank stops and no user is attached; it may call ``attach_user``."""
        self._rpc, self._notify, self._send = rpc, notify, send
        self._ranks: NodeRanks | None = None
        self._socket: socket.socket | None = None
        self._connected: list[Debuggee] = []
        self._known: dict[int, Debuggee] = {}  # by rank, from its first message on
        self._users: list[DebugUser] = []
        self._pausing: set[int] = set()  # ranks that a user has requested to stop
        self._withdrawn: set[int] = set()  # those of them whose user has left since then
        self._reported_active = False
        self._left_failed = False  # whether the user has left a failed rank, which ends the attempt

    def _inspect(self, on_done: Callable[[Inspection], None]) -> None:
        """Inspect all ranks and find out what they wait for."""
        inspect_job(self._rpc, Detail.WAITS, self.loop.guard(on_done))

    def start_attempt(self, ranks: NodeRanks) -> None:
        """Serve the ranks of a new attempt."""
        self._ranks, self._left_failed = ranks, False
        ranks.is_holding = self._reported_active
        self._pausing, self._withdrawn = set(), set()

    def socket_path(self) -> str:
        """Return the path of the socket that ranks connect to; "" if it cannot be created."""
        if not self._folder.path:
            return ""
        path = os.path.join(self._folder.path, "debugger")
        if self._socket is None:
            try:
                self._socket = _listen_at(path)
                self.loop.watch_fd(self._socket.fileno(), self._accept_rank)
            except OSError as error:
                self._notify(f"ranks cannot be debugged: {path}: {error.strerror or error}")
        return path if self._socket is not None else ""

    @property
    def is_active(self) -> bool:
        """Whether a rank of this node is in its debugger, or will soon be again."""
        return any(each.is_active for each in self._known.values())

    @property
    def world_size(self) -> int:
        return self._ranks.plan.world_size if self._ranks else 0

    def release_ranks(self, attempt: int) -> None:
        """Resume the ranks of an attempt, as they are being stopped: none may wait for a user."""
        if self._ranks is None or self._ranks.number != attempt:
            return
        self._withdrawn, self._pausing = self._withdrawn | self._pausing, set()
        for rank, each in list(self._known.items()):
            each.connection.send(messages.DetachUser(rank))
            self._on_rank_disconnect(rank, each)

    def close(self) -> None:
        for each in self._known.values():
            each.end_terminal()
        for each in self._connected:
            each.connection.close()
        if self._socket is not None:
            self.loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None

    # ------------------------------------------------------------------------------------------------ messages of ranks

    def _accept_rank(self) -> None:
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        if peer_uid(sock) != os.geteuid():
            return sock.close()
        connection = Connection[messages.FromDebugger](
            self.loop,
            sock,
            messages.FROM_DEBUGGER,
            lambda message: self._on_rank_message(debuggee, message),
            lambda why: self._on_lost(debuggee),
        )
        debuggee = Debuggee(connection)
        self._connected.append(debuggee)

    def _on_lost(self, each: Debuggee) -> None:
        self._connected.remove(each)
        for rank in [rank for rank, other in self._known.items() if other is each]:
            self._on_rank_disconnect(rank, each)
            del self._known[rank]

    def _on_rank_message(self, debuggee: Debuggee, message: messages.FromDebugger) -> None:
        rank = message.rank
        self._known[rank] = debuggee
        match message:
            case messages.RankStopped():
                if debuggee.detached and not message.error:
                    if message.tool:  # it checked for messages before ``DetachUser`` came, and does not check again
                        debuggee.stopped, debuggee.tool = message, message.tool
                        self._resume_rank(rank, debuggee)
                    return None
                if rank in self._withdrawn or (message.error and self._left_failed):
                    self._withdrawn.discard(rank)
                    return debuggee.connection.send(messages.DetachUser(rank))
                if not self._users:
                    self.on_stop_unattended()
                if not self.is_active:
                    self.loop.call_later(TIMEOUT_CHECK_DELAY_S, partial(self._inspect_timeouts, message))
                debuggee.stopped, debuggee.tool, debuggee.output = message, message.tool, b""
                debuggee.detached, debuggee.is_leaving, debuggee.is_arriving = False, False, True
                if not debuggee.is_stepping:
                    self._announce_stop(message)
                if message.tool:
                    debuggee.prompt, debuggee.is_arriving = _PROMPT_FORMAT.format(rank), False
                self._pausing.discard(rank)
                self._start_idle_timer(rank, debuggee)
            case messages.TerminalRequest():
                debuggee.connection.send(messages.TerminalRequest(rank, self._open_terminal(rank, debuggee)))
            case messages.DebuggerOutput(data=data, prompt=prompt):
                debuggee.output, debuggee.prompt = (debuggee.output + data)[-SCROLLBACK_BYTES:], prompt
                debuggee.is_arriving &= not prompt
            case messages.RankResumed(is_stepping=steps):
                self._left_failed |= bool(debuggee.stopped and debuggee.stopped.error)
                if debuggee.terminal:
                    debuggee.terminal.read_output()
                debuggee.set_running(steps=steps and not debuggee.detached)
                if rank in self._pausing:
                    self.pause_rank(rank)
            case messages.QuitRequested():
                self._on_quit(rank)
        self._call_controlling_user(lambda user: user.on_message(message))
        debuggee.is_stepping &= debuggee.stopped is None
        self._report_hold()

    def _on_quit(self, rank: int) -> None:
        self._notify(f"rank {rank}: q in the debugger ends the job")
        self._send(StopRequested(signal.SIGTERM))

    def _open_terminal(self, rank: int, debuggee: Debuggee) -> str:
        """Return the path of the rank's pseudo-terminal, "" if there is none."""
        try:
            debuggee.terminal = debuggee.terminal or RankTerminal(
                self.loop, lambda data: self._call_controlling_user(lambda user: user.on_terminal_output(rank, data))
            )
            return debuggee.terminal.path
        except OSError as error:
            self._notify(f"rank {rank}: no terminal for its debugger: {error.strerror}; PYTHONBREAKPOINT= selects pdb")
            return ""

    def _resume_rank(self, rank: int, debuggee: Debuggee) -> None:
        """Resume a rank because its user has left; interrupt a debugger that ignores its terminal's end of file."""
        debuggee.connection.send(messages.DetachUser(rank))
        debuggee.is_leaving = debuggee.stopped is not None
        if debuggee.terminal:
            debuggee.end_terminal()
            debuggee.prompt = ""
            self.loop.call_later(STOP_TIMEOUT_S, partial(self._interrupt_debugger, rank, debuggee.stopped))

    def _interrupt_debugger(self, rank: int, stopped: messages.RankStopped | None) -> None:
        each = self._known.get(rank)
        if stopped and each and each.stopped is stopped:
            self._send_signal(rank)

    def _send_signal(self, rank: int) -> None:
        """Send a rank the signal that stops it in its debugger, if its program still handles the signal."""
        channel, process = (
            self._ranks and self._ranks.channels.get(rank),
            self._ranks and self._ranks.processes.get(rank),
        )
        if process and channel and catches_signal(process.pid, number := channel.signals.get("debug", 0)):
            process.send(number)

    def _announce_stop(self, stopped: messages.RankStopped) -> None:
        assert self._ranks is not None
        rank, plan, attach = stopped.rank, self._ranks.plan, ""
        if not self._users:
            where = "" if plan.nnodes == 1 else f" on {plan.local_ranks[0].host or f'node {plan.node_rank}'}"
            attach = f"; attach with `ddplaunch debug {plan.run_id}`{where}"
        if stopped.error:
            what = f"has failed at {stopped.location}: {stopped.error}; it waits in the debugger until q"
        else:
            what = f"{'has stopped' if rank in self._pausing else 'is at a breakpoint'}: {stopped.location}"
        self._notify(f"rank {rank} {what}{attach}")

    def _start_idle_timer(self, rank: int, debuggee: Debuggee) -> None:
        """Restart the timer of a rank that waits for input."""
        if debuggee.timer:
            debuggee.timer.cancel()
        debuggee.timer = self.loop.call_later(self._idle_timeout_s, partial(self._on_idle_timeout, rank, debuggee))

    def _on_idle_timeout(self, rank: int, debuggee: Debuggee) -> None:
        if debuggee.stopped:
            idle = format_elapsed(self._idle_timeout_s)
            self._notify(f"rank {rank} resumes: no input for {idle} (--debug-timeout)")
            self._resume_rank(rank, debuggee)

    def _on_rank_disconnect(self, rank: int, each: Debuggee) -> None:
        each.end_terminal()
        if each.is_active:
            each.set_running(steps=False)
            self._call_controlling_user(lambda user: user.on_message(messages.RankResumed(rank)))
            self._report_hold()

    def _report_hold(self) -> None:
        if self.is_active != self._reported_active:
            self._reported_active = self.is_active
            if self._ranks is not None:
                self._send(HoldChanged(self._ranks.number, self._reported_active))
                self._ranks.set_waits_for_user(self._reported_active)

    def _inspect_timeouts(self, stopped: messages.RankStopped) -> None:
        """Find out when collectives of the waiting ranks time out."""
        if any(each.stopped is stopped for each in self._known.values()):
            self._inspect(partial(self._report_time_left, stopped))

    def _report_time_left(self, stopped: messages.RankStopped, inspection: Inspection) -> None:
        waits = [
            (each.entered + each.timeout - inspection.moment, each.operation)
            for rank in inspection.ranks
            for each in rank.last
            if not each.completed and each.timeout
        ]
        left, operation = min(waits, default=(0.0, ""))
        if not 0 < left < IGNORED_TIMEOUT_S or not any(each.stopped is stopped for each in self._known.values()):
            return
        advice = "" if left < TIMEOUT_WARNING_S else "; run --debug sets 24 hours"
        self._notify(f"{operation} of the other ranks times out in {format_elapsed(left)} (torch's timeout){advice}")
        if left > 2 * TIMEOUT_WARNING_S:
            self.loop.call_later(left - TIMEOUT_WARNING_S, partial(self._inspect_timeouts, stopped))

    # ------------------------------------------------------------------------------------------------------------ users

    def attach_user(self, user: DebugUser) -> None:
        """Give control of the debuggers to a user; the previous user gets it back when this one leaves."""
        before = self._users[-1:] if self.is_active else []
        self._users.append(user)
        for each in before:
            each.guard(each.on_taken_over)()
        for rank, debuggee in self._known.items():
            debuggee.connection.send(messages.AttachUser(rank))
            debuggee.detached = False
        self._call_controlling_user(lambda user: user.on_attached())

    def detach_user(self, user: DebugUser) -> None:
        """Called when a user has left: if the user was in control, resume the ranks that are in their debugger."""
        is_current = self.has_control(user)
        if user not in self._users:
            return
        self._users.remove(user)
        self._withdrawn, self._pausing = self._withdrawn | self._pausing, set()
        for rank, each in self._known.items():
            if is_current and each.is_active:
                self._resume_rank(rank, each)
                each.detached, each.is_stepping = True, False
        self._report_hold()

    def has_control(self, user: DebugUser) -> bool:
        return bool(self._users) and self._users[-1] is user

    def debuggees_of(self, user: DebugUser) -> dict[int, Debuggee]:
        """Return the ranks that are in their debugger, by number, if this user is in control of them."""
        if not self.has_control(user):
            return {}
        return {rank: each for rank, each in sorted(self._known.items()) if each.is_active and not each.is_leaving}

    def _call_controlling_user(self, call: Callable[[DebugUser], None]) -> None:
        """Call a method of the user in control."""
        if self._users:
            user = self._users[-1]
            user.guard(call)(user)

    def send_line(self, rank: int, line: str) -> None:
        """Send an input line to a rank that waits for one."""
        debuggee = self._known.get(rank)
        if debuggee is None or not debuggee.prompt:
            return
        prompt, debuggee.prompt, debuggee.output = debuggee.prompt, "", b""
        if debuggee.tool:
            return self._run_command(rank, debuggee, line.strip(" "), prompt)
        self._start_idle_timer(rank, debuggee)
        debuggee.connection.send(messages.LineInput(rank, line))

    def request_completions(self, rank: int, line: str) -> bool:
        """Request completions of the last word of a line; return whether the rank will send some."""
        each = self._known.get(rank)
        if each is None or not each.prompt or each.tool or len(line) > messages.MAX_LINE_CHARS:
            return False
        each.connection.send(messages.CompletionRequest(rank, line))
        return True

    def write_terminal(self, rank: int, data: bytes) -> None:
        """Write keys to the terminal of a rank."""
        debuggee = self._known.get(rank)
        if debuggee and debuggee.terminal:
            if debuggee.stopped:
                self._start_idle_timer(rank, debuggee)
            debuggee.terminal.write_input(data)

    def resize_terminal(self, rank: int, columns: int, rows: int) -> None:
        """Set the size of the terminal of a rank."""
        debuggee = self._known.get(rank)
        if debuggee and debuggee.terminal and columns:
            debuggee.terminal.set_size(columns, rows)
            if self._ranks and (process := self._ranks.processes.get(rank)):
                process.send(signal.SIGWINCH)  # ignored by default

    def _run_command(self, rank: int, debuggee: Debuggee, line: str, prompt: str) -> None:
        """Run a line that was typed for a rank whose debugger reads keys only: detach or quit; refuse other lines."""
        if line in ("detach", messages.EOF_LINE):
            return self._resume_rank(rank, debuggee)
        if line in ("q", "quit", "exit"):
            return self._on_quit(rank)
        text = f"rank {rank} is in {debuggee.tool}, which needs a terminal; commands here: detach, q, @RANK\n"
        debuggee.prompt = prompt
        self._call_controlling_user(
            lambda user: user.on_message(messages.DebuggerOutput(rank, f"ddplaunch: {text}".encode(), prompt))
        )

    def pause_rank(self, rank: int) -> None:
        """Stop a running rank; if it does not stop soon, show where it is."""
        ranks = self._ranks
        debuggee = self._known.get(rank)
        if ranks is None or (debuggee and debuggee.stopped):
            if debuggee and debuggee.is_leaving:
                self._pausing.add(rank)  # once it has resumed
            return
        process, channel = ranks.processes.get(rank), ranks.channels.get(rank)
        if channel is not None:
            channel.read_pending()
        number = channel.signals.get("debug", 0) if channel else 0
        refusal = ""
        if not 0 <= rank < ranks.plan.world_size:
            refusal = f"there is no rank {rank}: this job has {format_rank_range(0, ranks.plan.world_size - 1)}"
        elif all(rank != local.rank for local in ranks.plan.local_ranks):
            return self._inspect(partial(self._refuse_remote_rank, rank))
        elif process is None:
            refusal = f"rank {rank} is not running"
        elif not catches_signal(process.pid, number):
            refusal = f"rank {rank} cannot be stopped: its program has not started, or handles that signal"
        if refusal or process is None:
            return self._call_controlling_user(lambda user: user.refuse(refusal))
        self._pausing.add(rank)
        if debuggee:
            debuggee.detached = False
        self._withdrawn.discard(rank)
        process.send(number)
        self.loop.call_later(STOP_TIMEOUT_S, partial(self._explain_delay, rank))

    def _refuse_remote_rank(self, rank: int, inspection: Inspection) -> None:
        assert self._ranks is not None
        found = inspection.by_number.get(rank)
        where = f"on {found.host}" if found and found.host else "on its own node"
        command = f"`ddplaunch debug {self._ranks.plan.run_id} --rank {rank}`"
        self._call_controlling_user(lambda user: user.refuse(f"rank {rank} is on another node: run {command} {where}"))

    def _explain_delay(self, rank: int) -> None:
        if rank in self._pausing:
            self._send_signal(rank)  # again: a rank ignores it in the moment after it has reported that it continues
            self._inspect(partial(self._report_location, rank))

    def _report_location(self, rank: int, inspection: Inspection) -> None:
        found = inspection.by_number.get(rank)
        if rank in self._pausing and found is not None:
            place = describe_locations([found]) or "in native code"
            text = f"rank {rank} has not reached another line yet: {place}; it stops when that returns, Ctrl-C leaves"
            self._call_controlling_user(lambda user: user.show_note(text))


def _listen_at(path: str) -> socket.socket:
    """Listen at ``path`` through a descriptor of its folder, as the path may be too long for a Unix socket."""
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        return listen_unix(f"/proc/self/fd/{fd}/{os.path.basename(path)}")
    finally:
        os.close(fd)
