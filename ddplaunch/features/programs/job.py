"""The programs of a job, on node 0: the ranks wait for them, their failure ends the job, and it waits for the mains."""

from __future__ import annotations

import re

from ddplaunch.core.failures import RankFailure
from ddplaunch.core.feature import JobContext, JobSide
from ddplaunch.core.job.job_attempt import StopCause
from ddplaunch.core.messages import FromNode, RanksFinished
from ddplaunch.features.programs.messages import (
    HeldAddress,
    HoldPorts,
    MainsDone,
    PortsHeld,
    ProgramFailed,
    ProgramIsReady,
    ReadyPrograms,
    StartPrograms,
)
from ddplaunch.features.programs.spec import Programs

_LOST_SERVER = re.compile(
    r"(?i)connection|connect(or)?error|disconnected|broken pipe|reset by peer|urlerror|readerror|remoteprotocolerror|"
    r"\b50[0234]\b|internal ?server ?error|bad gateway|(service|temporarily) unavailable|gateway time-?out"
)
"""Exceptions of a client whose server is gone, or ends: of sockets, urllib, requests, httpx, aiohttp, openai, zmq."""


class ProgramsJob(JobSide):
    """All programs are on node 0, whose ports are known before any program starts."""

    def __init__(self, context: JobContext, programs: Programs) -> None:
        self._context, self._programs = context, programs
        self._has_services = any(each.kind == "service" for each in programs.beside)
        self._attempt = -1
        self._addresses: tuple[HeldAddress, ...] | None = None  # None until they are known
        self._ready: list[str] = []
        self._finished: set[int] = set()  # nodes whose ranks have all succeeded
        self._mains_done = False

    def before_start(self, attempt: int) -> HoldPorts:
        self._attempt, self._addresses, self._mains_done = attempt, None, False
        self._ready.clear()
        self._finished.clear()
        return HoldPorts(attempt, None)

    def on_message(self, node: int, message: FromNode) -> None:
        context = self._context
        match message:
            case PortsHeld(attempt=self._attempt, addresses=addresses) if node == 0:
                self._addresses = addresses
                context.send_to_all(StartPrograms(self._attempt, addresses))
            case PortsHeld(attempt=self._attempt) if self._addresses is not None:  # it may have joined later
                context.send(node, StartPrograms(self._attempt, self._addresses))
                context.send(node, ReadyPrograms(self._attempt, (*self._ready,)))
            case ProgramIsReady(attempt=self._attempt, name=name):
                self._ready.append(name)
                context.send_to_all(ReadyPrograms(self._attempt, (*self._ready,)))
            case RanksFinished():
                self._finished.add(node)
            case ProgramFailed(attempt=self._attempt, code=code, reason=reason, tail=tail) if not self._is_done:
                lines = ["  its last lines:", *(f"  | {line}" for line in tail)] if tail else []
                details = "\n".join(lines)
                self._context.stop_attempt(StopCause(reason, None, code=code, of_program=True, details=details))
            case MainsDone(attempt=self._attempt):
                self._mains_done = True
                self._context.allow_end()

    @property
    def _is_done(self) -> bool:
        """Whether ranks and mains are done, so that no service is needed any more."""
        with_ranks = {number for number, node in self._context.nodes.items() if node.has_ranks}
        return self._mains_done and bool(self._finished) and with_ranks <= self._finished

    def holds_end(self) -> bool:
        return not self._mains_done

    def may_explain(self, failure: RankFailure) -> bool:
        return self._has_services and bool(_LOST_SERVER.search((failure.message or "").partition("\n")[0]))
