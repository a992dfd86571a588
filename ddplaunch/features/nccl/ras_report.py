"""Parses the replies of NCCL's RAS service, JSON or text, and compares it with our own inspection of the ranks.

The formats are those of src/ras/client_support.cc in NCCL 2.24 to 2.32, and of its user guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from ddplaunch.base.errors import sanitize_text
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.text import format_count, format_ranks
from ddplaunch.base.types import MAX_COUNT, Count, Pid, Size, TextLine, parse
from ddplaunch.observe.diagnosis.inspection import Inspection
from ddplaunch.observe.diagnosis.waits import find_waits

SERVICE = "NCCL's RAS service"
_FIRST_LINE = re.compile(rb"SERVER PROTOCOL \d+\r?\n", re.IGNORECASE)
_ACKNOWLEDGEMENT = re.compile(rb"(?:OK|ERROR: [^\n]*)\r?\n", re.IGNORECASE)
_PLACE = r"managed by process (?P<pid>\d{1,10}) on node (?P<host>\S+)"
_PROCESS = re.compile(r"Process (?P<pid>\d{1,10}) on node (?P<host>\S+) managing GPU")
_ANY_PROCESS = re.compile(r"process (\d{1,10}) on node", re.IGNORECASE)
_MEMBER = re.compile(
    rf"Rank (?P<rank>\d{{1,8}})(?: has [^-]*)? -- (?:GPU .*{_PLACE}|\[process information not found\])"
)
_MISSING = re.compile(r"The missing ranks?: (?P<ranks>[\d, ]+)")
_COMMUNICATOR = re.compile(r"#(?P<group>\d{1,6})-\d+ \([0-9a-f]+\) (?P<kind>[A-Z]+)")
_OPERATIONS = re.compile(r"Communicator ranks have different (?P<operation>\w+) operation counts")
_LAUNCHED = re.compile(
    r"(?:(?:Rank \d+ has|\d+ ranks have) launched up to operation (?P<count>\d{1,18})|ha(?:ve|s) not launched)"
)
_GROUP = re.compile(r" *(?P<group>\d{1,6}) +\d+ +\d+ +[\d-]+ +(?P<size>\d{1,8}) +\d+ +[A-Z]+ +[A-Z,]+$")
_SUMMARY = re.compile(r" *\d+ +[\d-]+ +\d+ +(?P<processes>\d{1,8}) +\d+$")


class RasMember(Struct, frozen=True):
    """A rank of a communicator, or a process; ``rank`` is its number in a communicator of ``size`` ranks.

    ``launched``: how many collectives it has launched; ``others``: the largest number that another rank has launched.
    """

    pid: Pid = 0
    host: TextLine = ""
    rank: Count | None = None
    size: Count = 0
    operation: TextLine = ""
    launched: Size = 0
    others: Size = 0


class RasReport(Struct, frozen=True):
    """A reply of the RAS service: the ranks that did not reply to it, and those that launched fewer collectives."""

    text: str
    is_json: bool
    missing: tuple[RasMember, ...] = ()
    behind: tuple[RasMember, ...] = ()
    pids: frozenset[int] = frozenset()  # of all processes that the reply names
    processes: int = 0  # the number of processes of the job; 0 if unknown


class _Status(Struct, frozen=True):
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(Struct, frozen=True):
    rank: Count
    host: TextLine = ""
    pid: Pid = 0
    status: _Status = _Status()
    collective_counts: dict[str, Size] = {}


class _Communicator(Struct, frozen=True):
    size: Count = 0
    ranks: tuple[_Rank, ...] = ()
    missing_ranks: tuple[_Rank, ...] = ()


class _JsonReply(Struct, frozen=True):
    communicators: tuple[_Communicator, ...] = ()


def parse_reply(reply: bytes) -> RasReport:
    """Parse the whole reply of the service. Raises ValueError if it is not from NCCL's RAS service."""
    first = _FIRST_LINE.match(reply)
    if first is None:
        raise ValueError("not a reply of NCCL's RAS service")
    body = reply[first.end() :]
    while acknowledgement := _ACKNOWLEDGEMENT.match(body):
        body = body[acknowledgement.end() :]
    if body.lstrip().startswith(b"{"):
        try:
            found = parse(body, _JsonReply)
        except ProtocolError as error:
            raise ValueError(f"{SERVICE}: {error}") from None
        return _report_from_json(found, body.decode(errors="replace"))
    return _report_from_text(sanitize_text(body.decode(errors="replace")))


def _report_from_json(found: _JsonReply, text: str) -> RasReport:
    missing, behind, pids = [], [], set[int]()
    for communicator in found.communicators:
        pids.update(rank.pid for rank in (*communicator.ranks, *communicator.missing_ranks))
        missing += [
            RasMember(rank.pid, rank.host, rank.rank, communicator.size)
            for rank in communicator.missing_ranks
            if rank.status.unresponsive or rank.status.considered_dead
        ]
        for operation in {name for rank in communicator.ranks for name in rank.collective_counts}:
            most = max(rank.collective_counts.get(operation, 0) for rank in communicator.ranks)
            for rank in communicator.ranks:
                if (launched := rank.collective_counts.get(operation, 0)) < most:
                    behind.append(
                        RasMember(rank.pid, rank.host, rank.rank, communicator.size, operation, launched, most)
                    )
    return RasReport(text, True, tuple(missing), tuple(behind), frozenset(pids))


def _report_from_text(text: str) -> RasReport:
    sizes: dict[str, int] = {}
    missing: list[RasMember] = []
    counted: list[list[RasMember]] = []  # for each communicator and operation
    pids, processes = set[int](), 0
    kind, size, operation, launched = "", 0, "", 0
    for line in text.splitlines():
        pids.update(int(pid) for pid in _ANY_PROCESS.findall(line))
        if match := _GROUP.fullmatch(line):
            sizes[match["group"]] = min(int(match["size"]), MAX_COUNT)
        elif match := _SUMMARY.fullmatch(line):
            processes = int(match["processes"])
        elif line.strip() in ("INCOMPLETE", "DEAD"):
            kind, size = "PROCESSES", 0
        elif match := _COMMUNICATOR.fullmatch(line.strip()):
            kind, size, operation = match["kind"], sizes.get(match["group"], 0), ""
        elif kind == "PROCESSES" and (match := _PROCESS.search(line)):
            missing.append(RasMember(int(match["pid"]), match["host"]))
        elif kind == "INCOMPLETE" and (match := _MEMBER.search(line)):
            missing.append(_member(match, size))
        elif kind == "INCOMPLETE" and (match := _MISSING.search(line)):
            missing += [RasMember(rank=int(rank), size=size) for rank in re.findall(r"\d{1,8}", match["ranks"])]
        elif kind == "MISMATCH" and "operation counts" in line:
            found = _OPERATIONS.search(line)
            operation = found["operation"] if found and found["operation"] != "collective" else "collectives"
            counted.append([])
        elif kind == "MISMATCH" and operation:
            if match := _LAUNCHED.search(line):
                launched = int(match["count"] or 0)
                counted[-1].append(RasMember(size=size, operation=operation, launched=launched))  # of an unknown rank
            if match := _MEMBER.search(line):
                member = _member(match, size)
                counted[-1].append(RasMember(member.pid, member.host, member.rank, size, operation, launched=launched))
    return RasReport(text, False, tuple(missing), tuple(_find_behind(counted)), frozenset(pids), processes)


def _member(found: re.Match[str], size: int) -> RasMember:
    return RasMember(int(found["pid"] or 0), found["host"] or "", int(found["rank"]), size)


def _find_behind(counted: Iterable[list[RasMember]]) -> Iterator[RasMember]:
    for members in counted:
        most = max((each.launched for each in members), default=0)
        for each in members:
            if each.rank is not None and each.launched < most:
                yield RasMember(each.pid, each.host, each.rank, each.size, each.operation, each.launched, most)


def is_of_job(report: RasReport, pids: Iterable[int], world_size: int) -> bool:
    """Whether a report is about the processes ``pids``; for a text report, an equal number of processes is enough."""
    return not report.pids.isdisjoint(pids) or (not report.is_json and report.processes == world_size)


# ------------------------------------------------------------------------------------------------------- our ranks


def compare(report: RasReport, inspection: Inspection) -> str:
    """Return a sentence: which ranks the others wait for, by NCCL's report, and whether the inspection agrees."""
    name = _make_rank_finder(inspection)
    ours = {rank for wait in find_waits(inspection) for rank in wait.root_causes}
    if report.missing:
        ranks = {rank for each in report.missing if (rank := name(each)) is not None}
        what = f"no reply from {format_ranks(sorted(ranks))}" if ranks else _describe_silent_processes(report.missing)
    elif report.behind:
        ranks = {rank for each in report.behind if (rank := name(each)) is not None}
        first = report.behind[0]
        who = format_ranks(sorted(ranks)) if ranks else format_count(len(report.behind), "rank")
        has = "has" if len(ranks) == 1 else "have"
        what = f"{who} {has} launched {first.launched} {first.operation}, others {first.others}"
    else:
        return f"{SERVICE}: all ranks reply, and have launched equally many collectives"
    if not ours or not ranks:
        return f"{SERVICE}: {what}"
    if ranks == ours:
        return f"{SERVICE} agrees: {what}"
    return f"{SERVICE} differs from that: {what}; the others wait for {format_ranks(sorted(ours))}"


def _make_rank_finder(inspection: Inspection) -> Callable[[RasMember], int | None]:
    """Return a function that finds a member's rank: by its pid if no two ranks share it, else by NCCL's own number."""
    by_pid: dict[int, list[int]] = {}
    for each in inspection.ranks:
        by_pid.setdefault(each.pid, []).append(each.rank)

    def find_rank(member: RasMember) -> int | None:
        if member.pid and len(found := by_pid.get(member.pid, [])) == 1:
            return found[0]
        return member.rank if member.size == inspection.world_size else None

    return find_rank


def _describe_silent_processes(members: Iterable[RasMember]) -> str:
    named = sorted({f"process {each.pid} on {each.host}" for each in members if each.pid})
    return f"no reply from {', '.join(named[:3]) or 'some ranks'}"
