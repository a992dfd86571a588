"""Sections of the page: header, failure, stacks, slow ranks, resources, hosts, notes, plan and facts of a run."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median

from msgspec import Struct

from ddplaunch import __version__
from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import format_count, format_elapsed, format_ranks, format_size, join_names, signal_name
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.features.inspect.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.features.inspect.diagnosis.rank_position import busy_workers, worker_name
from ddplaunch.features.inspect.diagnosis.stack_groups import StackGroup, group_ranks
from ddplaunch.features.inspect.diagnosis.wait_sentences import describe_waits
from ddplaunch.features.inspect.diagnosis.waits import find_waits
from ddplaunch.features.inspect.stacks_text import inspection_notes as notes_on
from ddplaunch.features.runs.html_report.charts import sparklines
from ddplaunch.features.runs.html_report.html import (
    Markup,
    concat,
    definition_list,
    element,
    section_with_heading,
    table,
)
from ddplaunch.features.runs.html_report.page_run import REFRESH_S, PageRun, RankRow, time_of_day

_STATE_CLASSES = {"done": "well", "running": "running", "failed": "failed"}
_MAX_NOTES = 200
_OPEN = 3  # groups of ranks whose stacks are unfolded at first
_MIN_SAMPLES, _MIN_BEHIND = 10, 0.1  # from which on ranks are slow: samples, and the share of them behind
_MAX_SLOW = 8  # slow ranks in the table
_MAX_DEVICES = 128
_DRAWN = 256  # up to this many ranks have small charts
_FOLDED = 32  # with more ranks, the table of resources is folded
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def header(run: PageRun) -> Markup:
    """Build the header: name, state, target and goodput of the run."""
    record = run.first
    fate = element("span", record.fate.value, class_=f"fate {_STATE_CLASSES.get(record.fate.value, 'stopped')}")
    code = f"exit code {record.code}, " if record.code is not None else ""
    nodes = f" on {record.nnodes} nodes" if record.nnodes > 1 else ""
    ranks = f"{format_count(record.world_size, 'rank')}{nodes}"
    line = f"{code}{format_elapsed(run.ended - run.began)}, {ranks}, {time_of_day(run.began)}"
    return element(
        "header",
        element("h1", run.name, " ", fate),
        element("p", element("code", record.target)),
        element("p", line),
        *([element("p", run.inputs.effective)] if run.inputs.effective else []),
    )


def notes(run: PageRun) -> Markup | None:
    """Build the list of notes, which were printed while the job ran; None without notes."""
    found = list(dict.fromkeys(note for share in run.shares for note in share.notes))
    if not found:
        return None
    more = [f"and {len(found) - _MAX_NOTES} more"] if len(found) > _MAX_NOTES else []
    items = (element("li", note) for note in (*found[:_MAX_NOTES], *more))
    return section_with_heading("Notes", element("ul", *items), id="notes")


def facts(run: PageRun) -> Markup:
    """Build the facts on the run."""
    return section_with_heading("Run", definition_list(_list_facts(run)), id="run")


def _list_facts(run: PageRun) -> Iterator[tuple[str, str]]:
    record = run.first
    yield "run id", record.run_id
    yield "command", element("code", shlex.join(record.argv))
    yield "folder", record.cwd
    hosts = dict.fromkeys(rank.rank.host for each in run.attempts for rank in each.rows if rank.rank.host)
    yield "hosts", join_names(hosts) or record.host
    yield "launcher", f"process {record.pid} on {record.host}, node {record.node_rank} of {record.nnodes}"
    yield "began", time_of_day(run.began)
    if record.ended is not None:
        yield "ended", time_of_day(record.ended)
    if record.signal is not None:
        yield "signal", signal_name(record.signal)
    if record.log_dir:
        yield "log folder", sanitize_line(record.log_dir)
    if len(run.shares) < record.nnodes:
        yield "records", f"of {len(run.shares)} of {record.nnodes} nodes; the other records are on their hosts"


def slow_ranks(run: PageRun) -> Markup | None:
    """Build the table of slow ranks, by how often they were behind; None without slow ranks."""
    shares = {rank: row.behind for rank, row in run.average_samples.items() if row.behind is not None}
    if sum(map(len, run.inputs.readings)) < _MIN_SAMPLES or len(shares) < 2:
        return None
    middle = median(shares.values())
    behind = (rank for rank in shares if shares[rank] > max(_MIN_BEHIND, 3 * middle))
    if not (out := sorted(behind, key=lambda rank: -shares[rank])):
        return None
    rows = [[str(rank), run.hosts.get(rank) or "–", f"{100 * shares[rank]:.0f} %"] for rank in out[:_MAX_SLOW]]
    explanation = (
        "Behind: the share of samples in which the rank had entered fewer collectives than others."
        f" Half of all ranks: {100 * middle:.0f} % or less."
    )
    about = element("p", explanation, class_="dim")
    return section_with_heading("Who was slow", table(["rank", "host", "behind"], rows), about, id="slow")


def hosts(run: PageRun) -> Markup | None:
    """Build the table of hosts with the failures and usage of their ranks; None with one host only."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in run.hosts.items():
        ranks_of.setdefault(host or "–", []).append(rank)
    if len(ranks_of) < 2:
        return None
    failures = Counter(each.verdict.first.host for each in run.attempts if each.verdict)
    used = run.average_samples
    rows = []
    for host, ranks in ranks_of.items():
        known = [used[rank] for rank in ranks if rank in used]
        cpus = f"{100 * sum(each.cpus or 0.0 for each in known) / len(known):.0f} %" if known else "–"
        memory = format_size(int(max(each.memory or 0.0 for each in known))) if known else "–"
        rows.append([host, format_ranks(ranks).partition(" ")[2], str(failures[host] or "–"), cpus, memory])
    heads = ["host", "ranks", "failed first", "CPU of a rank", "memory of a rank"]
    return section_with_heading("Hosts", table(heads, rows), id="hosts")


def plan(run: PageRun) -> Markup | None:
    """Build the plan, with the source of each value; None if it was not recorded."""
    saved = run.inputs.plan
    if saved is None:
        return None
    values = ((name, concat(value, " ", element("span", source, class_="dim"))) for name, value, source in saved.facts)
    devices = [[str(rank), device, cpus or "–"] for rank, device, cpus in saved.ranks[:_MAX_DEVICES]]
    variables = [[name, value] for name, value in saved.variables]
    more = element(
        "details",
        element("summary", "Devices and variables"),
        table(["rank", "device", "CPUs"], devices),
        table(["variable", "value"], variables),
    )
    return section_with_heading("Plan", definition_list(values), more, id="plan")


def footer(run: PageRun) -> Markup:
    """Build the footer: version and time."""
    live = f"; renewed every {REFRESH_S} s while the job runs" if run.inputs.live else ""
    return element("footer", f"Written by ddplaunch {__version__}, {time_of_day(time.time())}{live}")


def failure(run: PageRun) -> Markup | None:
    """Build the failure report; None without a failure."""
    if run.verdict is None:
        return None
    headline, *lines = _STYLES.sub("", render_verdict(run.verdict, run.first.nnodes)).splitlines()
    report = "\n".join(line.removeprefix("  ") for line in lines)
    title = element("p", headline.removeprefix("ddplaunch: "), class_="headline")
    return section_with_heading("Failure", title, *([element("pre", report)] if report else []), id="failure")


def inspections(run: PageRun) -> Iterator[Markup]:
    """Yield a section for each inspection of the ranks."""
    found = sorted((each for share in run.shares for each in share.inspections), key=lambda each: each.moment)
    for number, each in enumerate(found):
        when = f"after {format_elapsed(each.moment - run.began)}"
        # Without waits in a failed run, the ranks that waited may have ended: the headline has the reason.
        waited = find_waits(each) or run.verdict is None
        texts = [element("li", text) for text in describe_waits(each)] if waited else []
        waits = [element("ul", *texts, class_="waits")] if waited else []
        title = concat("What the ranks were doing, ", element("span", when, class_="dim"))
        notes = (element("p", note, class_="dim") for note in notes_on(each))
        groups = (_group(group, each, place < _OPEN) for place, group in enumerate(group_ranks(each)))
        yield section_with_heading(title, *waits, *notes, *groups, id=f"stacks-{number}")


def _group(group: StackGroup, inspection: Inspection, unfolded: bool) -> Markup:
    """Build a stack group: its ranks, and the stacks of the first of them."""
    members = set(group.ranks)
    hosts = dict.fromkeys(each.host for each in inspection.ranks if each.rank in members and each.host)
    where = element("span", f" on {join_names(hosts)}", class_="dim") if hosts else ""
    waited = f" for {format_elapsed(group.waited_s)}" if group.waited_s is not None else ""
    head = concat(element("b", format_ranks(group.ranks)), where, f": {group.description}{waited}")
    if threads := [*_build_threads(group.example)]:
        return element("details", element("summary", head), *threads, open="" if unfolded else None)
    ended = group.example.condition is ProcessCondition.EXITED
    why = f"; no stack: {group.example.no_stack}" if group.example.no_stack and not ended else ""
    return element("p", concat(head, why), class_="stackless")


def _build_threads(rank: RankInspection) -> Iterator[Markup]:
    threads = [each for each in rank.threads if each.frames]
    for number, thread in enumerate(threads):
        if len(threads) > 1:
            title = thread.title if thread.name else f"thread {number}"
            name = "main thread" if thread is rank.threads[0] else title
            yield element("p", name, class_="dim")
        yield element("ol", *map(_build_frame, thread.frames), class_="stack")
    for worker in busy_workers(rank):
        yield element("p", f"its {worker_name(rank)} (pid {worker.pid})", class_="dim")
        yield element("ol", *map(_build_frame, worker.frames), class_="stack")


def _build_frame(frame: Frame) -> Markup:
    place = element("span", f"{frame.file}:{frame.line}", class_="place")
    return element("li", element("code", frame.function), " ", place, class_="own" if frame.own else None)


class RankUsage(Struct, frozen=True):
    """The usage of one rank over all of its attempts."""

    last: RankRow
    peak: int  # bytes; 0 where unknown
    cpu: float  # seconds
    lived: float  # seconds


def resources(run: PageRun) -> Markup | None:
    """Build the table of resources; None if nothing is known."""
    used = [each for each in _collect_usage(run) if each.peak or each.cpu]
    if not used:
        return None
    over_time = [sparklines(run, field) for field in ("memory", "cpus")] if len(used) <= _DRAWN else [{}, {}]
    heads = ["rank", "host", "peak memory", "over time", "CPU time", "over time", "CPUs", "end"]
    rows = table(heads, _usage_rows(used, *over_time))
    folded = element("details", element("summary", f"All {len(used)} ranks"), rows) if len(used) > _FOLDED else rows
    return section_with_heading("Resources", element("ul", *_build_summary(used)), folded, id="resources")


def _collect_usage(run: PageRun) -> list[RankUsage]:
    rows: dict[int, list[RankRow]] = {}
    for row in (row for each in run.attempts for row in each.rows):
        rows.setdefault(row.rank.rank, []).append(row)
    found = []
    for number in sorted(rows):
        known = [row.rank for row in rows[number]]
        lived = sum((rank.ended or run.ended) - rank.started for rank in known if rank.started)
        peak, cpu = max(rank.peak_memory for rank in known), sum(rank.cpu for rank in known)
        found.append(RankUsage(rows[number][-1], peak, cpu, lived))
    return found


def _build_summary(used: list[RankUsage]) -> list[Markup]:
    most = max(used, key=lambda each: each.peak)
    busiest = max(used, key=lambda each: each.cpu)
    cpu = sum(each.cpu for each in used)
    lines = []
    if most.peak:
        middle = format_size(int(median(each.peak for each in used)))
        lines.append(f"Peak memory: {format_size(most.peak)} (rank {most.last.rank.rank}), {middle} in the median")
    if busiest.cpu:
        most_cpu = f"{format_elapsed(busiest.cpu)} at most (rank {busiest.last.rank.rank})"
        lines.append(f"CPU time: {format_elapsed(cpu)} in all, {most_cpu}")
    return [element("li", line) for line in lines]


def _usage_rows(
    used: list[RankUsage], memory_over_time: Mapping[int, Markup], cpus_over_time: Mapping[int, Markup]
) -> list[list[str]]:
    memory, cpu = max(each.peak for each in used), max(each.cpu for each in used)
    return [
        [
            str(each.last.rank.rank),
            each.last.rank.host or "–",
            _build_bar(format_size(each.peak) if each.peak else "–", each.peak / memory if memory else 0),
            memory_over_time.get(each.last.rank.rank, ""),
            _build_bar(format_elapsed(each.cpu), each.cpu / cpu if cpu else 0),
            cpus_over_time.get(each.last.rank.rank, ""),
            f"{each.cpu / each.lived:.1f}" if each.lived else "–",
            each.last.outcome_text,
        ]
        for each in used
    ]


def _build_bar(text: str, share: float) -> Markup:
    """Build a number with a bar that compares it with the largest."""
    bar = element("span", element("i", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%"), class_="meter")
    return concat(bar, text)
