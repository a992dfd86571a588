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
from ddplaunch.errors import EXIT_PREEMPTED, shown
from ddplaunch.files import read_owned
from ddplaunch.job import readings
from ddplaunch.job.effective import Account, Spent
from ddplaunch.job.process import born
from ddplaunch.output import events
from ddplaunch.output.events import Event
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

    def after(self, event: Event | events.Begun | events.LeftOut, moment: float) -> RunRecord:
        """The record once ``event`` has happened at ``moment``."""
        match event:
            case events.Begun():
                ranks = tuple(RankRecord(rank, host) for rank, host in event.ranks)
                attempt = Attempt(event.attempt, moment, ranks=ranks)
                node, nodes, size = event.node_rank, event.nnodes, event.world_size
                attempts = (*self.attempts, attempt)
                return replace(self, node_rank=node, nnodes=nodes, world_size=size, attempts=attempts)
            case events.LeftOut(attempts=attempts):
                return replace(self, left_out=attempts)
            case events.Started(rank=rank, pid=pid):
                return self._rank(rank, pid=pid, started=moment)
            case events.Exited(rank=rank, code=code) if self.attempts and event.attempt == self.attempts[-1].number:
                cpu = event.user_cpu + event.system_cpu
                return self._rank(rank, ended=moment, code=code, peak_memory=event.peak_memory, cpu=cpu)
            case events.Signalled(number=number) if self.signal is None:
                return replace(self._because(f"stopped by {signal_name(number)}"), signal=number)
            case events.Preempted():
                return self._because("preempted")
            case events.Swept():
                return self._swept(moment)
            case events.Restarting(text=text, verdict=verdict):
                why = verdict.first.headline if verdict else text.partition("\n")[0]
                return self._last(why=why, verdict=verdict)
            case events.NodeLost(host=host):
                return replace(self, lost=(*self.lost, host))
            case events.Noted(text=text) | events.Stalled(text=text) if text:
                return replace(self, notes=(*self.notes, text))
            case events.RanksInspected(inspection=inspection):
                return replace(self, inspections=(*self.inspections, inspection))
            case events.Ended(code=code, verdict=verdict):
                over = self._last(why=verdict.first.headline, verdict=verdict) if verdict else self
                remark, fate = event.remark, self._fate(code)
                return replace(over, ended=moment, code=code, verdict=verdict, remark=remark, fate=fate)
        return self

    def _fate(self, code: int) -> Fate:
        if code == 0:
            return Fate.DONE
        if code == EXIT_PREEMPTED:
            return Fate.PREEMPTED
        return Fate.STOPPED if self.signal is not None and code == 128 + self.signal else Fate.FAILED

    def _because(self, why: str) -> RunRecord:
        return self if self.attempts and self.attempts[-1].why else self._last(why=why)

    def _swept(self, moment: float) -> RunRecord:
        if not self.attempts:
            return self
        ranks = (
            replace(each, ended=moment) if each.ended is None and each.started is not None else each
            for each in self.attempts[-1].ranks
        )
        return self._last(ended=moment, ranks=tuple(ranks))

    def _last(self, **changes: Any) -> RunRecord:
        if not self.attempts:
            return self
        return replace(self, attempts=(*self.attempts[:-1], replace(self.attempts[-1], **changes)))

    def _rank(self, number: int, **changes: Any) -> RunRecord:
        if not self.attempts:
            return self
        ranks = self.attempts[-1].ranks
        index = number - ranks[0].rank if ranks else -1  # the ranks of a node follow one another
        if not 0 <= index < len(ranks):
            return self
        return self._last(ranks=(*ranks[:index], replace(ranks[index], **changes), *ranks[index + 1 :]))


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
        record: RunRecord = convert({**_decode(first), "run": run}, RunRecord)
    except _WRONG:
        return None
    record = replace(record, attempts=(), inspections=(), fate=Fate.RUNNING)
    kept = Account(record.began, record.nnodes)
    for line in filter(None, lines):
        try:
            found = _decode(line)
            event = convert(found, events.RECORDS[found["event"]])
            moment = convert(found["time"], Moment)
            record = record.after(event, moment)
            kept.take(event, moment)
        except _WRONG:
            continue
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
    return record.host != os.uname().nodename or max(0, born(record.pid)) == record.born


def to_json(record: RunRecord, runs: Sequence[RunRecord], spent: Spent) -> str:
    """A record as ``ddplaunch report --json`` prints it; ``runs`` are all of its job, ``spent`` the time of these."""
    log_dir = shown(record.log_dir, MAX_PATH) if record.log_dir else None
    fields: dict[str, object] = {name: getattr(record, name) for name in RunRecord.__match_args__}
    said = {**fields, "log_dir": log_dir, "spent": spent, "runs": [each.run for each in runs]}
    return msgspec.json.format(msgspec.json.encode(said), indent=2).decode()
