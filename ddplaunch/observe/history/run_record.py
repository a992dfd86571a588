"""Run records: one frozen record for each node of a run, built from the events that feature ``history`` wrote.

A file of the history consists of lines of JSON: a header, then the events. It may be truncated or forged, so each line
is validated like a message of a node; an invalid line is skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, host_name, sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.safe_files import read_file_and_owner
from ddplaunch.base.text import format_count, signal_name
from ddplaunch.base.types import (
    MAX_PATH,
    Count,
    ExitCode,
    ExitStatus,
    Name,
    NonNegativeFloat,
    Path,
    Pid,
    RunId,
    Signal,
    Size,
    TextLine,
    Timestamp,
    convert,
)
from ddplaunch.core import events
from ddplaunch.core.control_socket.job_status import ProgramStatus, apply_event_to_programs
from ddplaunch.core.events import Event
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.signals import STOP_SIGNALS
from ddplaunch.observe.diagnosis.inspection import Inspection
from ddplaunch.observe.history import sample_file
from ddplaunch.observe.history.time_breakdown import TimeAccounting, TimeBreakdown
from ddplaunch.system.code_version import CodeVersion
from ddplaunch.system.processes.proc_utils import start_ticks

UNREAD_TEXT = "of its record could not be read"
MAX_BYTES = 64 << 20  # of a file of the history
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DECODE_ERRORS = (ProtocolError, KeyError, TypeError, ValueError, RecursionError)  # from a truncated or forged line


class RunState(Enum):
    """Whether a run still runs, or how it ended."""

    RUNNING = "running"
    DONE = "done"  # with exit code 0
    FAILED = "failed"
    STOPPED = "stopped"  # by Ctrl-C, a signal or ``ddplaunch stop``
    PREEMPTED = "preempted"  # by the scheduler
    LOST = "lost"  # its launcher was killed, or the machine went down


class RankRecord(Struct, frozen=True):
    """One rank of one attempt; times in seconds since the epoch, None where unknown."""

    rank: Count
    host: Name
    pid: Pid = 0  # 0 where it never had a process
    started: Timestamp | None = None
    ended: Timestamp | None = None
    code: ExitStatus | None = None  # -N for signal N
    peak_memory: Size = 0  # bytes, the largest of it and its children; 0 where unknown
    cpu: NonNegativeFloat = 0.0  # seconds of CPU time of it and its children


class ImportMismatchRecord(Struct, frozen=True):
    """An import in ranks of this node that did not match what was preloaded."""

    module: TextLine
    differs: TextLine  # the line of the import, and what differed
    outcome: TextLine  # as in ``events.ImportMismatch``
    ranks: Count = 1


class AttemptRecord(Struct, frozen=True):
    """One attempt, as recorded on this node."""

    number: Count  # 0 is the first
    began: Timestamp
    ended: Timestamp | None = None
    ranks: tuple[RankRecord, ...] = ()  # those of this node, in order
    why: TextLine = ""  # why it ended, in one line; "" after success or while it runs
    verdict: FailureReport | None = None  # the failure that ended it, without the ``others`` where a restart followed
    mismatches: tuple[ImportMismatchRecord, ...] = ()


class RunRecord(Struct, frozen=True):
    """One node's record of a run; times in seconds since the epoch."""

    run: TextLine  # its name in the history: the run id, or RUN_ID.2 where an earlier run had that one
    run_id: RunId
    target: TextLine  # the script or program and its arguments, on one line
    argv: tuple[TextLine, ...]  # the whole command, without its token
    host: Name  # the launcher's
    cwd: TextLine  # of the command
    pid: Pid  # the launcher's
    began: Timestamp  # when the launcher did
    born: Size = 0  # when the kernel made the launcher's process, in ticks since its own start
    control_socket: Path | None = None  # the launcher's; other shells may not have the variable that names its folder
    node_rank: Count = 0
    nnodes: Count = 1
    world_size: Count = 0
    log_dir: Path | None = None  # this run's folder of --log-dir
    ended: Timestamp | None = None
    code: ExitCode | None = None  # the exit code
    fate: RunState = RunState.RUNNING
    signal: Signal | None = None  # the first that came to the launcher, or the one that stopped the job
    attempts: tuple[AttemptRecord, ...] = ()
    left_out: Count = 0  # attempts that were not recorded, as there were too many
    verdict: FailureReport | None = None  # the failure that decided it
    remark: TextLine | None = None  # on its end: where ranks were when it was stopped
    inspections: tuple[Inspection, ...] = ()  # what the ranks were doing when they were about to be stopped
    notes: tuple[TextLine, ...] = ()
    lost: tuple[Name, ...] = ()  # the hosts of nodes that were lost; node 0's record alone has them
    job: Name | None = None  # id of the batch job that it ran in: 4711, 4711_3
    spent: TimeBreakdown = TimeBreakdown()  # up to the last event that was written
    stalls: tuple[tuple[Timestamp, Timestamp], ...] = ()  # when its ranks were stalled, likewise
    code_version: CodeVersion | None = None  # that ddplaunch has copied for it
    programs: tuple[ProgramStatus, ...] = ()  # beside its ranks; those that ran at its end have no code
    domain: TextLine | None = None  # of the node: nodes of one domain share fast links

    @property
    def last_seen(self) -> float:
        """When the run ended or, if that is not recorded, the last moment at which it is known to have run."""
        return self.ended or self.began + self.spent.wall_s


class DomainNodes(Struct, frozen=True):
    """The nodes of a run in one domain."""

    domain: str
    node_ranks: tuple[int, ...]


class RecordBuilder:
    """Builds a run record line by line; mutable, as a frozen record would be copied for each line."""

    def __init__(self, head: RunRecord) -> None:
        self._head = head
        self._attempts: list[AttemptRecord] = []
        self._ranks: list[list[RankRecord]] = []  # of each attempt
        self._inspections: list[Inspection] = []
        self._notes, self._lost = [*head.notes], [*head.lost]

    def build(self) -> RunRecord:
        ranks = map(tuple, self._ranks)
        attempts = tuple(replace(each, ranks=own) for each, own in zip(self._attempts, ranks, strict=True))
        inspections, notes, lost = tuple(self._inspections), tuple(self._notes), tuple(self._lost)
        return replace(self._head, attempts=attempts, inspections=inspections, notes=notes, lost=lost)

    def add_event(self, event: Event | events.AttemptStarted | events.AttemptsOmitted, moment: float) -> None:
        """Apply ``event``, which happened at ``moment``."""
        programs = apply_event_to_programs(self._head.programs, event, moment)
        if programs is not self._head.programs:
            self._head = replace(self._head, programs=programs)
        match event:
            case events.AttemptStarted():
                self._attempts.append(AttemptRecord(event.attempt, moment))
                self._ranks.append([RankRecord(rank, host) for rank, host in event.ranks])
                node, nodes, size = event.node_rank, event.nnodes, event.world_size
                self._head = replace(self._head, node_rank=node, nnodes=nodes, world_size=size)
            case events.AttemptsOmitted(attempts=attempts):
                self._head = replace(self._head, left_out=attempts)
            case events.RankStarted(rank=rank, pid=pid):
                self._update_rank(rank, pid=pid, started=moment)
            case events.ImportMismatch() if self._attempts:
                self._add_mismatch(event)
            case events.RankExited() if self._attempts and event.attempt == self._attempts[-1].number:
                cpu = event.user_cpu + event.system_cpu
                self._update_rank(event.rank, ended=moment, code=event.code, peak_memory=event.peak_memory, cpu=cpu)
            case events.SignalReceived(number=number) if self._head.signal is None:
                self._head = replace(self._head, signal=number)
                self._set_end_reason(f"stopped by {signal_name(number)}")
            case events.JobPreempted():
                self._set_end_reason("preempted")
            case events.AttemptSwept() if self._attempts:
                self._update_attempt(ended=moment)
                for index, each in enumerate(self._ranks[-1]):
                    if each.ended is None and each.started is not None:
                        self._ranks[-1][index] = replace(each, ended=moment)
            case events.Restarting(text=text, verdict=verdict):
                why = verdict.first.headline if verdict else text.partition("\n")[0]
                self._update_attempt(why=why, verdict=verdict)
            case events.NodeLost(host=host):
                self._lost.append(host)
            case events.NoteAdded(text=text) | events.JobStalled(text=text) if text:
                self._notes.append(text)
            case events.RanksInspected(inspection=inspection):
                self._inspections.append(convert(inspection, Inspection))
            case events.JobEnded(code=code, verdict=verdict):
                if verdict:
                    self._update_attempt(why=verdict.first.headline, verdict=verdict)
                elif (number := code - EXIT_SIGNAL) in STOP_SIGNALS:  # the signal may have reached another node only
                    self._head = replace(self._head, signal=number)
                    self._set_end_reason(f"stopped by {signal_name(number)}")
                remark, fate = event.remark, self._run_state(code)
                self._head = replace(self._head, ended=moment, code=code, verdict=verdict, remark=remark, fate=fate)

    def _add_mismatch(self, event: events.ImportMismatch) -> None:
        new = ImportMismatchRecord(event.module, event.differs, event.outcome)
        known = self._attempts[-1].mismatches
        same = [each for each in known if replace(each, ranks=1) == new]
        counted = [replace(each, ranks=each.ranks + 1) if each in same else each for each in known]
        self._update_attempt(mismatches=(*counted, *([] if same else [new])))

    def _run_state(self, code: int) -> RunState:
        if code == 0:
            return RunState.DONE
        if code == EXIT_PREEMPTED:
            return RunState.PREEMPTED
        is_stopped = self._head.signal is not None and code == EXIT_SIGNAL + self._head.signal
        return RunState.STOPPED if is_stopped else RunState.FAILED

    def _set_end_reason(self, why: str) -> None:
        if self._attempts and not self._attempts[-1].why:
            self._update_attempt(why=why)

    def _update_attempt(self, **changes: Any) -> None:
        if self._attempts:
            self._attempts[-1] = replace(self._attempts[-1], **changes)

    def _update_rank(self, number: int, **changes: Any) -> None:
        ranks = self._ranks[-1] if self._ranks else []
        index = number - ranks[0].rank if ranks else -1  # the ranks of a node follow one another
        if 0 <= index < len(ranks):
            ranks[index] = replace(ranks[index], **changes)


def read_record(path: str, run: str) -> RunRecord | None:
    """Read the record of the run named ``run`` from a file of the history; None if there is none of this user.

    A run whose launcher is gone without a recorded end is LOST.
    """
    record = None
    for _ in range(2):  # LOST: the launcher may have written its end and exited since the first read, so read again
        try:
            data, owner = read_file_and_owner(path, MAX_BYTES, follow_symlinks=False)
        except OSError:
            return None
        record = parse_record(data, run, os.path.dirname(path)) if owner == os.geteuid() else None
        if record is None or record.fate is not RunState.LOST:
            break
    return record


def parse_record(data: bytes, run: str, folder: str = "") -> RunRecord | None:
    """Parse the lines of a record; None if the first is invalid.

    Where the end of the run was not recorded, the last sample in ``folder`` shows until when it ran.
    """
    first, *lines = data.split(b"\n")
    head = _parse_head(first, run)
    if head is None:
        return None
    builder, accounting = RecordBuilder(replace(head, fate=RunState.RUNNING)), TimeAccounting(head.began, head.nnodes)
    unread = 0
    for line in filter(None, lines):
        try:
            fields = _decode_line(line)
            event = convert(events.fields_of_event(fields), events.find_event_type(fields["event"]))
            moment = convert(fields["time"], Timestamp)
            builder.add_event(event, moment)
            accounting.on_event(event, moment)
        except ProtocolError:
            unread += 1
        except _DECODE_ERRORS:  # of a later version, or the launcher is writing it
            continue
    record = builder.build()
    if unread:
        record = replace(record, notes=(*record.notes, f"{format_count(unread, 'line')} {UNREAD_TEXT}"))
    sample_path = os.path.join(folder, sample_file.sample_file_name(record.node_rank))
    samples = sample_file.read_samples(sample_path) if record.ended is None else []
    last_seen_at = min(samples[-1].time, time.time()) if samples else None
    record = replace(record, spent=accounting.breakdown(last_seen_at), stalls=accounting.stall_periods)
    is_lost = record.fate is RunState.RUNNING and not is_launcher_alive(record)
    return replace(record, fate=RunState.LOST) if is_lost else record


def is_skipped_lines_note(note: str) -> bool:
    """Whether ``note`` of a run record says that lines of the record were left out."""
    return note.endswith(UNREAD_TEXT)


def read_record_head(path: str, run: str) -> RunRecord | None:
    """Read only the first line of a record, which describes the start of the run; None if there is none."""
    with suppress(OSError), os.fdopen(os.open(path, _READ_FLAGS), "rb") as file:
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            return _parse_head(file.readline(MAX_BYTES), run)
    return None


def _parse_head(line: bytes, run: str) -> RunRecord | None:
    """Parse the first line of a record; None if it is invalid."""
    try:
        head: RunRecord = convert({**_decode_line(line), "run": run}, RunRecord)
    except _DECODE_ERRORS:
        return None
    return head


def _decode_line(line: bytes) -> Any:
    """Decode a line of JSON, in which bytes of arguments and paths that are not UTF-8 are Python's lone surrogates."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


def is_launcher_alive(record: RunRecord) -> bool:
    """Whether the launcher of a run without recorded end is still alive; True if the launcher is on another machine."""
    return record.host != host_name() or max(0, start_ticks(record.pid)) == record.born


def group_by_domain(shares: Sequence[RunRecord]) -> list[DomainNodes]:
    """Return the nodes of each domain, the lowest node rank first; ``shares``: the records of a run's nodes."""
    domains: dict[str, list[int]] = {}
    for share in sorted(shares, key=lambda share: share.node_rank):
        if share.domain:
            domains.setdefault(share.domain, []).append(share.node_rank)
    return [DomainNodes(name, tuple(dict.fromkeys(members))) for name, members in domains.items()]


def record_to_json(
    shares: Sequence[RunRecord], runs: Sequence[RunRecord], spent: TimeBreakdown, provenance: Struct | None = None
) -> str:
    """Format a run for ``ddplaunch report --json``.

    ``shares``: the records of its nodes, node 0's first; ``runs``: all runs of its batch job; ``spent``: the time
    breakdown of these. ``provenance``: what the run was.
    """
    record = shares[0]
    log_dir = sanitize_line(record.log_dir, MAX_PATH) if record.log_dir else None
    fields: dict[str, object] = {name: getattr(record, name) for name in RunRecord.__struct_fields__}
    fields["attempts"] = [_rename_for_json(msgspec.to_builtins(attempt)) for attempt in record.attempts]
    fields["runs"], fields["domains"] = [each.run for each in runs], group_by_domain(shares)
    content = {**fields, "log_dir": log_dir, "spent": spent, "provenance": provenance}
    return msgspec.json.format(msgspec.json.encode(_rename_for_json(content)), indent=2).decode()


_JSON_NAMES = {"fate": "state", "verdict": "failure", "born": "start_ticks", "spent": "time_by_phase"}
"""Fields of a record, and their names in ``report --json``."""


def _rename_for_json(fields: Mapping[str, object]) -> dict[str, object]:
    return {_JSON_NAMES.get(name, name): value for name, value in fields.items()}
