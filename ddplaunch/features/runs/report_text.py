"""Renders the report on a run: command, result, failure, attempts, usage of each rank, and where its output is."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from ddplaunch.base.errors import sanitize_line
from ddplaunch.base.text import format_count, format_elapsed, format_size, signal_name
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.cli.text_table import format_table
from ddplaunch.core.control_socket.job_status import ProgramStatus
from ddplaunch.features.runs.goodput import format_goodput, format_percent
from ddplaunch.features.runs.provenance import Provenance
from ddplaunch.observe.diagnosis.rank_position import format_exit
from ddplaunch.observe.history.run_record import AttemptRecord, RankRecord, RunRecord, RunState, group_by_domain
from ddplaunch.observe.history.time_breakdown import TimeBreakdown
from ddplaunch.system.plan.numbers import format_cpulist

MAX_ATTEMPTS = 10  # shown: the last ones
MAX_RANKS = 32  # shown; --json has all
MAX_COMMAND = 400  # characters


class TimeOfRuns(NamedTuple):
    """A run, or all runs of a batch job, and their time breakdown."""

    runs: Sequence[RunRecord]  # the report is on the last one
    spent: TimeBreakdown

    @property
    def line(self) -> str:
        """The line of the report on goodput."""
        fate, known = self.runs[-1].fate, format_goodput(self.spent)
        if fate is RunState.LOST:
            return f"{known} (until it was last seen)" if self.spent.steady else "goodput unknown: the run was lost"
        return known or "goodput not known yet"


def render_report(
    shares: Sequence[RunRecord],
    total: TimeOfRuns,
    output: str | None,
    across: int | None,
    provenance: Provenance | None = None,
) -> Iterator[str]:
    """Yield the lines of the report, with ANSI styles.

    ``shares``: the records of the nodes, node 0's first; ``output``: the line that says where the output is;
    ``across``: columns of the terminal; ``provenance``: what the run was, on the first of the nodes.
    """
    record = shares[0]
    nodes = f" on {record.nnodes} nodes" if record.nnodes > 1 else ""
    lasted = "" if record.ended is None else f", lasted {format_elapsed(record.ended - record.began)}"
    yield total.line
    if len(total.runs) > 1:
        heads, rows = ("RUN", "BEGAN", "LASTED", "GOODPUT", "ENDED"), [_run_row(each) for each in total.runs]
        yield from (*format_table(heads, rows, (), across, heads[1:4], wrap=True), "")
    yield click.style(f"{record.run}: {_format_state(record)}", bold=True)
    yield f"  {sanitize_line(shlex.join(record.argv), MAX_COMMAND)}"
    yield f"  in {record.cwd} on {record.host}, {format_count(record.world_size, 'rank')}{nodes}"
    if record.code_version:
        yield f"  code {record.code_version}"
    if provenance:
        yield from (f"  {line}" for line in provenance.lines())
    yield f"  began {_format_moment(record.began)}{lasted}"
    for share in shares[1:]:
        yield f"  node {share.node_rank} ({share.host}): {_format_state(share)}"
    for each in group_by_domain(shares):
        yield f"  domain {each.domain}: node{'s' * (len(each.node_ranks) > 1)} {format_cpulist(each.node_ranks)}"
    if record.verdict:
        yield ""
        yield render_verdict(record.verdict, record.nnodes).rstrip("\n")
    if record.remark:
        yield from ("", record.remark)
    yield from _format_mismatches([each for share in shares for each in share.attempts[-1:]])
    yield from _format_attempts(record, across)
    last = [share.attempts[-1] for share in shares if share.attempts]
    latest = max((each.number for each in last), default=-1)  # without nodes that were lost earlier
    yield from _format_ranks([rank for each in last if each.number == latest for rank in each.ranks], across)
    yield from _format_programs(shares, across)
    if record.notes:
        yield from ("", *(f"note: {note}" for note in record.notes))
    if output:
        yield from ("", output)


def _run_row(record: RunRecord) -> tuple[str, ...]:
    lasted, effective = format_elapsed(record.spent.wall_s), format_percent(record.spent.goodput)
    return record.run, _format_moment(record.began), lasted, effective, _format_state(record)


def _format_state(record: RunRecord) -> str:
    match record.fate:
        case RunState.RUNNING:
            return "running"
        case RunState.DONE:
            return "succeeded"
        case RunState.LOST:
            return "lost: its launcher was killed, or the machine went down"
        case RunState.STOPPED:
            return f"stopped by {signal_name(record.signal or 0)}, exit code {record.code}"
        case RunState.PREEMPTED:
            return f"preempted, exit code {record.code}"
    return f"failed with exit code {record.code}"


def _format_mismatches(attempts: Sequence[AttemptRecord]) -> Iterator[str]:
    """Format each preloaded module that did not fit an import of some ranks: how many, and what they did."""
    outcomes = {"restarts": "started over", "continues": "used it all the same", "ends": "ended"}
    for each in [each for attempt in attempts for each in attempt.mismatches]:
        did = outcomes.get(each.outcome, each.outcome)
        yield f"  the preloaded {each.module} did not fit, {format_count(each.ranks, 'rank')} {did}: {each.differs}"


def _format_attempts(record: RunRecord, across: int | None) -> Iterator[str]:
    if len(record.attempts) < 2:
        return
    yield ""
    rows = [_attempt_row(each) for each in record.attempts[-MAX_ATTEMPTS:]]
    yield from format_table(("ATTEMPT", "BEGAN", "LASTED", "ENDED"), rows, (), across, ("BEGAN",), wrap=True)
    more = len(record.attempts) - len(rows) + record.left_out
    if more:
        yield f"  and {more} before"


def _attempt_row(attempt: AttemptRecord) -> tuple[str, ...]:
    lasted = "-" if attempt.ended is None else format_elapsed(attempt.ended - attempt.began)
    return str(attempt.number), _format_moment(attempt.began), lasted, attempt.why or "-"


def _format_ranks(ranks: Sequence[RankRecord], across: int | None) -> Iterator[str]:
    if not any(rank.started for rank in ranks):
        return
    hosts = len({rank.host for rank in ranks}) > 1
    heads = ("RANK", *(["HOST"] if hosts else []), "LASTED", "PEAK MEMORY", "CPU", "ENDED WITH")
    yield ""
    rows = [_rank_row(rank, hosts) for rank in ranks[:MAX_RANKS]]
    yield from format_table(heads, rows, (), across, ("CPU", "LASTED"))
    if len(ranks) > MAX_RANKS:
        yield f"  and {len(ranks) - MAX_RANKS} more ranks; --json has all"


def _rank_row(rank: RankRecord, host: bool) -> tuple[str, ...]:
    known = rank.started is not None and rank.ended is not None
    lasted = format_elapsed((rank.ended or 0) - (rank.started or 0)) if known else "-"
    memory = format_size(rank.peak_memory) if rank.peak_memory else "-"
    cpu = format_elapsed(rank.cpu) if rank.peak_memory else "-"
    ended = "-" if rank.code is None else format_exit(rank.code)
    return str(rank.rank), *([rank.host] if host else []), lasted, memory, cpu, ended


def _format_programs(shares: Sequence[RunRecord], across: int | None) -> Iterator[str]:
    """Yield the programs beside the ranks."""
    rows = [program_row(each, share, unknown="-") for share in shares for each in share.programs]
    if rows:
        yield ""
        yield from format_table([head.upper() for head in PROGRAM_HEADS], rows, (), across, ("AT", "STARTS", "KIND"))


PROGRAM_HEADS = ("program", "kind", "ready after", "starts", "peak memory", "silent for", "ended with", "at")


def program_row(program: ProgramStatus, share: RunRecord, *, unknown: str) -> tuple[str, ...]:
    """Return the cells of a program beside the ranks, under ``PROGRAM_HEADS``."""
    ready = unknown if program.ready_after_s is None else format_elapsed(program.ready_after_s)
    memory = format_size(program.peak_memory) if program.peak_memory else unknown
    silent = unknown if program.quiet is None else format_elapsed(program.quiet)
    ended = format_exit(program.code) if program.code is not None else unknown if share.ended is None else "the job"
    return program.program, program.kind, ready, str(program.starts), memory, silent, ended, program.place or unknown


def _format_moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
