"""Runs the commands of ``--notify`` on each event of the job, without delaying the job.

A notifier process (``notifier.py``) runs the commands. It kills the processes that a command leaves, and all commands
if the launcher ends. Events are queued here until the commands of earlier ones are done.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from ddplaunch.base import PACKAGE_DIR
from ddplaunch.base.errors import host_name, sanitize_line
from ddplaunch.base.text import format_count
from ddplaunch.core import events
from ddplaunch.core.events import Event
from ddplaunch.core.failures import FailureReport, describe_exit
from ddplaunch.core.feature import FeatureContext, NodeSide
from ddplaunch.features.notify.options import NotifyCommand
from ddplaunch.system.processes import child_processes, proc_utils, process_limits

COMMAND_TIMEOUT_S = 30.0  # for a command and one event
FINAL_TIMEOUT_S = 10.0  # how long the launcher waits for commands at its end
MAX_EVENTS = 100  # of a run, besides the end
MAX_TEXT = 2000  # characters of a text, and of a traceback
MAX_LINES = 12  # of a traceback, the last ones

_PROGRAM = os.path.join(PACKAGE_DIR, "features", "notify", "rank", "notifier.py")


class NotifyObserver(NodeSide):
    """Notifies the user of the events of one job; on node 0 only."""

    def __init__(self, context: FeatureContext, commands: Sequence[NotifyCommand]) -> None:
        self._loop, self._plan, self._tree, self._commands = context.loop, context.plan, context.tree, commands
        self._screen, self._show_note = context.screen, context.screen.show_note
        self._began = time.time()
        self._attempt = 0
        self._queue: deque[bytes] = deque()
        self._count = 0
        self._reported: set[int] = set()  # the commands whose failure was reported
        self._socket: socket.socket | None = None
        self._child: child_processes.ChildProcess | None = None
        self._reply = b""
        self._busy = self._lost = False
        self._loop.on_error = self._close  # else ``finish`` would wait for a reply that is not handled

    def observe(self, event: Event) -> None:
        match event:
            case events.AttemptPlanned(plan=plan, attempt=attempt):
                self._plan, self._attempt = plan, attempt
                if attempt == 0:
                    ranks, nodes = format_count(plan.world_size, "rank"), format_count(plan.nnodes, "node")
                    self._enqueue("starts", f"starts {ranks} on {nodes}")
            case events.JobStalled(since=since, text=text) if text:
                self._enqueue("stalls", text, {"since": since})
            case events.JobPreempted():
                self._enqueue("preempted", "is being preempted")
            case events.Restarting(attempt=attempt, wait=wait, text=text, verdict=verdict):
                if verdict:
                    self._on_failure(verdict)
                self._enqueue("restarts", text.splitlines()[-1], {"next_attempt": attempt, "wait": wait})
            case events.JobEnded(code=code, verdict=verdict, remark=remark):
                if verdict:
                    self._on_failure(verdict)
                seconds = round(time.time() - self._began, 3)
                text = f"ended with exit code {code} after {seconds:.0f} s"
                self._enqueue("ends", text, {"code": code, "seconds": seconds, "remark": remark}, last=True)

    def _on_failure(self, verdict: FailureReport) -> None:
        first = verdict.first
        lines = (first.traceback or "").splitlines()[-MAX_LINES:]
        own = {
            "rank": first.rank,
            "host": first.host,
            "exit_code": first.exit_code,
            "signal": first.signal,
            "traceback": [sanitize_line(line, MAX_TEXT // MAX_LINES) for line in lines],
        }
        self._enqueue("fails", verdict.blame or first.headline, own)

    def _enqueue(self, name: str, text: str, own: Mapping[str, object] | None = None, *, last: bool = False) -> None:
        if self._count >= MAX_EVENTS and not last:
            if self._count == MAX_EVENTS:
                limit = f"limit of {MAX_EVENTS} events reached"
                self._show_note(f"--notify: {limit}; only the end of the job will be reported")
            self._count = MAX_EVENTS + 1
            return
        self._count += 1
        plan = self._plan
        fields = {
            "event": name,
            "time": time.time(),
            "run_id": plan.run_id,
            "target": sanitize_line(" ".join(plan.target.argv), MAX_TEXT),
            "host": host_name(),
            "nnodes": plan.nnodes,
            "world_size": plan.world_size,
            "attempt": self._attempt,
            "text": sanitize_line(text, MAX_TEXT),
        }
        line = json.dumps({**fields, **(own or {})}, ensure_ascii=False)
        self._queue.append(line.encode(errors="backslashreplace") + b"\n")  # file names may be any bytes
        self._send_next()

    def _send_next(self) -> None:
        if self._busy or not self._queue or self._lost:
            return
        try:
            if self._socket is None:
                self._socket = self._start()
            self._socket.sendall(self._queue.popleft())  # does not block: the notifier has read all earlier events
            self._busy = True
        except OSError as error:
            self._on_notifier_lost(error.strerror or "it is gone")

    def _start(self) -> socket.socket:
        our_socket, child_socket = socket.socketpair()
        commands = json.dumps([[each.path, *each.argv] for each in self._commands])
        words = [sys.executable, "-I", "-S", _PROGRAM, str(child_socket.fileno()), commands, f"{COMMAND_TIMEOUT_S:g}"]
        with child_socket:
            child_socket.set_inheritable(True)
            signals = [signal.SIGPIPE, signal.SIGXFSZ]
            try:
                with process_limits.original_nofile_limit():
                    pid = os.posix_spawn(sys.executable, words, self._tree.environ, setsid=True, setsigdef=signals)
            except OSError:
                our_socket.close()
                raise
        self._child = child_processes.ChildProcess(pid, cleans_up_itself=True)
        self._loop.watch_fd(our_socket.fileno(), self._on_reply)
        return our_socket

    def _on_reply(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return self._on_notifier_lost("its process was killed")
        self._reply += data
        if not self._reply.endswith(b"\n"):
            return
        failed, self._reply, self._busy = json.loads(self._reply), b"", False
        for number, code, words in failed:
            if number not in self._reported:
                self._reported.add(number)
                how = f"took more than {COMMAND_TIMEOUT_S:g} s and was killed" if code is None else describe_exit(code)
                last = f": {sanitize_line(words, 200)}" if words else ""
                self._show_note(f"--notify {self._commands[number].command_text} {how}{last}; the job continues")
        self._send_next()

    def _on_notifier_lost(self, why: str) -> None:
        self._lost = True
        self._queue.clear()
        self._show_note(f"--notify disabled: {why}; the job continues")
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._loop.unwatch_fd(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.wait(proc_utils.KILL_TIMEOUT_S + 1)  # the notifier kills its descendants, and exits
            self._child = None
        self._busy = False

    def finish(self) -> None:
        """Wait for the commands, at most ``FINAL_TIMEOUT_S``, and kill what is left of them."""
        over: list[bool] = []
        timer = self._loop.call_later(FINAL_TIMEOUT_S, lambda: over.append(True))
        while self._busy and not over:
            self._loop.run_once()
        timer.cancel()
        if self._busy:
            late = f"{FINAL_TIMEOUT_S:g} s after the end of the job"
            self._show_note(f"--notify: killed commands that were still running {late}")
        self._close()
        if self._lost and not self._tree.unrelated_pids:
            # Processes of the notifier, which the launcher has adopted.
            child_processes.kill_descendants(lambda pid: False)
        while not self._screen.is_drained:
            self._loop.run_once()
