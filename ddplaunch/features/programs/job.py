"""A job's programs, on node 0: the ranks wait for them, their failure ends the job, and the job waits for the mains."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddplaunch.base.errors import EXIT_TIMEOUT, EXIT_UNAVAILABLE
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.text import format_elapsed, join_names
from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import JobContext, JobSide
from ddplaunch.core.job.job_attempt import StopCause
from ddplaunch.core.messages import FromNode, NoteMessage, RanksFinished
from ddplaunch.features.programs.messages import (
    HeldAddress,
    HoldPorts,
    MainDone,
    MainEnded,
    PortsHeld,
    ProgramFailed,
    ProgramIsReady,
    ReadyPrograms,
    StartPrograms,
    StopMains,
)
from ddplaunch.features.programs.options import ProgramOptions
from ddplaunch.features.programs.placement import place_programs
from ddplaunch.features.programs.spec import Programs
from ddplaunch.system.processes.proc_utils import KILL_TIMEOUT_S

STOP_MARGIN_S = 5.0  # beyond the grace of a main, for its node to report its end
_LOST_SERVER = re.compile(
    r"(?i)connection|connect(or)?error|disconnected|broken pipe|reset by peer|urlerror|readerror|remoteprotocolerror|"
    r"\b50[0234]\b|internal ?server ?error|bad gateway|(service|temporarily) unavailable|gateway time-?out"
)
"""Exceptions of a client whose server is gone, or ends: of sockets, urllib, requests, httpx, aiohttp, openai, zmq."""


class ProgramsJob(JobSide):
    """The job side: starts the programs once the addresses of all are known, and ends the job when one fails."""

    def __init__(self, context: JobContext, programs: Programs) -> None:
        self._context, self._programs = context, programs
        self._placement = placement = place_programs(programs, context.config.max_nodes)
        self._holders = {0, *(each.node for each in placement.instances)}  # nodes that hold ports
        self._has_services = any(each.kind == "service" for each in programs.beside)
        self._attempt = -1
        self._held: dict[int, tuple[HeldAddress, ...]] = {}  # by node
        self._addresses: tuple[HeldAddress, ...] | None = None  # None until all are known
        self._ready: list[str] = []
        self._finished: set[int] = set()  # nodes whose ranks have all succeeded
        self._mains_left: set[str] = set()  # those that have not ended
        self._first_done = ""  # the main that was done first
        self._have_ranks_started = self._is_stopping = False

    def before_start(self, attempt: int) -> HoldPorts:
        self._attempt, self._addresses, self._first_done = attempt, None, ""
        self._have_ranks_started = self._is_stopping = False
        self._context.cancel_deadlines("mains", "stop")
        self._held.clear()
        self._ready.clear()
        self._finished.clear()
        self._mains_left = {each.spec.name for each in self._placement.instances if each.spec.kind == "main"}
        return HoldPorts(attempt, None)

    def on_message(self, node: int, message: FromNode) -> None:
        match message:
            case PortsHeld(attempt=self._attempt, addresses=addresses):
                self._on_ports_held(node, addresses)
            case ProgramIsReady(attempt=self._attempt, name=name):
                self._check_owner(node, [name])
                if name not in self._ready:  # else it has started again alone
                    self._ready.append(name)
                    self._context.send_to_all(ReadyPrograms(self._attempt, (*self._ready,)))
            case RanksFinished():
                self._finished.add(node)
                if self._are_ranks_done:
                    self._on_main_done(self._programs.target.name)
            case ProgramFailed(attempt=self._attempt, code=code, reason=reason, tail=tail) if not self._is_done:
                lines = ["  its last lines:", *(f"  | {line}" for line in tail)] if tail else []
                self._fail(code, reason, "\n".join(lines))
            case MainDone(attempt=self._attempt, name=name):
                self._check_owner(node, [name])
                self._mains_left.discard(name)
                self._on_main_done(name)
                self._context.allow_end()
            case MainEnded(attempt=self._attempt, name=name):
                self._check_owner(node, [name])
                self._mains_left.discard(name)
                if self._is_stopping:
                    self._context.allow_end()

    def _check_owner(self, node: int, names: Iterable[str]) -> None:
        """Raise ProtocolError if a program is not one of this node; node 0 is this process, and needs no check."""
        if node and (wrong := {*names} - {each.spec.name for each in self._placement.on(node)}):
            raise ProtocolError(f"a message about {min(wrong)}, a program of another node")

    def _on_ports_held(self, node: int, addresses: tuple[HeldAddress, ...]) -> None:
        self._check_owner(node, [each.program for each in addresses])
        self._held[node] = addresses
        context = self._context
        if self._addresses is not None:  # this node may have joined later than the others
            context.send(node, StartPrograms(self._attempt, self._addresses, self._context.run_id))
            context.send(node, ReadyPrograms(self._attempt, (*self._ready,)))
        elif self._holders <= self._held.keys():
            self._addresses = tuple(each for held in self._held.values() for each in held)
            context.send_to_all(StartPrograms(self._attempt, self._addresses, self._context.run_id))

    def on_node_lost(self, node: int, text: str) -> None:
        here = [each.spec.kind for each in self._placement.on(node)]
        if here and self._attempt >= 0 and not self._is_done:
            if {*here} != {"sidecar"}:
                self._fail(EXIT_UNAVAILABLE, text)
            elif not self._context.config.may_have_ranks(node):
                self._context.send_to_all(NoteMessage(f"{text}; the job continues"))
        self._mains_left -= {each.spec.name for each in self._placement.on(node)}
        if self._is_stopping:
            self._context.allow_end()

    def _fail(self, code: int, reason: str, details: str = "") -> None:
        self._context.stop_attempt(StopCause(reason, None, code=code, of_program=True, details=details))

    def _on_main_done(self, name: str) -> None:
        """Called when a main is done: limit the time of the other mains, once the ranks have started."""
        if not (self._first_done or self._is_done):
            self._first_done = name
            self._set_mains_deadline()

    def on_attempt_start(self, attempt: int) -> None:
        self._have_ranks_started = True
        self._set_mains_deadline()

    def _set_mains_deadline(self) -> None:
        limit_s = self._context.options[ProgramOptions].mains_timeout
        if limit_s is not None and self._first_done and self._have_ranks_started:
            self._context.set_deadline("mains", limit_s)

    def on_deadline(self, name: str) -> None:
        if name == "stop":
            self._mains_left.clear()
            return self._context.allow_end()
        left = [] if self._are_ranks_done else [self._programs.target.name]
        if left := [*left, *sorted(self._mains_left)]:
            limit = format_elapsed(self._context.options[ProgramOptions].mains_timeout or 0)
            self._fail(EXIT_TIMEOUT, f"{join_names(left)} still ran {limit} after {self._first_done} was done")

    @property
    def _are_ranks_done(self) -> bool:
        with_ranks = {number for number, node in self._context.nodes.items() if node.has_ranks}
        return bool(self._finished) and with_ranks <= self._finished

    @property
    def _is_done(self) -> bool:
        """Whether ranks and mains are done, so that no service is needed any more."""
        return not self._mains_left and self._are_ranks_done

    def holds_end(self) -> bool:
        return bool(self._mains_left)

    def holds_stop(self, signal: int) -> bool:
        """Whether the job goes on although the ranks were stopped: services run until all mains have ended."""
        left = [each for each in self._placement.instances if each.spec.name in self._mains_left]
        services = {each.node for each in self._placement.instances if each.spec.kind == "service"}
        if not any(services - {each.node} for each in left):
            return False
        if not self._is_stopping:
            self._is_stopping = True
            self._context.send_to_all(StopMains(self._attempt, signal))
            longest_s = max(each.spec.grace_s for each in left)
            self._context.set_deadline("stop", longest_s + KILL_TIMEOUT_S + STOP_MARGIN_S)
        return True

    def may_explain(self, failure: RankFailure) -> bool:
        return self._has_services and bool(_LOST_SERVER.search((failure.message or "").partition("\n")[0]))
