"""The observer of ``--notify``: it hands each event of the job to the user's commands, and is never in the job's way.

The commands run below a process of their own (``rank/notifier.py``), which ends what each leaves, and everything when
we are gone. Events wait here until those before them have been told.
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

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent import children, job, limits
from ddplaunch.control.failure import describe_exit
from ddplaunch.errors import host_name, sanitize_line
from ddplaunch.loop import EventLoop
from ddplaunch.output import events
from ddplaunch.plan.plan import Plan
from ddplaunch.rank import processes
from ddplaunch.words import format_count

if TYPE_CHECKING:
    from ddplaunch.agent.policy import NotifyCommand
    from ddplaunch.control.failure import FailureReport
    from ddplaunch.output.events import Event
    from ddplaunch.output.screen import Screen

COMMAND_TIMEOUT_S = 30.0  # seconds that a command has for one event
FINAL_TIMEOUT_S = 10.0  # seconds for which the end of the launcher waits for commands
MAX_EVENTS = 100  # events of a run; the end is told besides
MAX_TEXT = 2000  # characters of a text, and of the last lines of a traceback
MAX_LINES = 12  # of a traceback, the last

_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "notifier.py")


class NotifyObserver:
    """Tells of one job; on node 0 alone."""

    def __init__(self, loop: EventLoop, plan: Plan, commands: Sequence[NotifyCommand], screen: Screen) -> None:
        self._loop, self._plan, self._commands = loop, plan, commands
        self._screen, self._say = screen, screen.show_note
        self._environ = {name: value for name, value in os.environ.items() if name not in job.LAUNCHER_VARIABLES}
        self._strangers = processes.list_children()  # that a shell which became us has left
        self._began = time.time()
        self._attempt = 0
        self._waiting: deque[bytes] = deque()
        self._count = 0
        self._said: set[int] = set()  # the commands whose failure was said
        self._line: socket.socket | None = None
        self._child: children.ChildProcess | None = None
        self._answer = b""
        self._busy = self._lost = False

    def observe(self, event: Event) -> None:
        match event:
            case events.AttemptPlanned(plan=plan, attempt=attempt):
                self._plan, self._attempt = plan, attempt
                if attempt == 0:
                    self._enqueue(
                        "starts",
                        f"starts {format_count(plan.world_size, 'rank')} on {format_count(plan.nnodes, 'node')}",
                    )
            case events.JobStalled(since=since, text=text) if text:
                self._enqueue("stalls", text, {"since": since})
            case events.JobPreempted():
                self._enqueue("preempted", "is asked to make room")
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
                self._say(f"--notify: {MAX_EVENTS} events were told; of the others only the end will be")
            self._count = MAX_EVENTS + 1
            return
        self._count += 1
        plan = self._plan
        told = {
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
        self._waiting.append(json.dumps({**told, **(own or {})}).encode() + b"\n")
        self._send_next()

    def _send_next(self) -> None:
        if self._busy or not self._waiting or self._lost:
            return
        try:
            if self._line is None:
                self._line = self._start()
            self._line.sendall(self._waiting.popleft())  # it has read all before
            self._busy = True
        except OSError as error:
            self._on_notifier_lost(error.strerror or "it is gone")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        commands = json.dumps([[each.path, *each.argv] for each in self._commands])
        words = [sys.executable, "-I", "-S", _PROGRAM, str(theirs.fileno()), commands, f"{COMMAND_TIMEOUT_S:g}"]
        with theirs:
            theirs.set_inheritable(True)
            try:
                with limits.original_nofile_limit():
                    pid = os.posix_spawn(
                        sys.executable, words, self._environ, setsid=True, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
                    )
            except OSError:
                ours.close()
                raise
        self._child = children.ChildProcess(pid, cleans_up_itself=True)
        self._loop.watch_fd(ours.fileno(), self._on_reply)
        return ours

    def _on_reply(self) -> None:
        assert self._line is not None
        try:
            data = self._line.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return self._on_notifier_lost("its process was killed")
        self._answer += data
        if not self._answer.endswith(b"\n"):
            return
        failed, self._answer, self._busy = json.loads(self._answer), b"", False
        for number, code, words in failed:
            if number not in self._said:
                self._said.add(number)
                how = f"took more than {COMMAND_TIMEOUT_S:g} s and was ended" if code is None else describe_exit(code)
                last = f": {sanitize_line(words, 200)}" if words else ""
                self._say(f"--notify {self._commands[number].command_text} {how}{last}; the job goes on")
        self._send_next()

    def _on_notifier_lost(self, why: str) -> None:
        self._lost = True
        self._waiting.clear()
        self._say(f"--notify: nobody is told any more: {why}; the job goes on")
        self._close()

    def _close(self) -> None:
        if self._line is not None:
            self._loop.unwatch_fd(self._line.fileno())
            self._line.close()
            self._line = None
        if self._child is not None:
            self._child.wait(processes.KILL_TIMEOUT_S + 1)  # it kills what is below it, and goes
            self._child = None
        self._busy = False

    def finish(self) -> None:
        """Wait for the commands, a bounded time; nothing of them is left then."""
        over: list[bool] = []
        timer = self._loop.call_later(FINAL_TIMEOUT_S, lambda: over.append(True))
        while self._busy and not over:
            self._loop.run_once()
        timer.cancel()
        if self._busy:
            self._say(f"--notify was not done {FINAL_TIMEOUT_S:g} s after the job's end, and was ended")
        self._close()
        if self._lost and not self._strangers:
            children.kill_descendants(lambda pid: False)  # what it had started, and we have adopted
        while not self._screen.is_drained:
            self._loop.run_once()
