"""Runs a job on many hosts over SSH: starts it when all hosts are ready; merges their output and exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from msgspec import Struct

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE, sanitize_line
from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.text import join_names
from ddplaunch.core.node.signals import InspectKey
from ddplaunch.core.output.log_message import FORMATTER, JSON_LINE_START, LogMessage, MessageKind
from ddplaunch.core.output.sink import Sink
from ddplaunch.features.ssh.connection_limiter import RETRY_DELAY_S, ConnectionLimiter
from ddplaunch.features.ssh.remote_launcher import (
    GO_AT_ONCE_BYTE,
    GO_BYTE,
    HEARTBEAT_BYTE,
    INSPECT_BYTE,
    KILL_DELAY_S,
    SIGNAL_BYTES,
)
from ddplaunch.features.ssh.ssh_session import SshSession
from ddplaunch.system.plan.launch_command import MAX_QUOTED_CHARS
from ddplaunch.system.processes.proc_utils import FORWARDED_SIGNALS

HOST_TIMEOUT_S = 60.0  # for a host to connect and reply
SLOW_HOST_NOTICE_S = 5.0  # then hosts that have not replied are listed
_MAX_PROBED = 5  # hosts at a time to which a second connection is made to find out why they do not reply
MAX_PROBLEMS = 20  # listed for one host
OUTPUT_DRAIN_S = 5.0  # between the end of the first host and SIGTERM for those that still run
NODE_0_DELAY_S = 5.0  # beyond the heartbeat timeout, until node 0 has reported a lost node
_LOST_NODE = re.compile(rb"ddplaunch: node (\d+) \([^)]*\) was lost: ")
_COMPARED_VERSIONS = {"python": "Python", "torch": "torch", "cuda": "torch's CUDA", "nccl": "NCCL"}
_JSON_START = JSON_LINE_START.encode()
_OWN_LINE_STARTS = (b"ddplaunch: ", b"Error: ", _JSON_START)  # of a launcher's own messages
_SIGNAL_LETTERS = {number: letter for letter, number in SIGNAL_BYTES.items()}


class FleetState(Enum):
    """Phase of the job on the hosts."""

    CHECKING = "checking"
    RUNNING = "running"
    ENDING = "ending"


class HostProblem(Struct, frozen=True):
    """Why the job cannot run on a host."""

    host: str
    text: str
    unreached: bool = False


class Fleet:
    """All hosts of one job, in the order of their node ranks; times in seconds."""

    def __init__(
        self, heartbeat: float, grace: float, spares: int = 0, *, allow_mismatch: bool, preempt_signal: int | None
    ) -> None:
        """``preempt_signal``: None for none. With ``spares`` the job survives the loss of a host."""
        self._heartbeat, self._grace, self._allow_mismatch = heartbeat, grace, allow_mismatch
        self._preempt_signal, self._spares = preempt_signal, spares
        self.loop = EventLoop()
        self.problems: list[HostProblem] = []
        self._hosts: list[SshSession] = []
        self._left_out: list[SshSession] = []  # a spare takes the place of each
        self._limiter = ConnectionLimiter(())
        self._slow_hosts: list[SshSession] = []
        self._state = FleetState.CHECKING
        self._exit_code: int | None = None
        self._stop_code: int | None = None
        self._inspect_key = InspectKey()
        self._sinks = {1: Sink(self.loop, 1), 2: Sink(self.loop, 2)}
        for sink in self._sinks.values():
            sink.on_drained = self._resume_reading
        self._paused = False
        self._launcher_lines: Counter[bytes] = Counter()  # the launchers' lines that were printed, and how often
        self._launcher_lines_by_host: dict[SshSession, Counter[bytes]] = {}
        self._lost_nodes: set[int] = set()  # whose loss was reported
        self._unreported: list[SshSession] = []  # lost hosts that node 0 may still report
        self._reporting: set[SshSession] = set()  # hosts whose last line was printed by the launcher

    def run(self, begin: Sequence[Callable[[EventLoop], SshSession]]) -> int:
        """Connect to all hosts, run the job, and return its exit code when all hosts have ended; sets ``problems``."""
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCHLD)
        self.loop.add_signal_handlers(
            caught, self._on_signal, even_if_ignored=() if self._preempt_signal is None else (self._preempt_signal,)
        )
        self.loop.add_signal_handlers(FORWARDED_SIGNALS - {self._preempt_signal}, self._forward_signal)
        try:
            self._hosts = [start(self.loop) for start in begin]
            self._limiter = ConnectionLimiter([host.gateway for host in self._hosts])
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
        assert self._exit_code is not None
        return self._exit_code

    def _live_sessions(self) -> list[SshSession]:
        return [host for host in self._hosts if not host.has_ended]

    def _send_heartbeats(self) -> None:
        for host in self._live_sessions():
            host.send(HEARTBEAT_BYTE)
        self.loop.call_later(self._heartbeat / 3, self._send_heartbeats)

    # ---------------------------------------------------------------------------------------------------- connect

    def _start_connections(self) -> None:
        """Connect to as many hosts as the limiter allows now."""
        for node in self._limiter.next_hosts():
            self._hosts[node].start()

    def _on_hello(self, host: SshSession) -> None:
        self._limiter.release(self._hosts.index(host))
        self._start_connections()

    def _maybe_retry(self, host: SshSession) -> bool:
        """Retry a host if it, or a jump host, refused the connection; return whether it will be tried again."""
        node = self._hosts.index(host)
        if not host.was_refused:
            self._limiter.release(node)
            return False
        if not self._limiter.on_refused(node):
            return False
        host.reset()
        self.loop.call_later(RETRY_DELAY_S, partial(self._retry, node))
        return True

    def _retry(self, node: int) -> None:
        if self._state is FleetState.CHECKING:
            self._limiter.requeue(node)
            self._start_connections()

    def _warn_about_slow_hosts(self) -> None:
        """Print which hosts have not replied yet; give up those past ``HOST_TIMEOUT_S``."""
        if self._state is not FleetState.CHECKING:
            return
        self.loop.call_later(SLOW_HOST_NOTICE_S, self._warn_about_slow_hosts)
        now = time.monotonic()
        slow = [host for host in self._live_sessions() if host.facts is None and now - host.began >= SLOW_HOST_NOTICE_S]
        for host in slow:
            if host in slow[:_MAX_PROBED] and not host.has_replied:
                host.probe_shell()
            if now - max(host.began, host.last_input_at) >= HOST_TIMEOUT_S:  # to send a large code archive takes longer
                host.give_up(f"no reply within {HOST_TIMEOUT_S:g} s{_hint_for(host)}")
        if slow and slow != self._slow_hosts:
            more = f" and {len(slow) - 5} more" if len(slow) > 5 else ""
            self._print(f"waiting for {', '.join(host.name for host in slow[:5])}{more}{_hint_for(slow[0])}")
        self._slow_hosts = slow

    def _start_if_ready(self) -> None:
        """Once all hosts have replied or ended: start the job, or end it if there are problems."""
        if self._state is not FleetState.CHECKING or any(
            host.facts is None and not host.has_ended for host in self._hosts
        ):
            return
        duplicates = self._duplicate_hosts()
        self.problems = [problem for host in self._hosts for problem in self._problems_of(host)] + duplicates
        if self.problems and not duplicates and self._can_replace({problem.host for problem in self.problems}):
            self._leave_out(self.problems)
            self.problems = []
        if self.problems:
            unreached = any(problem.unreached for problem in self.problems)
            self._end(EXIT_UNAVAILABLE if unreached else EXIT_USAGE)
            return
        self._state = FleetState.RUNNING
        if receivers := [host.name for host in self._hosts if host.has_code_sent]:
            self._print(f"the code was sent to {join_names(receivers)}")
        uses_all_spares = bool(self._left_out) and len(self._left_out) == self._spares
        for host in self._hosts:
            if host not in self._left_out:
                host.send(GO_AT_ONCE_BYTE if uses_all_spares else GO_BYTE)

    def _can_replace(self, names: set[str]) -> bool:
        """Whether spares can take the places of these hosts; no spare can replace the first host."""
        return len(names) <= self._spares and self._hosts[0].name not in names

    def _leave_out(self, problems: Sequence[HostProblem]) -> None:
        """Start without these hosts: spares take their places."""
        texts: dict[str, list[str]] = {}
        for problem in problems:
            texts.setdefault(problem.host, []).append(problem.text)
        for name, why in texts.items():
            self._print(f"{name} is left out, a spare takes its place: {'; '.join(why)}")
        self._left_out = [host for host in self._hosts if host.name in texts]
        for host in self._left_out:
            if not host.has_ended:
                host.close_stdin()

    def _problems_of(self, host: SshSession) -> list[HostProblem]:
        if host.facts is None or host.has_ended:
            return [HostProblem(host.name, host.failure_reason, unreached=not host.was_reached)]
        problems = [
            HostProblem(host.name, sanitize_line(text, MAX_QUOTED_CHARS)) for text in host.facts.problems[:MAX_PROBLEMS]
        ]
        if not self._allow_mismatch:
            for name, what in _COMPARED_VERSIONS.items():
                known = [(getattr(each.facts.versions, name), each.name) for each in self._hosts if each.facts]
                first = next((each for each in known if each[0] is not None), None)
                own = getattr(host.facts.versions, name)
                if first is not None and own != first[0]:
                    text = f"{what} is {own or 'missing'} there, {' on '.join(first)}"
                    problems.append(HostProblem(host.name, sanitize_line(text, MAX_QUOTED_CHARS)))
                if name == "torch" and own is None:
                    break  # what comes with torch is missing too
        return problems

    def _duplicate_hosts(self) -> list[HostProblem]:
        """Find hosts that are the same machine as an earlier one: two ranks would use each of its GPUs."""
        duplicates, names = list[HostProblem](), dict[str, str]()
        for host in self._hosts:
            machine = host.facts.machine if host.facts and not host.has_ended else ""
            if machine and (first := names.setdefault(machine, host.name)) != host.name:
                duplicates.append(HostProblem(host.name, f"it is the same machine as {first}: name it once"))
        return duplicates

    # ---------------------------------------------------------------------------------------------------- run

    def _on_line(self, host: SshSession, number: int, line: bytes) -> None:
        """Called with a line of a host: print it, but only once if several launchers print it, such as a report."""
        if self._state is FleetState.CHECKING or self.problems:
            return  # a login banner, or a text that the problems contain
        if number == 2 and len(self._hosts) > 1 and self._is_launcher_line(host, line):
            if lost := _LOST_NODE.match(line):
                if (node := int(lost[1])) in self._lost_nodes:
                    return  # every launcher reports a lost node, and node 0 once more at the end
                self._lost_nodes.add(node)
            words = _without_node_fields(line) if line.startswith(_JSON_START) else line
            lines = self._launcher_lines_by_host.setdefault(host, Counter())
            lines[words] += 1
            if lines[words] <= self._launcher_lines[words]:
                return
            self._launcher_lines[words] += 1
        self._sinks[number].write(line)
        if self._sinks[number].is_full and not self._paused:
            self._paused = True
            for each in self._live_sessions():
                each.pause_reading()

    def _is_launcher_line(self, host: SshSession, line: bytes) -> bool:
        """Whether a launcher, not a rank, printed the line: it has a launcher's prefix, or is indented below one."""
        has_prefix = line.startswith(_OWN_LINE_STARTS)
        continues = line.startswith(b"  ") and host in self._reporting
        (self._reporting.add if has_prefix or continues else self._reporting.discard)(host)
        return has_prefix or continues

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
            self._print("cannot suspend a job over SSH: the hosts would treat it as lost")
        elif (
            self._state is not FleetState.CHECKING
            and os.isatty(2)
            and self._inspect_key.record_press(number, time.monotonic())
        ):
            self._print("inspecting the ranks; press Ctrl-\\ again to stop the job")
            self._hosts[0].send(INSPECT_BYTE)
        elif not self._live_sessions():  # only unread output is left
            os._exit(self._exit_code if self._exit_code is not None else EXIT_SIGNAL + number)
        else:
            self._stop_code = EXIT_PREEMPTED if number == self._preempt_signal else EXIT_SIGNAL + number
            if self._state is FleetState.CHECKING:
                self._end(self._stop_code)
                for host in self._live_sessions():
                    if not host.has_replied:  # remote_launcher has not started there
                        host.kill()
            for host in self._live_sessions():
                host.send(_SIGNAL_LETTERS[number])

    def _forward_signal(self, number: int) -> None:
        """Send a signal for the ranks to the launcher of node 0, which forwards it to the others."""
        if self._state is FleetState.RUNNING:
            for host in self._live_sessions()[:1]:
                host.send(_SIGNAL_LETTERS[number])

    # ---------------------------------------------------------------------------------------------------- end

    def _check_exits(self) -> None:
        for host in self._hosts:
            if not host.poll_exit() or host in self._left_out:
                continue
            for lost in self._unreported if host is self._hosts[0] else ():  # node 0 reports no more
                self._report_lost(lost)
            if self._state is FleetState.CHECKING:
                if not self._maybe_retry(host):
                    self._start_connections()
                    self._start_if_ready()
            elif self._spares and host is not self._hosts[0] and not self._hosts[0].has_ended:
                # Node 0 decides whether the job survives the loss; before the start, the loss is a problem of the host.
                if host.code is None and self._state is FleetState.RUNNING:
                    self._report_lost_later(host)
            elif host.code is None:
                self._on_host_lost(host)
            elif self._exit_code is None:
                self._exit_code = host.code
                self._wait_for_others(host)

    def _on_host_lost(self, host: SshSession) -> None:
        if self._exit_code is None:
            self._exit_code = self._stop_code or EXIT_UNAVAILABLE
            self._report_lost_later(host)
            self._wait_for_others(host)

    def _report_lost_later(self, host: SshSession) -> None:
        """Report a lost host after a delay, unless node 0 has reported it by then, in more detail."""
        if host is self._hosts[0] or self._hosts[0].has_ended:
            return self._report_lost(host)
        self._unreported.append(host)
        self.loop.call_later(self._heartbeat + NODE_0_DELAY_S, partial(self._report_lost, host))

    def _report_lost(self, host: SshSession) -> None:
        node = self._hosts.index(host)
        if node in self._lost_nodes:
            return
        self._lost_nodes.add(node)
        self._print(f"{host.name} was lost: {host.last_error_line or 'ssh ended without a message'}")

    def _wait_for_others(self, first: SshSession) -> None:
        """Wait for the other hosts: node 0 stops them, or they end by themselves. Their output may arrive late."""
        limit_s = math.inf if first.code == 0 else self._heartbeat + self._grace
        self.loop.call_later(OUTPUT_DRAIN_S, partial(self._stop_others, first, time.monotonic() + limit_s))

    def _stop_others(self, first: SshSession, deadline: float) -> None:
        """Stop the hosts that still run; before ``deadline`` only once no host has printed anything for a while."""
        if not self._live_sessions():
            return
        now = time.monotonic()
        if now < deadline and (
            self._paused or any(now - host.last_output_at < OUTPUT_DRAIN_S for host in self._live_sessions())
        ):
            self.loop.call_later(OUTPUT_DRAIN_S, partial(self._stop_others, first, deadline))
            return
        lost = [self._hosts[node] for node in self._lost_nodes]
        if first.code and any(host not in lost for host in self._live_sessions()):
            self._print(f"{first.name} has ended with exit code {first.code}; stopping the others")
        for host in self._live_sessions():
            host.send(_SIGNAL_LETTERS[signal.SIGTERM])
        self.loop.call_later(self._grace + KILL_DELAY_S, lambda: self._end(self._exit_code or 0))

    def _end(self, code: int) -> None:
        """Close all sessions; ``code`` is the exit code if no host has sent one."""
        self._state = FleetState.ENDING
        self._limiter.clear()
        self._exit_code = code if self._exit_code is None else self._exit_code
        for host in self._live_sessions():
            host.close_stdin()
        self.loop.call_later(OUTPUT_DRAIN_S, self._kill)

    def _kill(self) -> None:
        for host in self._live_sessions():
            host.kill()


def _hint_for(host: SshSession) -> str:
    return "" if host.has_replied else f"; does `ssh {host.name} true` work without a prompt?"


def _without_node_fields(line: bytes) -> bytes:
    """Remove time and node rank from a JSON message, so that equal messages of several nodes become identical."""
    try:
        message = json.loads(line)
    except ValueError:  # truncated, or not a message of ddplaunch
        return line
    return json.dumps({name: value for name, value in message.items() if name not in ("time", "node_rank")}).encode()
