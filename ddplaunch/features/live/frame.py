"""Renders the live view as rows: a summary of the job, lists of exceptional ranks, a cell or row per rank. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.text import format_size, group_consecutive
from ddplaunch.cli.text_table import short_target
from ddplaunch.core.control_socket.job_status import JobState
from ddplaunch.features.live.program_table import describe_state, program_style, render_programs
from ddplaunch.features.live.rank_table import TableRow, render_table, sort_rows
from ddplaunch.features.live.styled_rows import Row, StyledText, truncate_row, wrap_parts, wrap_text
from ddplaunch.features.live.view_state import (
    RankActivity,
    ViewState,
    WaitPoint,
    busy_cpus_by_rank,
    collectives_per_second,
    collectives_per_second_by_rank,
    find_wait_point,
    rank_activities,
)
from ddplaunch.observe.diagnosis.inspection import Inspection
from ddplaunch.system.devices.gpu_usage import GpuUsage

MAX_FOOTER_ROWS = 6  # below the log
_CELLS_PER_BLOCK = 8  # between two gaps
_MAX_NAMED_RUNS = 8  # runs of consecutive ranks in the list of ranks with one activity
_GIB = 1 << 30


_HIGHLIGHTED = frozenset(
    {RankActivity.FAILED, RankActivity.AWAITED, RankActivity.STOPPED, RankActivity.SILENT, RankActivity.BLOCKED}
)
"""Activities whose ranks are listed, however many there are."""


MAX_RANK_ROWS = 16  # so many ranks have a row each on 24 lines; with more, they get cells too, and the table scrolls


def render_footer(view: ViewState, columns: int, rows: int) -> list[Row]:
    """Render the footer: at most ``MAX_FOOTER_ROWS`` rows, and fewer than ``rows``; each shorter than ``columns``."""
    limit, most = max(1, columns - 1), max(1, min(MAX_FOOTER_ROWS, rows - 1))
    ranks = rank_activities(view)
    head = wrap_parts(render_summary(view, ranks), limit)[: 2 if most > 3 else 1]
    legend = wrap_parts(_legend(view, ranks), limit, "   ")[: 2 if most > 3 else 1]
    sentences = _render_sentences(view, limit, 1 if most < 5 else 2)[: max(0, most - len(head) - len(legend) - 1)]
    left = max(0, most - len(head) - len(sentences) - len(legend))
    hint: list[Row] = [(StyledText("? help", "2"),)] if view.hint else []
    legend = wrap_parts([*legend, *_render_cell_note(ranks, limit, left), *hint], limit, "   ")[: len(legend)]
    return [*head, *sentences, *legend, *render_rank_cells(ranks, limit, left)][:most]


def render_full_screen(view: ViewState, columns: int, rows: int) -> list[Row]:
    """Render the full screen: summary and sentences first, then rows for ranks, then other parts if there is room."""
    limit = max(1, columns - 1)
    ranks = rank_activities(view)
    lines = build_table_rows(view, ranks)
    summary = wrap_parts(render_summary(view, ranks, figures=False), limit)
    summary = [*summary, *_render_sentences(view, limit, max(1, rows - 2))][:rows]
    hint = [truncate_row((StyledText(view.hint, "2"),), limit)] if view.hint and rows - len(summary) > 3 else []
    room = rows - len(summary) - len(hint)
    least = min(len(lines) + 1, MAX_RANK_ROWS + 1 if rows >= 20 and len(lines) <= MAX_RANK_ROWS else 5)

    def rows_if_room(more: list[Row]) -> list[Row]:
        nonlocal room
        if room - len(more) < least:
            return []
        room -= len(more)
        return more

    programs = rows_if_room([(), *table] if (table := render_programs(view, limit)) else [])
    trends = rows_if_room(_render_trends(view, limit)) or rows_if_room(_render_trends(view, limit)[:1])
    status = view.current.status
    heading = f"{sanitize_line(status.run_id, 60)}: {sanitize_line(short_target(status.target))}"
    title = rows_if_room([truncate_row((StyledText(heading, "1"),), limit)])
    cells: list[Row] = []
    if len(lines) > MAX_RANK_ROWS or not lines:
        third = max(1, rows // 4)
        legend = wrap_parts([*_legend(view, ranks), *_render_cell_note(ranks, limit, third)], limit, "   ")
        cells = rows_if_room([*legend, *render_rank_cells(ranks, limit, third)]) or rows_if_room(legend[:1])
    blank = rows_if_room([()])
    above = [*title, *summary, *trends, *cells, *programs, *blank]
    body = [*above, *_table(view, lines, ranks, limit, room)][: rows - len(hint)]
    return [*body, *[()] * (rows - len(body) - len(hint)), *hint]


def _render_trends(view: ViewState, limit: int) -> list[Row]:
    """Render the trends since the view was opened, next to each other if there is room."""
    trends = {name: trend for name, trend in view.trends.items() if trend.means}
    abreast = len(trends) if limit >= 66 else 1
    rows: list[Row] = []
    for place, (name, trend) in enumerate(trends.items()):
        value = trend.means[-1]
        label = f"{name} {f'{value:.1f}' if 0 < value < 9.95 else f'{value:,.0f}'} "
        across = limit // abreast - 2
        mark = trend.render(across - len(label), 100.0 if "%" in name else 0.0)
        pad = " " * (across - len(label) - len(mark) + 2) if (place + 1) % abreast else ""
        part: Row = (StyledText(label), StyledText(mark, "36"), StyledText(pad))
        rows[-1:] = [(*rows[-1], *part)] if place % abreast else [*rows[-1:], part]
    return rows


def build_table_rows(view: ViewState, ranks: Mapping[int, RankActivity]) -> list[TableRow]:
    """Build the table rows of the ranks that pass the filter, sorted."""
    counts, busy, rate_of = Counter(ranks.values()), busy_cpus_by_rank(view), collectives_per_second_by_rank(view)
    gpus = {pid: gpu for gpu in view.gpus or () for pid in gpu.pids}
    lines = []
    for inspected in view.current.inspection.ranks:
        if (what := ranks.get(inspected.rank)) is None:
            continue
        point = find_wait_point(inspected) if what is RankActivity.WAITING else None
        where = view.locations.get(inspected.rank) or (
            _name_wait_point(view.current.inspection, point) if point else ""
        )
        about = (
            view.current.last_lines.get(inspected.rank, ""),
            busy.get(inspected.rank),
            view.current.usage.get(inspected.rank),
        )
        pace = rate_of.get(inspected.rank), view.lateness_s.get(inspected.rank)
        lines.append(TableRow(inspected, what, where, *about, gpus.get(inspected.pid), *pace))
    if not view.sort_by and len(lines) <= MAX_RANK_ROWS:
        return sorted(lines, key=lambda one: (one.activity not in _HIGHLIGHTED, one.rank.rank))
    order = view.sort_by or "state"
    return sort_rows(lines, order, lambda one: _sort_key(one.activity, counts[one.activity]))


def _table(
    view: ViewState, lines: list[TableRow], ranks: Mapping[int, RankActivity], limit: int, room: int
) -> list[Row]:
    """Render as many rows of the table as there is room for, that of the chosen rank among them."""
    if room < 2 or not lines:
        return []
    places = [one.rank.rank for one in lines]
    at = places.index(view.cursor) if view.cursor in places else 0
    first = max(0, min(at - (room - 1) // 2, len(lines) - room + 1))
    return render_table(lines[first : first + room - 1], limit, cursor=view.cursor)


def render_summary(view: ViewState, ranks: Mapping[int, RankActivity], *, figures: bool = True) -> list[Row]:
    """Build the parts of the summary line; ``figures``: with the values that the full screen shows as trends."""
    status, inspection = view.current.status, view.current.inspection
    age = _format_age(max(inspection.moment, status.since) - status.began)
    ended = f", exit code {status.code}" if status.code is not None else ""
    style = {JobState.RUNNING: "1;32", JobState.ENDED: "1;31" if status.code else "1"}.get(status.state, "1;33")
    state = StyledText("suspended", "1;33") if view.suspended else StyledText(f"{status.state.value}{ended}", style)
    parts: list[Row] = [(state, StyledText(f" {age}"))]
    if status.attempt > 0:
        parts.append((StyledText(f"attempt {status.attempt + 1}"),))
    if figures and (speed := collectives_per_second(view)) is not None:
        number = f"{speed:,.0f}" if speed >= 10 or not speed else f"{speed:.1f}"
        parts.append((StyledText(f"{number} collectives/s"),))
    if where := _describe_waits(inspection, ranks, briefly=bool(view.sentences)):
        parts.append((StyledText(where, "33"),))
    if inspection.silent:
        parts.append((StyledText(f"no answer from {', '.join(inspection.silent[:3])}", "1;31"),))
    if inspection.node_only:
        parts.append((StyledText("this node only"),))
    if figures and (busy := busy_cpus_by_rank(view)):
        parts.append((StyledText(f"CPU {sum(busy.values()) * 100:.0f} %"),))
    if view.current.usage:
        here = " here" if len(view.current.usage) < len(inspection.ranks) else ""
        parts.append((StyledText(format_size(sum(used.memory for used in view.current.usage.values())) + here),))
    if gpu := _describe_gpus(view.gpus):
        parts.append((StyledText(gpu),))
    for each in inspection.programs if figures else ():
        text = f"{sanitize_line(each.program, 30)} {describe_state(each)}"
        parts.append((StyledText(text, program_style(each)),))
    if view.filter_text:
        parts.append((StyledText(f"filter: {sanitize_line(view.filter_text, 30)}", "1;36"),))
    return parts


def _describe_waits(inspection: Inspection, ranks: Mapping[int, RankActivity], *, briefly: bool) -> str:
    """Describe how many ranks wait, and where most of them do; "" if none waits."""
    waiting = {
        each.rank: find_wait_point(each) for each in inspection.ranks if ranks.get(each.rank) is RankActivity.WAITING
    }
    points = Counter(where for where in waiting.values() if where)
    if not points:
        return ""
    if briefly:
        return f"{points.total()} of {inspection.world_size} ranks waiting"
    (where, count), *others = points.most_common()
    named = _name_wait_point(inspection, where)
    more = f", {sum(count for _, count in others)} elsewhere" if others else ""
    return f"{count} of {inspection.world_size} ranks waiting in {named}{more}"


def _name_wait_point(inspection: Inspection, where: WaitPoint) -> str:
    if where.function:
        return sanitize_line(where.function, 40)
    return f"{_describe_operation(inspection, where)} of {_describe_group(inspection, where.group)}"


def _describe_operation(inspection: Inspection, where: WaitPoint) -> str:
    for rank in inspection.ranks:
        for each in rank.last:
            if WaitPoint(each.group, each.number) == where and not each.completed:
                return f"{sanitize_line(each.operation, 40)} #{where.number}"
    return f"#{where.number}"


def _describe_group(inspection: Inspection, name: str) -> str:
    found = next((each for rank in inspection.ranks for each in rank.known if each.group == name), None)
    if found and found.description:
        return sanitize_line(found.description, 40)
    return "default_pg" if name == "0" else f"group {sanitize_line(name, 40)}"


def _render_sentences(view: ViewState, limit: int, most: int) -> list[Row]:
    return [row for text in view.sentences for row in wrap_text(sanitize_line(text, 1000), limit, most)][:most]


def _legend(view: ViewState, ranks: Mapping[int, RankActivity]) -> list[Row]:
    """List the activities, exceptional ones first, each with its ranks; for the most common one only their number."""
    members_of: dict[RankActivity, list[int]] = {}
    for rank, what in ranks.items():
        members_of.setdefault(what, []).append(rank)
    parts: list[Row] = []
    for what in sorted(members_of, key=lambda what: _sort_key(what, len(members_of[what]))):
        members = members_of[what]
        most = what not in _HIGHLIGHTED and len(members) == max(map(len, members_of.values())) and len(members) > 1
        named = f"{len(members)} ranks" if most else format_ranks(members)
        parts.append((StyledText(what.sign, what.style), StyledText(f" {what.word}: {named}")))
    return parts or [(StyledText("no rank matches the filter" if view.filter_text else "no rank has started"),)]


def _sort_key(what: RankActivity, count: int) -> tuple[bool, int, int]:
    return what not in _HIGHLIGHTED, 0 if what in _HIGHLIGHTED else count, list(RankActivity).index(what)


def render_rank_cells(ranks: Mapping[int, RankActivity], limit: int, most: int) -> list[Row]:
    """Render a character for each rank or, if that takes more than ``most`` rows, for several ranks together."""
    numbers = sorted(ranks)
    if len(numbers) < 2 or most < 1:
        return []
    label, each_row, together = _grid_size(numbers, limit, most)
    counts = Counter(ranks.values())
    parts = [numbers[at : at + together] for at in range(0, len(numbers), together)]
    marks = [min((ranks[rank] for rank in part), key=lambda what: _sort_key(what, counts[what])) for part in parts]
    rows = []
    for at in range(0, len(marks), each_row):
        row = [StyledText(f"{parts[at][0]:>{label}} ", "2")]
        for block in range(at, min(at + each_row, len(marks)), _CELLS_PER_BLOCK):
            row += [StyledText(" ")] * (block > at)
            runs = ((what, len(list(run))) for what, run in groupby(marks[block : block + _CELLS_PER_BLOCK]))
            row += [StyledText(what.sign * count, what.style) for what, count in runs]
        rows.append(truncate_row(tuple(row), limit))
    return rows


def _grid_size(numbers: Sequence[int], limit: int, most: int) -> tuple[int, int, int]:
    """Return three sizes: the width of the rank numbers on the left, the cells in a row, and the ranks in a cell."""
    label = len(str(numbers[-1]))
    each_row = max(1, (limit - label) // (_CELLS_PER_BLOCK + 1)) * _CELLS_PER_BLOCK
    return label, each_row, -(-len(numbers) // (each_row * most))


def _render_cell_note(ranks: Mapping[int, RankActivity], limit: int, most: int) -> list[Row]:
    if len(ranks) < 2 or most < 1 or (together := _grid_size(sorted(ranks), limit, most)[2]) == 1:
        return []
    return [(StyledText(f"(a cell is {together} ranks)", "2"),)]


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks, consecutive ones as a range: "rank 3", "ranks 0-6, 8"."""
    runs = group_consecutive(ranks)
    named = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_MAX_NAMED_RUNS]]
    more = f" and {sum(map(len, runs[_MAX_NAMED_RUNS:]))} more" if len(runs) > _MAX_NAMED_RUNS else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(named)}{more}"


def _format_age(seconds: float) -> str:
    whole = max(0, int(seconds))
    days, hours = divmod(whole // 3600, 24)
    text = f"{whole // 60 % 60:02}:{whole % 60:02}"
    if days:
        return f"{days}d {hours:02}:{text}"
    return f"{hours}:{text}" if hours else text


def _describe_gpus(gpus: tuple[GpuUsage, ...] | None) -> str:
    """Describe all GPUs of the job: the range of their utilization, and of their memory."""
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
