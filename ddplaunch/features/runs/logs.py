"""``ddplaunch logs``: prints the output of a run's ranks."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta
from datetime import time as clock
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Thread

import click

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.base.text import closest_match, format_rank_range, join_names
from ddplaunch.base.tty import is_interactive
from ddplaunch.cli import client
from ddplaunch.cli.client import JobEnded
from ddplaunch.cli.job_argument import JobCommand, RunName
from ddplaunch.cli.locate import describe_elsewhere
from ddplaunch.core.option_values import parse_seconds
from ddplaunch.core.output.line_merger import LineMerger, MergedLines
from ddplaunch.core.output.run_log import attempt_suffix
from ddplaunch.core.prefix import DEFAULT_PREFIX, add_prefix, format_for_ranks
from ddplaunch.features.runs import history_store, run_lookup
from ddplaunch.features.runs import rank_logs as kept
from ddplaunch.features.runs.default_run import default_run
from ddplaunch.features.runs.job_resolver import (
    find_recorded_run,
    job_state,
    nothing_kept_error,
    require_running,
    resolve_job,
    resolve_job_id,
    run_name,
)
from ddplaunch.features.runs.output_request import ProgramOutputRequest
from ddplaunch.features.runs.rank_logs import Part
from ddplaunch.features.runs.run_lookup import FoundRun
from ddplaunch.features.runs.run_record import RunState
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.schedulers.job_step import run_on_nodes
from ddplaunch.system.schedulers.log_follower import LogFollower, print_line
from ddplaunch.system.schedulers.scheduler_registry import get_scheduler
from ddplaunch.system.schedulers.submitted_job import SubmittedJob
from ddplaunch.system.schedulers.submitted_jobs import store_end

MAX_LINE = 1 << 20  # bytes; a longer line is split
LOOKAHEAD_LINES = 1000  # of each rank, searched for lines that are equal to another rank's next one


@click.command(cls=JobCommand)
@click.argument("run", required=False, metavar="[RUN]", type=RunName())
@click.option("--rank", "typed", metavar="LIST", help="Show only these ranks: 3, or 0,3.")
@click.option("--program", metavar="NAME", help="Show the output of this program beside the ranks.")
@click.option("--tail", metavar="N", type=click.IntRange(1), help="Show only the last N lines of each rank.")
@click.option("--since", metavar="TIME", help="Show only output since 10m (ago), 14:30, or 2026-11-26 14:30.")
@click.option("--failed", is_flag=True, help="Show only ranks that failed.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job ends.")
@click.option(
    "--merge/--no-merge",
    default=None,
    help="Merge equal lines of several ranks, as [0-7] LINE.  [default: in a terminal only]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, with rank and line.")
def logs(
    run: str | None,
    typed: str | None,
    program: str | None,
    tail: int | None,
    since: str | None,
    failed: bool,
    follow: bool,
    merge: bool | None,
    as_json: bool,
) -> int:
    """Show the output of a run.

    RUN is the name in `ddplaunch ps`, a part of it, or the PID of the launcher. Default: the newest run of this
    folder.

    With --log-dir this is the whole output of the last attempt, otherwise the last 256 KiB of each rank. Each line
    begins with its rank, unless you select one rank. --since covers all attempts, with a resolution of one second.

    With the number of a submitted job, show the job's log. With --rank or --program, the nodes are queried through
    Slurm (`srun --overlap`), Grid Engine or Kubernetes (`kubectl exec`).
    """
    part = Part(tail or 0, None if since is None else parse_moment(since, time.time()))
    if tail and since is not None:
        raise UsageError("--tail and --since contradict each other", "leave one of them out")
    if program is not None:
        given = {"--rank": typed, "--since": since, "--failed": failed, "--json": as_json}
        if other := next((name for name, value in given.items() if value), None):
            raise UsageError(f"{other} does not work with --program", "leave one of them out")
        if (queued := resolve_job(run)) and run:
            there = require_running(queued, resolve_job_id(queued, run, "logs"))
            words = ["logs", run_name(queued, there), "--program", program, *(["--follow"] if follow else [])]
            words += ["--tail", str(tail)] if tail else []
            return run_on_nodes(queued, there, words, everywhere=True)
        found = run_lookup.find_run(default_run(follow=follow) if run is None else run)
        for data in _program_output(found, program, tail or 0, follow=follow):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return 0
    if (queued := resolve_job(run)) and run:
        options = [*(["--rank", typed] if typed is not None else []), *(["--failed"] if failed else [])]
        options += [*(["--since", since] if since is not None else []), *(["--json"] if as_json else [])]
        options += [] if merge is None else ["--merge" if merge else "--no-merge"]
        result = _logs_of_job(queued, run, options, follow, tail or 0)
        if isinstance(result, int):
            return result
        run = result
    found = run_lookup.find_run(default_run(follow=follow) if run is None else run)
    ranks = _chosen_ranks(found, typed, failed)
    pieces = _output_chunks(found, ranks, follow, part)
    if as_json or len(ranks) == 1 or not (is_interactive(1) if merge is None else merge):
        output = format_stream(chain.from_iterable(pieces), prefix=len(ranks) != 1, as_json=as_json)
    else:
        output = add_rank_prefix(merge_live(chain.from_iterable(pieces)) if follow else align_equal_lines(pieces))
    stdout, is_empty = sys.stdout.buffer, True
    for text in output:
        stdout.write(text)
        stdout.flush()
        is_empty = False
    if since is not None and is_empty:
        click.echo(f"the ranks of {found.run} on this machine have printed nothing since then", err=True)
    return 0


def _program_output(found: FoundRun, program: str, tail: int, *, follow: bool) -> Iterator[bytes]:
    """Yield the output of a program beside the ranks: of its last start the whole, or what is in memory."""
    record, log_dir = found.record, found.record.log_dir if found.record else None
    known = [each.program for each in record.programs] if record else []
    if record and log_dir and program in known and not (found.running and follow):
        names = [
            f"{program}{suffix}.log" for suffix in ("", *(attempt_suffix(each.number) for each in record.attempts))
        ]
        paths = [os.path.join(log_dir, name) for name in names]
        if path := next((path for path in reversed(paths) if os.path.exists(path)), None):
            with open(path, "rb") as file:
                yield kept.read_last_lines(file, tail) if tail else file.read()
            return
    if found.running:
        known = []
        for reply in client.stream_replies(found.running.path, ProgramOutputRequest(program, tail, follow)):
            known = [*reply.known]
            yield reply.data
        if program in known:
            return
    if program in known:
        raise LaunchError(f"no output of {program} is kept", "ddplaunch run --log-dir DIR keeps all that it prints")
    near = closest_match(program, known)
    hint = f"did you mean {near}?" if near else f"its programs: {join_names(known) or 'none'}"
    raise UsageError(f"{found.run} has no program {sanitize_line(program, 60)}", hint)


def _logs_of_job(job: SubmittedJob, word: str, options: Sequence[str], follow: bool, tail: int) -> str | int:
    """Print the output of a submitted job, and return an exit code; or return the name of its run, if recorded here."""
    which = resolve_job_id(job, word, "logs")
    if options:
        seen = job_state(job, which)
        if seen.code is None:
            there = require_running(job, which)
            words = ["logs", run_name(job, there), *options, *(["--follow"] if follow else [])]
            words += ["--tail", str(tail)] if tail else []
            return run_on_nodes(job, there, words, everywhere=True)
        if name := find_recorded_run(job, seen):
            return name
        what = f"job {which.text} has ended, and the output of its ranks is not on this machine"
        raise LaunchError(what, f"ddplaunch logs {which.text} prints its log")
    files, scheduler, has_ended = job.log_paths(which.index), get_scheduler(job), False
    if not (files[0] and os.path.exists(files[0])):  # without a query of the scheduler if it exists
        seen = job_state(job, which, scheduler)
        files, has_ended = (seen.log_path, seen.stderr_path), seen.code is not None
        if seen.is_pending and not follow:
            print_line(f"job {which.text} {seen.description}")
    last_bytes = _last_lines_size(files[0], tail) if tail else None
    ended = job.get_end(which.index) is not None
    if follow and ended and scheduler.can_requeue:
        ended = job_state(job, which).code is not None
    with closing(LogFollower(which, scheduler, files, last_bytes, tail)) as follower:
        if has_ended and follower.reads_files and not os.path.exists(files[0] or ""):
            raise nothing_kept_error(which, seen)
        if follow and not ended:
            follower.run()
            store_end(job, which, follower.last_seen)
        else:
            follower.copy_logs()
    return 0


def _last_lines_size(path: str | None, lines: int) -> int:
    """Return the size of the last lines of a log."""
    try:
        with open(path or "", "rb") as file:
            return len(kept.read_last_lines(file, lines))
    except OSError:  # it does not exist yet
        return 0


def _chosen_ranks(found: FoundRun, typed: str | None, failed: bool) -> list[int]:
    """Return the ranks of --rank or --failed; none means all ranks."""
    if failed and typed is not None:
        raise UsageError("--rank and --failed contradict each other", "leave one of them out")
    if failed:
        ranks = kept.failed_ranks(found.record) if found.record else []
        if not ranks:
            raise UsageError(f"no rank of {found.run} has failed", f"ddplaunch logs {found.run}")
        return ranks
    if typed is None:
        return []
    numbers = [parse_int(word) for word in typed.split(",")]
    chosen = [number for number in numbers if number is not None]
    if len(chosen) != len(numbers):
        what = f"--rank {sanitize_line(typed, 60)}: expected ranks like 3 or 0,3"
        raise UsageError(what, "without it, all ranks are shown")
    size = found.record.world_size if found.record else None
    if size is not None and (beyond := [number for number in chosen if not 0 <= number < size]):
        raise UsageError(f"--rank {beyond[0]}: {found.run} has {format_rank_range(0, size - 1)}", f"--rank {size - 1}")
    return chosen


def _output_chunks(
    found: FoundRun, ranks: Sequence[int], follow: bool, part: Part
) -> list[Iterator[tuple[int, bytes]]]:
    """Return streams of (rank, data): one for each rank, or a single one to ``follow``."""
    job, record = found.running, found.record
    in_files = bool(record and record.log_dir)
    if job and not in_files:
        pieces = kept.read_live(job.path, ranks, part, follow=follow)
        pieces = _explain_if_empty(found, pieces) if part.since is None else pieces
        pieces = _stored_if_ended(found, pieces, ranks, part)
        return [pieces] if follow else [iter([piece]) for piece in pieces]
    if job and follow:
        return [kept.follow_files(found.run, job.path, ranks, part)]
    files = kept.rank_log_files(found.run)
    here = [rank for rank in ranks or files if rank in files]
    if not here and record and record.fate is RunState.DONE and record.world_size > 1 and not record.log_dir:
        click.echo(f"these ranks of {found.run} have printed nothing on this machine", err=True)
    elif not here:
        raise LaunchError(*_why_no_output(found))
    return [kept.read_stored_output(files, [rank], part) for rank in here]


def _stored_if_ended(
    found: FoundRun, pieces: Iterator[tuple[int, bytes]], ranks: Sequence[int], part: Part
) -> Iterator[tuple[int, bytes]]:
    """Yield the same pieces; if the job has ended since it was found, its stored output."""
    try:
        yield from pieces
    except JobEnded:
        if (record := history_store.read_run_record(found.run)) is None:
            raise
        yield from chain.from_iterable(_output_chunks(FoundRun(found.run, None, record), ranks, False, part))


def parse_moment(text: str, now: float) -> float:
    """Parse a time in the past: "10m" before now, "14:30" in the last 24 hours, "2026-11-26 14:30"; or UsageError."""
    ago = parse_seconds(text)
    if ago is not None and ago >= 0:
        return now - ago
    with suppress(ValueError):
        time_of_day = clock.fromisoformat(text)
        found = datetime.combine(datetime.fromtimestamp(now, time_of_day.tzinfo), time_of_day)
        return (found if found.timestamp() <= now else found - timedelta(days=1)).timestamp()
    with suppress(ValueError, OverflowError):
        if (found := datetime.fromisoformat(text)).timestamp() <= now:
            return max(0.0, found.timestamp())
    what = f"--since {sanitize_line(text, 60)}: expected a time in the past, like 10m, 14:30 or 2026-11-26 14:30"
    raise UsageError(what, "ddplaunch logs --since 10m")


def _explain_if_empty(found: FoundRun, pieces: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the same pieces; if there are none, print why."""
    if first := next(pieces, None):
        yield from chain([first], pieces)
    elif found.record and found.record.world_size == 1:
        click.echo("the only rank of a job prints straight to its terminal; --log-dir keeps a copy", err=True)
    else:
        click.echo(f"the ranks of {found.run} on this machine have printed nothing", err=True)


def _why_no_output(found: FoundRun) -> tuple[str, str]:
    """Return why there is no output, and a hint."""
    record, hint = found.record, "ddplaunch run --log-dir DIR keeps all that ranks print"
    if record and record.log_dir:
        return f"{sanitize_line(record.log_dir)} has no output of such a rank", "the folder may have been removed"
    if record and record.world_size == 1:
        return f"the only rank of {found.run} printed straight to its terminal", hint
    if record and (hosts := history_store.hosts_elsewhere([record])):
        return describe_elsewhere(found.run, hosts)
    if record and record.fate is RunState.LOST:
        return f"the launcher of {found.run} was killed, and the output in its memory is lost", hint
    return f"no output of {found.run} is kept here", hint


def format_stream(pieces: Iterable[tuple[int, bytes]], *, prefix: bool, as_json: bool) -> Iterator[bytes]:
    """Format pieces of output for stdout; with ``prefix`` or JSON, only complete lines at a time."""
    if not prefix and not as_json:
        yield from (data for _, data in pieces)
        return
    for rank, lines in regroup_by_line(pieces):
        if as_json:
            objects = ({"rank": rank, "line": line.decode(errors="replace")} for line in lines[:-1].split(b"\n"))
            yield b"".join(json.dumps(each).encode() + b"\n" for each in objects)
        else:
            yield add_prefix(b"[%d] " % rank, lines)


def regroup_by_line(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Regroup pieces so that each one ends with a line."""
    unfinished: dict[int, bytes] = {}  # lines
    for rank, data in pieces:
        lines, newline, rest = (unfinished.pop(rank, b"") + data).rpartition(b"\n")
        if len(rest) > MAX_LINE:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if rest:
            unfinished[rank] = rest
        if newline:
            yield rank, lines + newline
    for rank, rest in unfinished.items():
        yield rank, rest + b"\n"


def align_equal_lines(sources: Iterable[Iterator[tuple[int, bytes]]]) -> Iterator[MergedLines]:
    """Merge the equal lines of stored outputs: rank after rank, each line with its equals of other ranks."""
    equal = LineMerger(math.inf, ranks_unknown=True)
    reading: dict[int, Iterator[tuple[int, bytes]]] = {}
    for lines in map(regroup_by_line, sources):
        if first := next(lines, None):
            reading[first[0]] = chain([first], lines)
    for rank in [*reading]:
        while True:
            for each, lines in [*reading.items()]:
                while equal.held_count(each) < LOOKAHEAD_LINES:
                    if (piece := next(lines, None)) is None:
                        del reading[each]
                        break
                    equal.add(each, 1, piece[1], 0.0)
            if not equal.held_count(rank):
                break
            for _ in range(min(equal.held_count(rank), LOOKAHEAD_LINES // 2)):
                equal.emit_first(rank)
            yield from equal.take_output()


def merge_live(pieces: Iterable[tuple[int, bytes]]) -> Iterator[MergedLines]:
    """Merge the equal lines that ranks print at the same time, as they come."""
    equal, arrived = LineMerger(ranks_unknown=True), SimpleQueue[tuple[int, int, bytes] | BaseException | None]()

    def read() -> None:
        try:
            for rank, lines in regroup_by_line(pieces):
                arrived.put((rank, 1, lines))
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    Thread(target=read, daemon=True).start()
    while True:
        due = equal.next_flush_time
        try:
            found = arrived.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except Empty:
            found = 0, 1, b""  # flush the oldest line
        if isinstance(found, BaseException):
            raise found
        if found is None:
            break
        equal.add(*found, time.monotonic())
        yield from equal.take_output()
    equal.flush_until(math.inf)
    yield from equal.take_output()


def add_rank_prefix(found: Iterable[MergedLines]) -> Iterator[bytes]:
    """Prefix each line with the ranks that printed it."""
    width = 0
    for ranks, _, lines in found:
        prefix = format_for_ranks(DEFAULT_PREFIX, ranks)
        width = max(width, len(prefix) if len(prefix) < 10 else 0)
        yield add_prefix(f"{prefix:<{width}} ".encode(), lines)
