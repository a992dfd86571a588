"""The live view as rows: a line of truth, the ranks that stand out by name, a cell for each rank. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.devices.gpu_usage import GpuUsage
from ddplaunch.devices.usage import Used
from ddplaunch.diagnosis.inspection import Condition, Inspection, RankInspection
from ddplaunch.diagnosis.standing import UNRECORDED
from ddplaunch.errors import shown
from ddplaunch.job.status import RankState, RankStatus, State, Status
from ddplaunch.output.rows import Row, Span, cut, flow, wrap

FOOTER = 6  # rows at most below the log
_BLOCK = 8  # cells between two gaps
_NAMED = 8  # runs of ranks that are named, of those that do the same
_GIB = 1 << 30
_STOPPED_BY_US = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL}


class Doing(Enum):
    """What a rank does; the first ones matter most."""

    FAILED = "failed"
    STOPPED = "stopped"
    SILENT = "silent"
    BLOCKED = "blocked"
    PENDING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


class Look(NamedTuple):
    mark: str
    style: str
    meaning: str


LOOKS = {
    Doing.FAILED: Look("X", "1;31", "it has failed"),
    Doing.STOPPED: Look("T", "1;35", "stopped by SIGSTOP, Ctrl-Z or a debugger"),
    Doing.SILENT: Look("?", "1;33", "it does not answer: it holds Python's lock (GIL)"),
    Doing.BLOCKED: Look("D", "1;33", "it waits for a disk or a driver, in the kernel"),
    Doing.PENDING: Look("-", "2", "it has no process yet"),
    Doing.RUNNING: Look(".", "32", "it runs, and waits for no other rank"),
    Doing.WAITING: Look("w", "33", "it waits for other ranks, in a collective, a send or the like"),
    Doing.ENDED: Look("e", "2", "it has ended"),
}
_ODD = frozenset({Doing.FAILED, Doing.STOPPED, Doing.SILENT, Doing.BLOCKED})  # however many they are


class Place(NamedTuple):
    """Where a rank waits."""

    group: str
    number: int
    function: str = ""  # of torch.distributed, where it is one that has neither


@dataclass(frozen=True)
class Glance:
    """All that a frame is drawn from."""

    status: Status
    inspection: Inspection
    before: Inspection | None = None  # an earlier one, for what happens in a second
    used: Mapping[int, Used] = field(default_factory=dict)  # by rank: those on this machine
    used_before: Mapping[int, Used] = field(default_factory=dict)
    gpus: tuple[GpuUsage, ...] | None = ()  # those that the job uses; None where the driver does not answer
    sentences: tuple[str, ...] = ()  # who waits for whom, or who is slow
    chosen: str = ""  # the filter: "0,3-5", or a word of a rank's line
    hint: str = ""  # what to type


def doing(rank: RankInspection, status: RankStatus | None = None, state: State = State.RUNNING) -> Doing:
    """What a rank does, by all that is known of it."""
    code = status.code if rank.code is None and status else rank.code
    if state is State.JOINING or (status and status.state is RankState.PENDING):
        return Doing.PENDING
    if status and status.state is RankState.UNABLE:
        return Doing.FAILED
    if state is State.ENDED or rank.condition is Condition.EXITED or (status and status.state is RankState.EXITED):
        ours = state not in (State.STARTING, State.RUNNING) and code in _STOPPED_BY_US
        return Doing.FAILED if code and not ours else Doing.ENDED
    if status and status.state is RankState.FINISHED:
        return Doing.ENDED
    match rank.condition:
        case Condition.PENDING:
            return Doing.PENDING
        case Condition.STOPPED:
            return Doing.STOPPED
        case Condition.BLOCKED:
            return Doing.BLOCKED
    if rank.answers is False:
        return Doing.SILENT
    return Doing.WAITING if place(rank) else Doing.RUNNING


def place(rank: RankInspection) -> Place | None:
    """The oldest collective that a rank has entered and not left, or its send or the like, where it has not moved."""
    if rank.moved or rank.condition is not Condition.ALIVE:
        return None
    if rank.inside and (rank.inside.function in UNRECORDED or not rank.groups):
        return Place("", 0, rank.inside.function)
    open_ones = [each for each in rank.groups if each.enqueued > each.completed]
    if not open_ones:
        return None
    found = max(open_ones, key=lambda each: each.completed)
    return Place(found.group, found.completed + 1)


def steady(now: Inspection, before: Inspection | None) -> Inspection:
    """Say who has moved since the look before, where ranks were asked only once."""
    if any(rank.moved or rank.threads for rank in now.ranks):
        return now
    earlier = {(rank.rank, rank.pid): rank.groups for rank in before.ranks} if before else {}
    ranks = (replace(rank, moved=rank.groups != earlier.get((rank.rank, rank.pid))) for rank in now.ranks)
    return replace(now, ranks=tuple(ranks))


def waiting(inspection: Inspection) -> frozenset[tuple[int, Place]]:
    """Each rank that waits for others, and where."""
    return frozenset((rank.rank, where) for rank in inspection.ranks if (where := place(rank)))


def all_doing(glance: Glance) -> dict[int, Doing]:
    """What each rank does, by its number; of the ranks that the filter has chosen."""
    known = {rank.rank: rank for rank in glance.status.ranks}
    found = {each.rank: doing(each, known.get(each.rank), glance.status.state) for each in glance.inspection.ranks}
    if not glance.chosen:
        return found
    about = {rank.rank: f"{found[rank.rank].value} {rank.host}" for rank in glance.inspection.ranks}
    return {rank: what for rank, what in found.items() if _chosen(glance.chosen, rank, about[rank])}


def _chosen(filter: str, rank: int, about: str) -> bool:
    for part in filter.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            if int(first) <= rank <= int(last if dash else first):
                return True
        elif part and part.lower() in about.lower():
            return True
    return False


def rate(now: Inspection, before: Inspection | None) -> float | None:
    """Collectives a second since the look before, of the rank that completed most; None where none is known."""
    if before is None or now.moment <= before.moment:
        return None
    earlier = {(rank.rank, rank.pid, each.group): each.completed for rank in before.ranks for each in rank.groups}
    most: int | None = None
    for rank in now.ranks:
        keys = [(each.completed, earlier.get((rank.rank, rank.pid, each.group))) for each in rank.groups]
        if known := [completed - was for completed, was in keys if was is not None]:
            most = max(sum(known), most or 0)
    return None if most is None else most / (now.moment - before.moment)


def work(glance: Glance) -> dict[int, float]:
    """How many CPUs each rank kept busy since the look before; of none where that is not known."""
    now, before = glance.inspection, glance.before
    if before is None or now.moment <= before.moment:
        return {}
    earlier = {(rank.rank, rank.pid): rank.cpu for rank in before.ranks}
    seconds = now.moment - before.moment
    found: dict[int, float] = {}
    for rank in now.ranks:
        used, was = glance.used.get(rank.rank), glance.used_before.get(rank.rank)
        if used and was:
            found[rank.rank] = max(0.0, used.cpu - was.cpu) / seconds
        elif (rank.rank, rank.pid) in earlier:
            found[rank.rank] = max(0.0, rank.cpu - earlier[rank.rank, rank.pid]) / seconds
    return found


# ---------------------------------------------------------------------------------------------------------- the frame


def frame(glance: Glance, columns: int, rows: int) -> list[Row]:
    """The footer: at most ``FOOTER`` rows, and fewer than ``rows``; each shorter than ``columns``."""
    limit, most = max(1, columns - 1), max(1, min(FOOTER, rows - 1))
    ranks = all_doing(glance)
    head = flow(truth(glance, ranks), limit)[: 2 if most > 3 else 1]
    legend = flow(_legend(ranks), limit, "   ")[: 2 if most > 3 else 1]
    said = _said(glance, limit, 1 if most < 5 else 2)[: max(0, most - len(head) - len(legend) - 1)]
    left = max(0, most - len(head) - len(said) - len(legend))
    hint: list[Row] = [(Span("? help", "2"),)] if glance.hint else []
    legend = flow([*legend, *_scale(ranks, limit, left), *hint], limit, "   ")[: len(legend)]
    return [*head, *said, *legend, *cells(ranks, limit, left)][:most]


def screenful(glance: Glance, columns: int, rows: int) -> list[Row]:
    """The whole screen: all of it, and a line for each rank, those that stand out first."""
    limit = max(1, columns - 1)
    ranks = all_doing(glance)
    title = f"{shown(glance.status.run_id, 60)}: {shown(glance.status.target)}"
    top = [cut((Span(title, "1"),), limit), *flow(truth(glance, ranks), limit), *_said(glance, limit, 4)]
    third = max(1, rows // 3)
    legend = [*_legend(ranks), *_scale(ranks, limit, third)]
    top += [(), *flow(legend, limit, "   "), *cells(ranks, limit, third), ()]
    hint = [cut((Span(glance.hint, "2"),), limit)] if glance.hint and rows > 2 else []
    table = _table(glance, ranks, limit)
    body = [*top, *table][: rows - len(hint)]
    return [*body, *[()] * (rows - len(body) - len(hint)), *hint]


def truth(glance: Glance, ranks: Mapping[int, Doing]) -> list[Row]:
    """The parts of the line that says how the job stands."""
    status, inspection = glance.status, glance.inspection
    age = _age(max(inspection.moment, status.since) - status.began)
    ended = f", exit code {status.code}" if status.code is not None else ""
    style = {State.RUNNING: "1;32", State.ENDED: "1;31" if status.code else "1"}.get(status.state, "1;33")
    parts: list[Row] = [(Span(f"{status.state.value}{ended}", style), Span(f" {age}"))]
    if status.attempt > 0:
        parts.append((Span(f"attempt {status.attempt + 1}"),))
    if (speed := rate(inspection, glance.before)) is not None:
        parts.append(
            (Span(f"{speed:,.0f} collectives/s" if speed >= 10 or not speed else f"{speed:.1f} collectives/s"),)
        )
    if where := _where(inspection, ranks, briefly=bool(glance.sentences)):
        parts.append((Span(where, "33"),))
    if inspection.silent:
        parts.append((Span(f"no answer from {', '.join(inspection.silent[:3])}", "1;31"),))
    if inspection.node_only:
        parts.append((Span("this node only"),))
    if busy := work(glance):
        parts.append((Span(f"CPU {sum(busy.values()) * 100:.0f} %"),))
    if glance.used:
        here = " here" if len(glance.used) < len(inspection.ranks) else ""
        parts.append((Span(size(sum(used.memory for used in glance.used.values())) + here),))
    if gpu := _gpu(glance.gpus):
        parts.append((Span(gpu),))
    if glance.chosen:
        parts.append((Span(f"filter: {shown(glance.chosen, 30)}", "1;36"),))
    return parts


def _where(inspection: Inspection, ranks: Mapping[int, Doing], *, briefly: bool) -> str:
    """How many ranks wait, and where most of them do."""
    waiting = {each.rank: place(each) for each in inspection.ranks if ranks.get(each.rank) is Doing.WAITING}
    found = Counter(where for where in waiting.values() if where)
    if not found:
        return ""
    if briefly:
        return f"{found.total()} of {inspection.world_size} ranks wait"
    (where, count), *others = found.most_common()
    named = _named(inspection, where)
    more = f", {sum(count for _, count in others)} elsewhere" if others else ""
    return f"{count} of {inspection.world_size} ranks wait in {named}{more}"


def _named(inspection: Inspection, where: Place) -> str:
    if where.function:
        return shown(where.function, 40)
    return f"{_operation(inspection, where)} of {_group(inspection, where.group)}"


def _operation(inspection: Inspection, where: Place) -> str:
    for rank in inspection.ranks:
        for each in rank.last:
            if Place(each.group, each.number) == where and not each.completed:
                return f"{shown(each.operation, 40)} #{where.number}"
    return f"#{where.number}"


def _group(inspection: Inspection, name: str) -> str:
    known = (each for rank in inspection.ranks for each in rank.known if each.group == name)
    found = next(known, None)
    if found and found.description:
        return shown(found.description, 40)
    return "default_pg" if name == "0" else f"group {shown(name, 40)}"


def _said(glance: Glance, limit: int, most: int) -> list[Row]:
    rows = [row for sentence in glance.sentences for row in wrap(shown(sentence, 1000), limit, most)]
    return rows[:most]


def _legend(ranks: Mapping[int, Doing]) -> list[Row]:
    """What ranks do, the odd ones first and by name; of the many only how many they are."""
    found: dict[Doing, list[int]] = {}
    for rank, what in ranks.items():
        found.setdefault(what, []).append(rank)
    parts: list[Row] = []
    for what in sorted(found, key=lambda what: _order(what, len(found[what]))):
        members = found[what]
        most = what not in _ODD and len(members) == max(map(len, found.values())) and len(members) > 1
        named = f"{len(members)} ranks" if most else named_ranks(members)
        parts.append((Span(LOOKS[what].mark, LOOKS[what].style), Span(f" {what.value}: {named}")))
    return parts or [(Span("no rank of this kind"),)]


def _order(what: Doing, count: int) -> tuple[bool, int, int]:
    return what not in _ODD, 0 if what in _ODD else count, list(Doing).index(what)


def cells(ranks: Mapping[int, Doing], limit: int, most: int) -> list[Row]:
    """A character for each rank, in at most this many rows; for several where there are too many ranks."""
    numbers = sorted(ranks)
    if len(numbers) < 2 or most < 1:
        return []
    label, each_row, together = _grid(numbers, limit, most)
    counts = Counter(ranks.values())
    parts = [numbers[at : at + together] for at in range(0, len(numbers), together)]
    marks = [min((ranks[rank] for rank in part), key=lambda what: _order(what, counts[what])) for part in parts]
    rows = []
    for at in range(0, len(marks), each_row):
        row = [Span(f"{parts[at][0]:>{label}} ", "2")]
        for block in range(at, min(at + each_row, len(marks)), _BLOCK):
            row += [Span(" ")] * (block > at)
            row += _runs(marks[block : block + _BLOCK])
        rows.append(cut(tuple(row), limit))
    return rows


def _grid(numbers: Sequence[int], limit: int, most: int) -> tuple[int, int, int]:
    """The width of the numbers on the left, the cells in a row, and the ranks in a cell."""
    label = len(str(numbers[-1]))
    each_row = max(1, (limit - label) // (_BLOCK + 1)) * _BLOCK
    return label, each_row, -(-len(numbers) // (each_row * most))


def _scale(ranks: Mapping[int, Doing], limit: int, most: int) -> list[Row]:
    if len(ranks) < 2 or most < 1 or (together := _grid(sorted(ranks), limit, most)[2]) == 1:
        return []
    return [(Span(f"(a cell is {together} ranks)", "2"),)]


def _runs(marks: Iterable[Doing]) -> list[Span]:
    spans: list[Span] = []
    for what in marks:
        look = LOOKS[what]
        if spans and spans[-1].style == look.style and spans[-1].text[0] == look.mark:
            spans[-1] = Span(spans[-1].text + look.mark, look.style)
        else:
            spans.append(Span(look.mark, look.style))
    return spans


def _table(glance: Glance, ranks: Mapping[int, Doing], limit: int) -> list[Row]:
    """A line for each rank, those that stand out first."""
    counts = Counter(ranks.values())
    chosen = [each for each in glance.inspection.ranks if each.rank in ranks]
    chosen.sort(key=lambda each: (_order(ranks[each.rank], counts[ranks[each.rank]]), each.rank))
    heads = ("rank", "host", "pid", "is", "in", "CPU %", "memory")
    busy = work(glance)
    lines = [heads, *(_rank_line(glance, each, ranks[each.rank], busy.get(each.rank)) for each in chosen)]
    if len({each.host for each in chosen}) < 2:
        lines = [(line[0], *line[2:]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    styles = ["2", *(LOOKS[ranks[each.rank]].style for each in chosen)]
    return [
        cut(
            (Span("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), style),),
            limit,
        )
        for line, style in zip(lines, styles, strict=True)
    ]


def _rank_line(glance: Glance, rank: RankInspection, what: Doing, busy: float | None) -> tuple[str, ...]:
    where = place(rank) if what is Doing.WAITING else None
    used = glance.used.get(rank.rank)
    return (
        str(rank.rank),
        shown(rank.host, 40),
        str(rank.pid or ""),
        what.value,
        _named(glance.inspection, where) if where else "",
        "" if busy is None else f"{busy * 100:.0f}",
        size(used.memory) if used else "",
    )


# ----------------------------------------------------------------------------------------------------------- in words


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks as runs: "rank 3", "ranks 0-6, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = [f"{first}-{last}" if last > first else str(first) for first, last in runs[:_NAMED]]
    more = f" and {sum(last - first + 1 for first, last in runs[_NAMED:])} more" if len(runs) > _NAMED else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(named)}{more}"


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.0f} MiB"


def _age(seconds: float) -> str:
    whole = max(0, int(seconds))
    days, hours = divmod(whole // 3600, 24)
    text = f"{whole // 60 % 60:02}:{whole % 60:02}"
    if days:
        return f"{days}d {hours:02}:{text}"
    return f"{hours}:{text}" if hours else text


def _gpu(gpus: tuple[GpuUsage, ...] | None) -> str:
    """All GPUs of the job in a few words: how busy the least and the most of them are, and their memory."""
    if gpus is None:
        return "GPU ?"
    if not gpus:
        return ""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    memory = [gpu.memory_used / _GIB for gpu in gpus if gpu.memory_used is not None]
    total = max((gpu.memory_total or 0 for gpu in gpus), default=0)
    words = [f"{len(gpus)} GPUs" if len(gpus) > 1 else "GPU"]
    words.append(f"{_span(busy)} %" if busy else "? %")
    if memory:
        words.append(f"{_span(memory)} of {total / _GIB:.0f} GiB" if total else f"{_span(memory)} GiB")
    return " ".join(words)


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"
