"""All hosts of a job over SSH: the job starts when all are ready, and has one output and one exit code."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from ddplaunch import rlimits
from ddplaunch.agent.signals import InspectKey
from ddplaunch.control.relay import FORWARDED_SIGNALS
from ddplaunch.dataclass import dataclass
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE, UsageError, sanitize_line
from ddplaunch.loop import EventLoop
from ddplaunch.output.sink import Sink
from ddplaunch.output.voice import FORMATTER, JSON_LINE_START, LogMessage, MessageKind, without_node_fields
from ddplaunch.ssh.client import MAX_QUOTED_CHARS, SshSession
from ddplaunch.ssh.remote import GO_BYTE, HEARTBEAT_BYTE, INSPECT_BYTE, KILL_DELAY_S, SIGNAL_BYTES
from ddplaunch.ssh.turns import RETRY_DELAY_S, ConnectionLimiter

HOST_TIMEOUT_S = 60.0  # seconds that a host has to connect and answer
SLOW_HOST_NOTICE_S = 5.0  # seconds after which the hosts that have not answered are named
MAX_PROBLEMS = 20  # lines for one host in the list of problems
OUTPUT_DRAIN_S = 5.0  # seconds between the end of the first host and SIGTERM for those that still run
_OTHER_FILES = 40  # descriptors beside those of the hosts: the event loop, outputs, an ssh that starts
_COMPARED_VERSIONS = {"python": "Python", "torch": "torch", "cuda": "torch's CUDA", "nccl": "NCCL"}
_JSON_START = JSON_LINE_START.encode()
_OWN_LINE_STARTS = (b"ddplaunch: ", b"Error: ", _JSON_START)  # of what a launcher says
_SIGNAL_LETTERS = {number: letter for letter, number in SIGNAL_BYTES.items()}


def raise_fd_limit(hosts: int) -> None:
    """Raise the limit on open files to three pipes for each host. Raises UsageError if the hard limit is lower."""
    needed = 3 * hosts + _OTHER_FILES
    soft, hard = rlimits.read(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        what = f"{hosts} hosts need {needed} open files, and at most {hard} are allowed (ulimit -Hn)"
        raise UsageError(what, "start fewer hosts, or ask for a higher limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class FleetState(Enum):
    """What the hosts are doing."""

    CHECKING = "checking"
    RUNNING = "running"
    ENDING = "ending"


@dataclass(frozen=True)
class HostProblem:
    """Why a host cannot take part."""

    host: str
    text: str
    unreached: bool = False


class Fleet:
    """The hosts of one job, in the order of their node ranks; times in seconds."""

    def __init__(
        self, heartbeat: float, grace: float, spares: int = 0, *, allow_mismatch: bool, preempt_signal: int | None
    ) -> None:
        """``preempt_signal``: the preemption signal; None for none. With ``spares`` the job goes on without a host."""
        self._heartbeat, self._grace, self._allow_mismatch = heartbeat, grace, allow_mismatch
        self._warning, self._spares = preempt_signal, spares
        self.loop = EventLoop()
        self.problems: list[HostProblem] = []
        self._hosts: list[SshSession] = []
        self._turns = ConnectionLimiter(())
        self._late: list[SshSession] = []
        self._stage = FleetState.CHECKING
        self._first: int | None = None
        self._asked: int | None = None
        self._question = InspectKey()
        self._sinks = {1: Sink(self.loop, 1), 2: Sink(self.loop, 2)}
        for sink in self._sinks.values():
            sink.on_drained = self._resume_reading
        self._paused = False
        self._said: Counter[bytes] = Counter()
        self._said_by: dict[SshSession, Counter[bytes]] = {}
        self._reporting: set[SshSession] = set()  # those whose last line was their launcher's

    def run(self, begin: Sequence[Callable[[EventLoop], SshSession]]) -> int:
        """Connect to all hosts, run the job, and return its exit code when no host is left; see ``problems``."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD)
        self.loop.add_signal_handlers(
            caught, self._on_signal, even_if_ignored=() if self._warning is None else (self._warning,)
        )
        self.loop.add_signal_handlers(FORWARDED_SIGNALS - {self._warning}, self._forward_signal)
        try:
            self._hosts = [start(self.loop) for start in begin]
            self._turns = ConnectionLimiter([host.way for host in self._hosts])
            for host in self._hosts:
                host.on_hello, host.on_facts, host.on_line = self._on_hello, self._start_if_ready, self._on_line
            self._start_connections()
            self.loop.call_later(SLOW_HOST_NOTICE_S, self._warn_about_slow_hosts)
            self._send_heartbeats()
            self._check_exits()
            while self._live_sessions() or not all(sink.is_drained for sink in self._sinks.values()):
                self.loop.run_once()
        finally:
            for host in self._live_sessions():
                host.close_stdin()
        assert self._first is not None
        return self._first

    def _live_sessions(self) -> list[SshSession]:
        return [host for host in self._hosts if not host.over]

    def _send_heartbeats(self) -> None:
        for host in self._live_sessions():
            host.send(HEARTBEAT_BYTE)
        self.loop.call_later(self._heartbeat / 3, self._send_heartbeats)

    # ---------------------------------------------------------------------------------------------------- before

    def _start_connections(self) -> None:
        """Connect to the hosts whose turn it is."""
        for node in self._turns.next_hosts():
            self._hosts[node].start()

    def _on_hello(self, host: SshSession) -> None:
        self._turns.release(self._hosts.index(host))
        self._start_connections()

    def _maybe_retry(self, host: SshSession) -> bool:
        """Try a host again if it, or a machine on the way, refused the connection; return whether we do."""
        node = self._hosts.index(host)
        if not host.was_refused:
            self._turns.release(node)
            return False
        if not self._turns.on_refused(node):
            return False
        host.reset()
        self.loop.call_later(RETRY_DELAY_S, partial(self._retry, node))
        return True

    def _retry(self, node: int) -> None:
        if self._stage is FleetState.CHECKING:
            self._turns.requeue(node)
            self._start_connections()

    def _warn_about_slow_hosts(self) -> None:
        """Name the hosts whose answer is late, and give up those that are too late."""
        if self._stage is not FleetState.CHECKING:
            return
        self.loop.call_later(SLOW_HOST_NOTICE_S, self._warn_about_slow_hosts)
        now = time.monotonic()
        late = [host for host in self._live_sessions() if host.facts is None and now - host.began >= SLOW_HOST_NOTICE_S]
        for host in late:
            if now - host.began >= HOST_TIMEOUT_S:
                host.give_up(f"no answer in {HOST_TIMEOUT_S:g} s{_hint_for(host)}")
        if late and late != self._late:
            more = f" and {len(late) - 5} more" if len(late) > 5 else ""
            self._print(f"waiting for {', '.join(host.name for host in late[:5])}{more}{_hint_for(late[0])}")
        self._late = late

    def _start_if_ready(self) -> None:
        """When all hosts have answered or ended: start the job, or end it."""
        if self._stage is not FleetState.CHECKING or any(host.facts is None and not host.over for host in self._hosts):
            return
        self.problems = [problem for host in self._hosts for problem in self._problems_of(host)] + self._named_twice()
        if self.problems:
            unreached = any(problem.unreached for problem in self.problems)
            self._end(EXIT_UNAVAILABLE if unreached else EXIT_USAGE)
            return
        self._stage = FleetState.RUNNING
        for host in self._hosts:
            host.send(GO_BYTE)

    def _problems_of(self, host: SshSession) -> list[HostProblem]:
        if host.facts is None or host.over:
            return [HostProblem(host.name, host.failure_reason, unreached=not host.was_reached)]
        found = [
            HostProblem(host.name, sanitize_line(text, MAX_QUOTED_CHARS)) for text in host.facts.problems[:MAX_PROBLEMS]
        ]
        if not self._allow_mismatch:
            for name, what in _COMPARED_VERSIONS.items():
                known = [(getattr(each.facts.versions, name), each.name) for each in self._hosts if each.facts]
                first = next((each for each in known if each[0] is not None), None)
                own = getattr(host.facts.versions, name)
                if first is not None and own != first[0]:
                    text = f"{what} is {own or 'missing'} there, {' on '.join(first)}"
                    found.append(HostProblem(host.name, sanitize_line(text, MAX_QUOTED_CHARS)))
                if name == "torch" and own is None:
                    break  # what comes with torch is missing too
        return found

    def _named_twice(self) -> list[HostProblem]:
        """The hosts that are one machine with an earlier one: there two ranks would use each GPU."""
        found, names = list[HostProblem](), dict[str, str]()
        for host in self._hosts:
            machine = host.facts.machine if host.facts and not host.over else ""
            if machine and (first := names.setdefault(machine, host.name)) != host.name:
                found.append(HostProblem(host.name, f"it is the same machine as {first}: name it once"))
        return found

    # ---------------------------------------------------------------------------------------------------- meanwhile

    def _on_line(self, host: SshSession, number: int, line: bytes) -> None:
        """Pass on what ranks print; a line that several launchers print, a report say, only once."""
        if self._stage is FleetState.CHECKING or self.problems:
            return  # a greeting, or what the problems say
        if number == 2 and len(self._hosts) > 1 and self._is_launcher_line(host, line):
            words = without_node_fields(line) if line.startswith(_JSON_START) else line
            said = self._said_by.setdefault(host, Counter())
            said[words] += 1
            if said[words] <= self._said[words]:
                return
            self._said[words] += 1
        self._sinks[number].write(line)
        if self._sinks[number].is_full and not self._paused:
            self._paused = True
            for each in self._live_sessions():
                each.pause_reading()

    def _is_launcher_line(self, host: SshSession, line: bytes) -> bool:
        """Whether a launcher says it, and no rank: its first words tell, or it belongs to such a line above it."""
        begins = line.startswith(_OWN_LINE_STARTS)
        below = line.startswith(b"  ") and host in self._reporting
        (self._reporting.add if begins or below else self._reporting.discard)(host)
        return begins or below

    def _resume_reading(self) -> None:
        if self._paused and not any(sink.is_full for sink in self._sinks.values()):
            self._paused = False
            for host in self._live_sessions():
                host.resume_reading()

    def _print(self, text: str) -> None:
        self._sinks[2].write(FORMATTER.format(LogMessage(MessageKind.NOTE, text)).encode())

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._check_exits()
        elif number == signal.SIGTSTP:
            self._print("a job over SSH cannot be suspended: its hosts would end it")
        elif self._stage is not FleetState.CHECKING and self._question.is_inspect_request(number):
            self._print("looking at the ranks; Ctrl-\\ again stops them")
            self._hosts[0].send(INSPECT_BYTE)
        elif not self._live_sessions():  # all that is left is output that nobody reads
            os._exit(self._first if self._first is not None else EXIT_SIGNAL + number)
        else:
            self._asked = EXIT_PREEMPTED if number == self._warning else EXIT_SIGNAL + number
            if self._stage is FleetState.CHECKING:
                self._end(self._asked)
                for host in self._live_sessions():
                    if not host.there:  # nothing of ours runs there
                        host.kill()
            for host in self._live_sessions():
                host.send(_SIGNAL_LETTERS[number])

    def _forward_signal(self, number: int) -> None:
        """Give a signal for the ranks to the first launcher, which tells the others."""
        if self._stage is FleetState.RUNNING:
            for host in self._live_sessions()[:1]:
                host.send(_SIGNAL_LETTERS[number])

    # ---------------------------------------------------------------------------------------------------- the end

    def _check_exits(self) -> None:
        for host in self._hosts:
            if not host.poll_exit():
                continue
            if self._stage is FleetState.CHECKING:
                if not self._maybe_retry(host):
                    self._start_connections()
                    self._start_if_ready()
            elif self._spares and host is not self._hosts[0] and not self._hosts[0].over:
                # Node 0 decides whether the job goes on without it; what fails before the start is named as a problem.
                if host.code is None and self._stage is FleetState.RUNNING:
                    self._report_lost(host)
            elif host.code is None:
                self._on_host_lost(host)
            elif self._first is None:
                self._first = host.code
                self._wait_for_others(host)

    def _on_host_lost(self, host: SshSession) -> None:
        if self._first is None:
            self._first = self._asked or EXIT_UNAVAILABLE
            self._report_lost(host)
            self._wait_for_others(host)

    def _report_lost(self, host: SshSession) -> None:
        self._print(f"{host.name} was lost: {host.last_error_line or 'ssh ended without a message'}")

    def _wait_for_others(self, first: SshSession) -> None:
        """The others end by themselves: by control, or because all is done. Their last output may take some time."""
        control = math.inf if first.code == 0 else self._heartbeat + self._grace
        self.loop.call_later(OUTPUT_DRAIN_S, partial(self._stop_others, first, time.monotonic() + control))

    def _stop_others(self, first: SshSession, patient: float) -> None:
        """Stop the hosts that still run, but until ``patient`` none that still prints or waits for us."""
        if not self._live_sessions():
            return
        now = time.monotonic()
        if now < patient and (
            self._paused or any(now - host.last_output_at < OUTPUT_DRAIN_S for host in self._live_sessions())
        ):
            self.loop.call_later(OUTPUT_DRAIN_S, partial(self._stop_others, first, patient))
            return
        if first.code:
            self._print(f"{first.name} has ended with exit code {first.code}; stopping the others")
        for host in self._live_sessions():
            host.send(_SIGNAL_LETTERS[signal.SIGTERM])
        self.loop.call_later(self._grace + KILL_DELAY_S, lambda: self._end(self._first or 0))

    def _end(self, code: int) -> None:
        """Close all sessions; ``code`` is the exit code if no host has given one."""
        self._stage = FleetState.ENDING
        self._turns.clear()
        self._first = code if self._first is None else self._first
        for host in self._live_sessions():
            host.close_stdin()
        self.loop.call_later(OUTPUT_DRAIN_S, self._kill)

    def _kill(self) -> None:
        for host in self._live_sessions():
            host.kill()


def _hint_for(host: SshSession) -> str:
    return "" if host.there else f"; does `ssh {host.name} true` end at once and ask nothing?"
