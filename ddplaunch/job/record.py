"""What is kept of a run: one frozen record, folded from the events that ``history`` wrote; nothing else writes it.

A file of the history is made of lines of JSON: what was started, then what happened. It may be torn or hostile, so each
line is checked as a node's message is; a line that makes no sense is passed over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

from ddplaunch.control.failure import Verdict
from ddplaunch.dataclass import dataclass, replace
from ddplaunch.diagnosis.inspection import Inspection
from ddplaunch.errors import EXIT_PREEMPTED, host_name, shown
from ddplaunch.files import read_owned
from ddplaunch.job import readings
from ddplaunch.job.effective import Account, Spent
from ddplaunch.output import events
from ddplaunch.output.events import Event
from ddplaunch.rank.processes import start_ticks
from ddplaunch.wire.bounds import (
    MAX_PATH,
    Amount,
    Count,
    EndCode,
    ExitCode,
    Line,
    Moment,
    Name,
    Path,
    Pid,
    RunId,
    Signal,
    Size,
)
from ddplaunch.wire.frames import Garbled
from ddplaunch.wire.typed import convert
from ddplaunch.words import signal_name

MAX_BYTES = 64 << 20  # of a file of the history
_WRONG = (Garbled, KeyError, TypeError, ValueError, RecursionError)  # what a torn or hostile line leads to


class Fate(Enum):
    """How a run stands, or how it ended."""

    RUNNING = "running"
    DONE = "done"  # with exit code 0
    FAILED = "failed"
    STOPPED = "stopped"  # by Ctrl-C, a signal or ``ddplaunch stop``
    PREEMPTED = "preempted"  # it made room for another job
    LOST = "lost"  # its launcher was killed, or the machine went down


@dataclass(frozen=True)
class RankRecord:
    """One rank of one attempt; times in seconds since the epoch, None where they are not known."""

    rank: Count
    host: Name
    pid: Pid = 0  # 0 where it never had a process
    started: Moment | None = None
    ended: Moment | None = None
    code: EndCode | None = None  # -N for signal N
    peak_memory: Size = 0  # bytes that the largest of it and its children had at most; 0 where it is not known
    cpu: Amount = 0.0  # seconds of CPU time of it and its children


@dataclass(frozen=True)
class Attempt:
    """One attempt, as this node saw it."""

    number: Count  # 0 is the first
    began: Moment
    ended: Moment | None = None
    ranks: tuple[RankRecord, ...] = ()  # those of this node, in order
    why: Line = ""  # why it ended, in one line; "" where all went well or it runs
    verdict: Verdict | None = None  # the failure that ended it, without the ``others`` where a restart followed


@dataclass(frozen=True)
class RunRecord:
    """This node's share of a run; times in seconds since the epoch."""

    run: Line  # its name in the history: the run id, or RUN_ID.2 where an earlier run had that one
    run_id: RunId
    target: Line  # what was typed, on one line
    argv: tuple[Line, ...]  # the whole command, without its token
    host: Name  # the launcher's
    cwd: Line  # where the command was typed
    pid: Pid  # the launcher's
    began: Moment  # when the launcher did
    born: Size = 0  # when the kernel made the launcher's process, in ticks since its own start
    node_rank: Count = 0
    nnodes: Count = 1
    world_size: Count = 0
    log_dir: Path | None = None  # this run's folder of --log-dir
    ended: Moment | None = None
    code: ExitCode | None = None  # the exit code
    fate: Fate = Fate.RUNNING
    signal: Signal | None = None  # the first that came to the launcher
    attempts: tuple[Attempt, ...] = ()
    left_out: Count = 0  # attempts that were not kept, as there were too many
    verdict: Verdict | None = None  # the failure that decided it
    remark: Line | None = None  # the last word on its end: "when it was stopped: …"
    inspections: tuple[Inspection, ...] = ()  # what the ranks were doing when they were about to be stopped
    notes: tuple[Line, ...] = ()
    lost: tuple[Name, ...] = ()  # the hosts of nodes that were lost; node 0's record alone has them
    job: Name | None = None  # the scheduler's number of the job that it ran in: 4711, 4711_3
    spent: Spent = Spent()  # where its time went, as far as it is written
    stalls: tuple[tuple[Moment, Moment], ...] = ()  # when its ranks got nowhere, likewise


class _Folding:
    """A record while its lines are read: it grows, where a frozen one would be copied for each of them."""

    def __init__(self, head: RunRecord) -> None:
        self._head = head
        self._attempts: list[Attempt] = []
        self._ranks: list[list[RankRecord]] = []  # of each attempt
        self._inspections: list[Inspection] = []
        self._notes, self._lost = [*head.notes], [*head.lost]

    def record(self) -> RunRecord:
        attempts = tuple(
            replace(each, ranks=tuple(ranks)) for each, ranks in zip(self._attempts, self._ranks, strict=True)
        )
        return replace(
            self._head,
            attempts=attempts,
            inspections=tuple(self._inspections),
            notes=tuple(self._notes),
            lost=tuple(self._lost),
        )

    def take(self, event: Event | events.Begun | events.LeftOut, moment: float) -> None:
        """``event`` has happened at ``moment``."""
        match event:
            case events.Begun():
                self._attempts.append(Attempt(event.attempt, moment))
                self._ranks.append([RankRecord(rank, host) for rank, host in event.ranks])
                node, nodes, size = event.node_rank, event.nnodes, event.world_size
                self._head = replace(self._head, node_rank=node, nnodes=nodes, world_size=size)
            case events.LeftOut(attempts=attempts):
                self._head = replace(self._head, left_out=attempts)
            case events.Started(rank=rank, pid=pid):
                self._rank(rank, pid=pid, started=moment)
            case events.Exited(rank=rank, code=code) if self._attempts and event.attempt == self._attempts[-1].number:
                cpu = event.user_cpu + event.system_cpu
                self._rank(rank, ended=moment, code=code, peak_memory=event.peak_memory, cpu=cpu)
            case events.Signalled(number=number) if self._head.signal is None:
                self._head = replace(self._head, signal=number)
                self._because(f"stopped by {signal_name(number)}")
            case events.Preempted():
                self._because("preempted")
            case events.Swept() if self._attempts:
                self._last(ended=moment)
                self._ranks[-1] = [
                    replace(each, ended=moment) if each.ended is None and each.started is not None else each
                    for each in self._ranks[-1]
                ]
            case events.Restarting(text=text, verdict=verdict):
                self._last(why=verdict.first.headline if verdict else text.partition("\n")[0], verdict=verdict)
            case events.NodeLost(host=host):
                self._lost.append(host)
            case events.Noted(text=text) | events.Stalled(text=text) if text:
                self._notes.append(text)
            case events.RanksInspected(inspection=inspection):
                self._inspections.append(inspection)
            case events.Ended(code=code, verdict=verdict):
                if verdict:
                    self._last(why=verdict.first.headline, verdict=verdict)
                remark, fate = event.remark, self._fate(code)
                self._head = replace(self._head, ended=moment, code=code, verdict=verdict, remark=remark, fate=fate)

    def _fate(self, code: int) -> Fate:
        if code == 0:
            return Fate.DONE
        if code == EXIT_PREEMPTED:
            return Fate.PREEMPTED
        return Fate.STOPPED if self._head.signal is not None and code == 128 + self._head.signal else Fate.FAILED

    def _because(self, why: str) -> None:
        if self._attempts and not self._attempts[-1].why:
            self._last(why=why)

    def _last(self, **changes: Any) -> None:
        if self._attempts:
            self._attempts[-1] = replace(self._attempts[-1], **changes)

    def _rank(self, number: int, **changes: Any) -> None:
        ranks = self._ranks[-1] if self._ranks else []
        index = number - ranks[0].rank if ranks else -1  # the ranks of a node follow one another
        if 0 <= index < len(ranks):
            ranks[index] = replace(ranks[index], **changes)


def read(path: str, run: str) -> RunRecord | None:
    """Return the record in a file of the history, of the run named ``run``; None where there is none of this user.

    A run whose launcher is gone without a word is LOST.
    """
    record = None
    for _ in range(2):  # where the launcher was gone by the time that we looked, it may have said its last word before
        try:
            data, owner = read_owned(path, MAX_BYTES, links=False)
        except OSError:
            return None
        record = parse(data, run, os.path.dirname(path)) if owner == os.geteuid() else None
        if record is None or record.fate is not Fate.LOST:
            break
    return record


def parse(data: bytes, run: str, folder: str = "") -> RunRecord | None:
    """Return the record that the lines ``data`` make; None where not even the first is whole.

    The readings in ``folder`` tell until when a run went on that has not ended as far as it is written.
    """
    first, *lines = data.split(b"\n")
    try:
        head: RunRecord = convert({**_decode(first), "run": run}, RunRecord)
    except _WRONG:
        return None
    folding, kept = _Folding(replace(head, fate=Fate.RUNNING)), Account(head.began, head.nnodes)
    for line in filter(None, lines):
        try:
            found = _decode(line)
            event = convert(found, events.RECORDS[found["event"]])
            moment = convert(found["time"], Moment)
            folding.take(event, moment)
            kept.take(event, moment)
        except _WRONG:
            continue
    record = folding.record()
    seen = None
    if record.ended is None and (found := readings.read(os.path.join(folder, readings.file_of(record.node_rank)))):
        seen = min(found[-1].time, time.time())
    record = replace(record, spent=kept.spent(seen), stalls=kept.stalls)
    return replace(record, fate=Fate.LOST) if record.fate is Fate.RUNNING and not lives(record) else record


def _decode(line: bytes) -> Any:
    """A line as plain data; bytes of arguments and paths that are not UTF-8 stand in it as Python has them."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


def lives(record: RunRecord) -> bool:
    """Whether the launcher of a run that has not ended is still there; True where it is on another machine."""
    return record.host != host_name() or max(0, start_ticks(record.pid)) == record.born


def to_json(record: RunRecord, runs: Sequence[RunRecord], spent: Spent) -> str:
    """A record as ``ddplaunch report --json`` prints it; ``runs`` are all of its job, ``spent`` the time of these."""
    log_dir = shown(record.log_dir, MAX_PATH) if record.log_dir else None
    fields: dict[str, object] = {name: getattr(record, name) for name in RunRecord.__match_args__}
    said = {**fields, "log_dir": log_dir, "spent": spent, "runs": [each.run for each in runs]}
    return msgspec.json.format(msgspec.json.encode(said), indent=2).decode()
