"""Builds the page's sections: header, failure, stacks, slow ranks, resources, hosts, notes, plan and facts."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from statistics import median

from msgspec import Struct

from ddplaunch import __version__
from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.stack_frames import Frame
from ddplaunch.base.text import format_count, format_elapsed, format_ranks, format_size, join_names, signal_name
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.features.runs.html_report import charts
from ddplaunch.features.runs.html_report.page_run import REFRESH_S, PageRun, RankRow, time_of_day
from ddplaunch.features.runs.program_usage import add_program_usage
from ddplaunch.features.runs.report_text import program_row
from ddplaunch.observe.diagnosis.inspection import Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.diagnosis.rank_position import busy_workers, worker_noun
from ddplaunch.observe.diagnosis.stack_groups import StackGroup, group_ranks
from ddplaunch.observe.diagnosis.wait_sentences import describe_waits
from ddplaunch.observe.diagnosis.waits import find_waits
from ddplaunch.observe.stacks_text import inspection_notes as notes_on

_STATE_CLASSES = {"done": "well", "running": "running", "failed": "failed"}
_MAX_NOTES = 200
_OPEN = 3  # groups of ranks whose stacks are unfolded at first
_MIN_SAMPLES, _MIN_BEHIND = 10, 0.1  # from this many samples on, a rank is slow if behind in more than this share
_MAX_SLOW = 8  # slow ranks in the table
_MAX_DEVICES = 128
_DRAWN = 256  # up to this many ranks have small charts
_FOLDED = 32  # with more ranks, the table of resources is folded
_STYLES = re.compile(r"\x1b\[[0-9;]*m")

Shown = Mapping[str, object]
"""The values of a section, by their names in the template."""


def header(run: PageRun) -> Shown:
    """Return the state of the run, and the line below its name: exit code, duration, ranks, start time."""
    record = run.first
    code = f"exit code {record.code}, " if record.code is not None else ""
    nodes = f" on {record.nnodes} nodes" if record.nnodes > 1 else ""
    ranks = f"{format_count(record.world_size, 'rank')}{nodes}"
    line = f"{code}{format_elapsed(run.ended - run.began)}, {ranks}, {time_of_day(run.began)}"
    return {"state": _STATE_CLASSES.get(record.fate.value, "stopped"), "line": line}


def notes(run: PageRun) -> Sequence[str]:
    """Return the notes that were printed while the job ran."""
    found = list(dict.fromkeys(note for share in run.shares for note in share.notes))
    more = [f"and {len(found) - _MAX_NOTES} more"] if len(found) > _MAX_NOTES else []
    return [*found[:_MAX_NOTES], *more]


def command(run: PageRun) -> str:
    return shlex.join(run.first.argv)


def facts(run: PageRun) -> Iterator[tuple[str, str]]:
    """Yield facts on the run, after its id and command."""
    record = run.first
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


def slow_ranks(run: PageRun) -> Shown | None:
    """Return the slow ranks; None without any."""
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
    return {"rows": rows, "explanation": explanation}


def hosts(run: PageRun) -> Sequence[Sequence[str]]:
    """Return a row for each host, with the failures and usage of its ranks; none with one host only."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in run.hosts.items():
        ranks_of.setdefault(host or "–", []).append(rank)
    if len(ranks_of) < 2:
        return []
    failures = Counter(each.verdict.first.host for each in run.attempts if each.verdict)
    used = run.average_samples
    rows = []
    for host, ranks in ranks_of.items():
        known = [used[rank] for rank in ranks if rank in used]
        cpus = f"{100 * sum(each.cpus or 0.0 for each in known) / len(known):.0f} %" if known else "–"
        memory = format_size(int(max(each.memory or 0.0 for each in known))) if known else "–"
        rows.append([host, format_ranks(ranks).partition(" ")[2], str(failures[host] or "–"), cpus, memory])
    return rows


def programs(run: PageRun) -> Sequence[Sequence[str]]:
    """Return a row for each program beside the ranks."""
    samples = chain(run.inputs.readings, repeat(()))
    return [
        program_row(each, share, unknown="–")
        for share, own in zip(run.shares, samples, strict=False)
        for each in add_program_usage(share.programs, own)
    ]


def devices(run: PageRun) -> Sequence[Sequence[str]]:
    """Return a row for each rank of the plan: its device and CPUs."""
    ranks = run.inputs.plan.ranks[:_MAX_DEVICES] if run.inputs.plan else ()
    return [[str(rank), device, cpus or "–"] for rank, device, cpus in ranks]


def footer(run: PageRun) -> str:
    live = f"; renewed every {REFRESH_S} s while the job runs" if run.inputs.live else ""
    return f"Written by ddplaunch {__version__}, {time_of_day(time.time())}{live}"


def failure(run: PageRun) -> Shown | None:
    """Return the failure report; None without a failure."""
    if run.verdict is None:
        return None
    headline, *lines = _STYLES.sub("", render_verdict(run.verdict, run.first.nnodes)).splitlines()
    report = "\n".join(line.removeprefix("  ") for line in lines)
    return {"headline": headline.removeprefix("ddplaunch: "), "report": report}


def inspections(run: PageRun) -> Iterator[Shown]:
    """Yield the inspections of the ranks."""
    found = sorted((each for share in run.shares for each in share.inspections), key=lambda each: each.moment)
    for number, inspection in enumerate(found):
        # Without waits in a failed run, the ranks that waited may have ended: the headline has the reason.
        waited = find_waits(inspection) or run.verdict is None
        groups = [
            _build_stack_group(group, inspection, is_open=place < _OPEN)
            for place, group in enumerate(group_ranks(inspection))
        ]
        yield {
            "number": number,
            "when": f"after {format_elapsed(inspection.moment - run.began)}",
            "waits": [*describe_waits(inspection)] if waited else [],
            "notes": notes_on(inspection),
            "groups": groups,
        }


def _build_stack_group(group: StackGroup, inspection: Inspection, *, is_open: bool) -> Shown:
    members = set(group.ranks)
    hosts = dict.fromkeys(each.host for each in inspection.ranks if each.rank in members and each.host)
    waited = f" for {format_elapsed(group.waited_s)}" if group.waited_s is not None else ""
    ended = group.example.condition is ProcessCondition.EXITED
    return {
        "ranks": format_ranks(group.ranks),
        "where": f" on {join_names(hosts)}" if hosts else "",
        "doing": f"{group.description}{waited}",
        "stacks": [*_list_stacks(group.example)],
        "why_stackless": f"; no stack: {group.example.no_stack}" if group.example.no_stack and not ended else "",
        "is_open": is_open,
    }


def _list_stacks(rank: RankInspection) -> Iterator[tuple[str, Sequence[Frame]]]:
    """Yield title and frames of each thread and busy worker; a rank's only thread has no title."""
    threads = [each for each in rank.threads if each.frames]
    for number, thread in enumerate(threads):
        title = thread.title if thread.name else f"thread {number}"
        name = "main thread" if thread is rank.threads[0] else title
        yield name if len(threads) > 1 else "", thread.frames
    for worker in busy_workers(rank):
        yield f"its {worker_noun(rank)} (pid {worker.pid})", worker.frames


class RankUsage(Struct, frozen=True):
    """The usage of one rank over all of its attempts."""

    last: RankRow
    peak: int  # bytes; 0 where unknown
    cpu: float  # seconds
    lived: float  # seconds


def resources(run: PageRun) -> Shown | None:
    """Return what the ranks used; None if nothing is known."""
    used = [each for each in _collect_usage(run) if each.peak or each.cpu]
    if not used:
        return None
    over_time = [charts.sparklines(run, field) for field in ("memory", "cpus")] if len(used) <= _DRAWN else [{}, {}]
    return {
        "summary": [*_summarize_usage(used)],
        "rows": [*_usage_rows(used, *over_time)],
        "is_folded": len(used) > _FOLDED,
        "steps": charts.SPARKLINE_STEPS,
    }


def _collect_usage(run: PageRun) -> list[RankUsage]:
    rows: dict[int, list[RankRow]] = {}
    for row in (row for each in run.attempts for row in each.rows):
        rows.setdefault(row.rank.rank, []).append(row)
    usages = []
    for number in sorted(rows):
        known = [row.rank for row in rows[number]]
        lived = sum((rank.ended or run.ended) - rank.started for rank in known if rank.started)
        peak, cpu = max(rank.peak_memory for rank in known), sum(rank.cpu for rank in known)
        usages.append(RankUsage(rows[number][-1], peak, cpu, lived))
    return usages


def _summarize_usage(used: list[RankUsage]) -> Iterator[str]:
    most = max(used, key=lambda each: each.peak)
    busiest = max(used, key=lambda each: each.cpu)
    cpu = sum(each.cpu for each in used)
    if most.peak:
        middle = format_size(int(median(each.peak for each in used)))
        yield f"Peak memory: {format_size(most.peak)} (rank {most.last.rank.rank}), {middle} in the median"
    if busiest.cpu:
        most_cpu = f"{format_elapsed(busiest.cpu)} at most (rank {busiest.last.rank.rank})"
        yield f"CPU time: {format_elapsed(cpu)} in all, {most_cpu}"


def _usage_rows(
    used: list[RankUsage], memory_over_time: Mapping[int, str], cpus_over_time: Mapping[int, str]
) -> Iterator[Shown]:
    memory, cpu = max(each.peak for each in used), max(each.cpu for each in used)
    for usage in used:
        rank = usage.last.rank
        yield {
            "rank": rank.rank,
            "host": rank.host or "–",
            "memory": _make_meter(format_size(usage.peak) if usage.peak else "–", usage.peak / memory if memory else 0),
            "memory_over_time": memory_over_time.get(rank.rank),
            "cpu": _make_meter(format_elapsed(usage.cpu), usage.cpu / cpu if cpu else 0),
            "cpus_over_time": cpus_over_time.get(rank.rank),
            "cpus": f"{usage.cpu / usage.lived:.1f}" if usage.lived else "–",
            "outcome": usage.last.outcome_text,
        }


def _make_meter(text: str, share: float) -> tuple[str, str]:
    """Return ``text``, and the width of a bar; ``share``: the value divided by the largest one."""
    return text, f"{100 * min(1.0, max(0.0, share)):.1f}%"
